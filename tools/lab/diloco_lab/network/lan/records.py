"""What was measured over single lines, and the file that keeps it: `tools/lab/lan.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from diloco_lab.driver.records import read_document

KINDS = ("round", "streaming", "mixed")
MODES = ("sync", "quorum", "async")
# Codecs up and down.
USUAL, SHORT_REPLIES = ("bf16", "fp32"), ("bf16", "bf16")
INT8, INT4Z = ("int8", "int8"), ("int4z", "int4z")
PAIRS = (USUAL, SHORT_REPLIES, INT8, INT4Z)


@dataclass(frozen=True)
class Measurement:
    """One configuration. Bytes are counted on the wire, headers of TCP, IP and Ethernet included."""

    kind: str  # one of KINDS
    parameters: int
    workers: int
    wire_dtype: str
    reply_dtype: str
    broker_bits_per_s: float  # of the broker's own line, each way
    worker_bits_per_s: tuple[float, ...]  # of each worker's line, each way
    round_trip_s: float  # of the idle line of a worker
    # Of each repeat. Round: from the beginning of the hook until the new version is in all models.
    # Streaming: how long training stood still in `sync_every` steps. Mixed: in one sync, the fast ones.
    seconds: tuple[float, ...]
    line_seconds: float  # what the bytes of one sync take at least, on the busiest line
    bytes_up: float  # of one worker in one sync
    bytes_down: float
    fragments: int = 1
    delay_steps: int = 0  # from a fragment's slot to its merge, as it came out
    sync_every: int | None = None
    step_s: float | None = None
    broker_cpu_s: float | None = None  # of one sync
    worker_cpu_s: float | None = None  # of one worker, of one sync
    heartbeat_p99_s: float | None = None
    heartbeats: int | None = None  # that the p99 is of
    hidden: float | None = None  # share of a sync during which training went on
    sync_seconds: float | None = None  # streaming: a sync of the whole model with nothing hidden
    copy_s: float | None = None  # streaming: to copy all parameters of a worker once
    mode: str = "sync"
    quorum: int | None = None
    grace_s: float | None = None
    slow_seconds: tuple[float, ...] = ()  # mixed: what the worker on the slow line waits
    cores: int = 0  # that broker and workers shared
    load: float = 0.0  # of the machine in the last minute before: processes that wanted a core
    at: str = ""

    @property
    def median_s(self) -> float:
        return median(self.seconds)

    @property
    def pair(self) -> tuple[str, str]:
        return self.wire_dtype, self.reply_dtype

    @property
    def key(self) -> tuple[Any, ...]:
        """What it was measured on: a later measurement of the same takes its place."""
        lines = (self.broker_bits_per_s, self.worker_bits_per_s)
        how = (self.fragments, self.mode, self.quorum)
        return (self.kind, self.parameters, self.workers, *self.pair, *lines, *how)


@dataclass(frozen=True)
class LanFile:
    """All measurements, with the machine and the command of the last ones."""

    command: str
    at: str
    machine: Mapping[str, Any]
    measurements: tuple[Measurement, ...] = ()

    def with_older(self, older: LanFile) -> LanFile:
        """With those of another file that have not been measured again."""
        found = {each.key: each for each in (*older.measurements, *self.measurements)}
        in_order = sorted(found.values(), key=_order)
        return LanFile(self.command, self.at, self.machine, tuple(in_order))


def read(path: Path) -> LanFile:
    """Raises BadFile."""
    return read_document(path, LanFile, {"measurements": Measurement})


def _order(of: Measurement) -> tuple[Any, ...]:
    codecs = PAIRS.index(of.pair) if of.pair in PAIRS else len(PAIRS)
    line, mode = -of.broker_bits_per_s, MODES.index(of.mode)
    return (KINDS.index(of.kind), of.parameters, of.workers, codecs, line, mode)
