"""The configuration of a broker: what the command line says, checked in one place."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass

from diloco_protocol.chunks import CHUNK_ELEMENTS
from diloco_protocol.codecs import wire_dtype
from diloco_protocol.errors import UsageError
from diloco_protocol.messages import RunConfig

DEFAULT_BIND = "tcp://127.0.0.1:8512"
DEFAULT_FEED = "tcp://127.0.0.1:8513"


@dataclass(frozen=True)
class BrokerConfig:
    """Options of a broker; each equals the command-line option of the same name.

    Attributes:
        workers: round one waits for so many workers.
        min_workers: a round never closes with fewer contributions.
        sync_every: H, inner (optimizer) steps between two pushes.
        outer_lr: learning rate eta of the outer optimizer.
        outer_momentum: momentum mu of the outer optimizer.
        nesterov: Nesterov's form of the momentum (the paper's); False is the classical form.
        wire_dtype: dtype of pseudo-gradients on the way up: fp32, bf16 or fp16.
        reply_dtype: dtype of parameters on the way down: fp32, bf16 or fp16.
        bind: address of the control socket; port 0 or * picks a free one.
        feed: address of the status feed; likewise.
        heartbeat_timeout: seconds of silence after which a worker counts as dead; 0 = never.
        disconnect_grace: seconds that a worker whose connection broke has to come back.
        recover_wait: seconds that a broker without parameters waits for all `workers` when one of
            them holds a version of an earlier run; then the newest is taken.
        insecure: allow an address that is not loopback although anyone who reaches it can join.
        chunk_elements: elements of a chunk on the wire; not an option of the command line, since
            smaller chunks are slower and larger ones are refused by the frame limits.

    Raises:
        UsageError: for a value that cannot work, naming it.
    """

    workers: int = 1
    min_workers: int = 1
    sync_every: int = 500
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    nesterov: bool = True
    wire_dtype: str = "bf16"
    reply_dtype: str = "fp32"
    bind: str = DEFAULT_BIND
    feed: str = DEFAULT_FEED
    heartbeat_timeout: float = 120.0
    disconnect_grace: float = 1.0
    recover_wait: float = 10.0
    insecure: bool = False
    chunk_elements: int = CHUNK_ELEMENTS

    def __post_init__(self) -> None:
        for name in ("workers", "min_workers", "sync_every"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        _require(
            self.min_workers <= self.workers,
            "min_workers",
            self.min_workers,
            f"at most workers, which is {self.workers}",
        )
        _require(_positive(self.outer_lr), "outer_lr", self.outer_lr, "a finite number above 0")
        _require(0 <= self.outer_momentum < 1, "outer_momentum", self.outer_momentum, "in [0, 1)")
        _require(
            1 <= self.chunk_elements <= CHUNK_ELEMENTS,
            "chunk_elements",
            self.chunk_elements,
            f"from 1 to {CHUNK_ELEMENTS}",
        )
        for name in ("heartbeat_timeout", "disconnect_grace", "recover_wait"):
            value = getattr(self, name)
            _require(
                value >= 0 and math.isfinite(value), name, value, "a finite number, at least 0"
            )
        wire_dtype(self.wire_dtype)
        wire_dtype(self.reply_dtype)
        for name in ("bind", "feed"):
            _check_address(name, getattr(self, name), insecure=self.insecure)

    @property
    def run_config(self) -> RunConfig:
        """The part that workers are told."""
        return RunConfig(
            mode="sync",
            sync_every=self.sync_every,
            wire_dtype=self.wire_dtype,
            reply_dtype=self.reply_dtype,
            heartbeat_timeout=self.heartbeat_timeout,
            chunk_elements=self.chunk_elements,
        )


def _positive(value: float) -> bool:
    return math.isfinite(value) and value > 0


def _require(holds: bool, name: str, value: object, what: str) -> None:
    if not holds:
        raise UsageError(f"--{name.replace('_', '-')} is {value}; it must be {what}.")


def _check_address(name: str, address: str, *, insecure: bool) -> None:
    wrong = UsageError(
        f"--{name} is {address!r}; it must be an address like tcp://127.0.0.1:8512 "
        "(port * picks a free one)."
    )
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or "/" in rest or not (port == "*" or port.isdecimal()):
        raise wrong
    if host.startswith("[") != host.endswith("]") or (":" in host and host[0] != "["):
        raise wrong
    if port != "*" and int(port) > 65535:
        raise wrong
    if not insecure and not _is_loopback(host.strip("[]")):
        raise UsageError(
            f"--{name} {address} can be reached from other machines, and there is no "
            "authentication: anyone who reaches it could change the model. Bind to 127.0.0.1 and "
            "use an SSH tunnel, or give --insecure if you trust everyone on that network."
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
