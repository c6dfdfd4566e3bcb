"""The processes of one experiment, each at its member of the network."""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple

from diloco_lab.bench.process_pool import ProcessPool
from diloco_lab.driver.roles import RoleProcess
from diloco_lab.network.namespaces import HUB, Network


class Place(NamedTuple):
    """A network and the processes in it."""

    network: Network
    pool: ProcessPool

    def role(self, role: str, member: str) -> RoleProcess:
        """The process that plays this role at this member."""
        return self.pool.role(role, f"{role}-{member}", self.network.inside(member))

    def trainers(self, count: int | None = None) -> list[RoleProcess]:
        """Those of the first workers, or of all."""
        return [self.role("trainer", name) for name in self.network.workers[:count]]


def at_the_hub(network: Network) -> dict[str, Any]:
    """Options of `ProcessPool.broker` for one at the hub that accepts every connection."""
    return {"inside": network.inside(HUB), "bind": network.at(HUB), "insecure": True}


def dtypes(pair: tuple[str, str]) -> dict[str, Any]:
    """The options of a broker for codecs up and down."""
    return {"wire_dtype": pair[0], "reply_dtype": pair[1]}


def now() -> str:
    """The time for a record."""
    return datetime.now().astimezone().isoformat(timespec="seconds")
