"""The public face of a relay: a `Broker` for a site whose versions its parent makes."""

from __future__ import annotations

import secrets
import socket
from dataclasses import replace

from diloco_broker.config import BrokerConfig
from diloco_broker.relay.loop import RelayLoop
from diloco_broker.shell.broker import Broker
from diloco_protocol.addresses import several
from diloco_protocol.clients.address_file import check_address
from diloco_protocol.clients.keys import Keys
from diloco_protocol.dtypes import check_wire_dtype
from diloco_protocol.errors import UsageError
from diloco_protocol.messages import LONGEST_WORKER_ID, is_worker_id
from diloco_worker.transport.broker_address import Given


class RelayBroker(Broker):
    """A relay: `run()` it in this thread, or `start()` and `stop()` it in one of its own, as any broker.

    Args:
        config: options of the site: addresses, `workers`, `min_workers`, `quorum`, `keys`, liveness, and
            the `wire_dtype` of its workers. What the parent's run says takes the place of the rest.
        parent: the address of the broker that it takes part at, several with commas in between to be
            tried in turn, or a function that returns it.
        name: what it is called there, as a worker; default: host name and port.
        parent_wire_dtype: what its pushes travel in; default: what those of the parent's run do.
        keys: those that the parent asks for.

    Raises:
        UsageError: an address that cannot be bound, or an option that a relay has no use for.
    """

    def __init__(
        self,
        config: BrokerConfig,
        parent: Given,
        *,
        name: str | None = None,
        parent_wire_dtype: str | None = None,
        keys: Keys | None = None,
    ) -> None:
        name = name or default_name(config)
        where = check(config, parent, name, parent_wire_dtype)
        self.config = replace(config, relays=True)
        self._relay_loop = RelayLoop(self.config, where, name, parent_wire_dtype, keys=keys)
        self._loop = self._relay_loop
        self.address = self._loop.sockets.address
        self.feed_address = self._loop.sockets.feed_address
        self._failure = None
        self._thread = None

    @property
    def why_it_failed(self) -> str | None:
        """Why it could not go on, a sentence; None where it was asked to end, or the run is over."""
        return self._relay_loop.failure


def check(config: BrokerConfig, parent: Given, name: str, wire_dtype: str | None) -> Given:
    """The address of the parent, with its scheme; raises UsageError for what a relay cannot have."""
    if not is_worker_id(name):
        raise UsageError(
            f"The name is {name!r:.80}; it must be 1 to {LONGEST_WORKER_ID} printable characters."
        )
    if wire_dtype is not None:
        check_wire_dtype(wire_dtype)
    if config.save_dir is not None:
        raise UsageError("A relay saves nothing: its parent does. Leave --save-dir out.")
    if not isinstance(parent, str):
        return parent
    return ",".join(several(check_address("--parent", parent)))


def default_name(config: BrokerConfig) -> str:
    """The host's name and the port: two relays of a machine differ, one that is started again does not.

    Where the system picks the port the ending is random.
    """
    port = config.bind.rpartition(":")[2]
    ending = port if port.isdecimal() and port != "0" else secrets.token_hex(3)
    return f"relay-{socket.gethostname()[:40]}-{ending}"
