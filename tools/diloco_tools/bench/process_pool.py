"""The processes of a benchmark: roles, which are kept for the next part, and brokers."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from diloco_tools.bench import machine
from diloco_tools.bench.broker_process import BrokerProcess, running_broker
from diloco_tools.bench.raw_tcp import Ends, RawSample, RawTcp
from diloco_tools.bench.role_process import RoleProcess
from diloco_tools.processes import Children


class ProcessPool:
    """A context manager that starts processes and ends them all when it is left.

    Args:
        folder: for logs and checkpoints; it exists.
        bytes_raw: that each measurement of raw TCP moves.

    Attributes:
        skipped: sentences on what could not be measured.
        raw_samples: all measurements of raw TCP.
    """

    def __init__(self, folder: Path, bytes_raw: int) -> None:
        self.folder = folder
        self.skipped: list[str] = []
        self._roles: dict[str, RoleProcess] = {}
        self._children = Children(folder)
        self._bytes_raw = bytes_raw
        self._raw: RawTcp | None = None
        self.raw_samples: list[RawSample] = []

    def __enter__(self) -> ProcessPool:
        machine.allow_many_files()
        return self

    def __exit__(self, *error: object) -> None:
        self._children.__exit__(*error)

    def role(self, role: str, name: str = "") -> RoleProcess:
        """The process of this name, started in its role if it is new."""
        name = name or role
        if name not in self._roles:
            self._roles[name] = self._children.add(RoleProcess(role, name, self.folder))
        return self._roles[name]

    def trainers(self, count: int) -> list[RoleProcess]:
        """Processes with a model, an optimizer and the hook."""
        return [self.role("trainer", f"trainer-{i}") for i in range(count)]

    def fake_workers(self, count: int) -> list[RoleProcess]:
        """Processes that speak the protocol and have no model."""
        return [self.role("fake_worker", f"fake-worker-{i}") for i in range(count)]

    def dismiss(self, *starts: str) -> None:
        """End the roles whose names start so, and with them their memory."""
        for name in [each for each in self._roles if each.startswith(starts)]:
            self._roles.pop(name).end()

    def start_afresh(self) -> None:
        """End all roles: one of them has failed, and the others may wait for it."""
        self.dismiss("")
        self._raw = None

    @property
    def raw(self) -> RawTcp:
        """Raw TCP between two processes."""
        if self._raw is None:
            ends = Ends(self.role("raw", "raw-sender"), self.role("raw", "raw-receiver"))
            self._raw = RawTcp(ends, self._bytes_raw, self.raw_samples)
        return self._raw

    def broker(self, *options: str) -> AbstractContextManager[BrokerProcess]:
        """A broker for as long as the context lasts."""
        return running_broker(self._children, options)
