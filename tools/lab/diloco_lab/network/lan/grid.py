"""The measurements over single lines, their repeats, and their file: `tools/lab/lan.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from diloco_lab.bench.sizes import parameters_of
from diloco_lab.driver.tables import rate_of

MODES = ("sync", "quorum", "async")
Pair = tuple[str, str]  # codecs up and down
USUAL, SHORT_REPLIES = ("bf16", "fp32"), ("bf16", "bf16")
INT8, INT4Z = ("int8", "int8"), ("int4z", "int4z")


@dataclass(frozen=True)
class Measurement:
    """One configuration. Bytes are counted on the wire, headers of TCP, IP and Ethernet included."""

    kind: str  # "round", "streaming" or "mixed"
    parameters: int
    workers: int
    wire_dtype: str
    reply_dtype: str
    broker_bits_per_s: float  # of the broker's own line, each way
    worker_bits_per_s: tuple[float, ...]  # of each worker's line, each way
    round_trip_s: float  # of the idle line of a worker
    # Of each repeat. Round: from the beginning of the hook until the new version is in all models.
    # Streaming: the standstill in `sync_every` steps. Mixed: that of the fast ones in one sync.
    seconds: tuple[float, ...]
    line_seconds: float  # least time of the bytes of one sync, on the busiest line
    bytes_up: float  # of one worker in one sync
    bytes_down: float
    fragments: int = 1
    delay_steps: int = 0  # from a fragment's slot to its merge
    sync_every: int | None = None
    step_s: float | None = None
    broker_cpu_s: float | None = None  # of one sync
    worker_cpu_s: float | None = None  # of one worker, of one sync
    heartbeat_p99_s: float | None = None
    heartbeats: int | None = None  # number of them behind the p99
    hidden: float | None = None  # share of a sync during which training continued
    sync_seconds: float | None = None  # streaming: a sync of the whole model without overlap
    copy_s: float | None = None  # streaming: to copy all parameters of a worker once
    mode: str = "sync"
    quorum: int | None = None
    grace_s: float | None = None
    slow_seconds: tuple[float, ...] = ()  # mixed: waits of the worker on the slow line
    cores: int = 0  # shared by broker and workers
    load: float = 0.0  # of the machine in the minute before: processes that needed a core
    at: str = ""

    @property
    def median_s(self) -> float:
        return median(self.seconds)

    @property
    def pair(self) -> Pair:
        return self.wire_dtype, self.reply_dtype


@dataclass(frozen=True)
class LanFile:
    """All measurements, with the machine and the command of the last ones."""

    command: str
    at: str
    machine: Mapping[str, Any]
    measurements: tuple[Measurement, ...] = ()


FAST, MEDIUM, SLOW = LINES = (1e9, 1e8, 5e7)  # bits a second
# Bits of a parameter on the wire, to estimate the time of a sync.
BITS = {"bf16": 16.8, "fp32": 33.5, "int8": 8.5, "int4z": 2.4}
EFFICIENCY = 0.93  # of a line, for the estimate
CPU_S = 12e-9  # seconds for each parameter and worker, for the estimate
MOST_S = 60.0  # a sync with a longer estimate is left out, and computed
AIM_S, MOST_REPEATS = 14.0, 3  # seconds of all repeats of one configuration, and their bound
WORKERS = 2
# The largest model, with as many workers as memory allows; the planner is compared with these rows.
LARGEST, WORKERS_OF_LARGEST = "150M", (1, 2, 4)
PAIRS_OF_LARGEST = (USUAL, SHORT_REPLIES, INT4Z)
FRAGMENTS = 4
# Simulated steps between two syncs of a fragment, and their time as a multiple of a sync's: with H = 500
# and steps of 1 s it is 8 for 1B, bf16/fp32, 2 workers, 1 Gb/s.
STREAMING_STEPS, STREAMING_TIMES = 48, 3.0
# One worker on a slow line beside two on fast ones.
FAST_WORKERS = 2
MIXED_STEPS, MIXED_STEP_S, MIXED_SYNCS = 20, 0.2, 4
GRACE_S = 0.5


@dataclass(frozen=True)
class Part:
    """Measurements that share a run: one start of broker and workers."""

    kind: str
    size: str
    pair: Pair
    workers: int
    lines: tuple[float, ...]  # of all members; mixed: of the fast ones
    mode: str = "sync"

    @property
    def name(self) -> str:
        rates = ", ".join(rate_of(each) for each in self.lines)
        people = f"{self.workers} worker{'s' if self.workers > 1 else ''}"
        how = f", {self.mode}" if self.kind == "mixed" else ""
        return f"{self.kind}{how}: {self.size}, {'/'.join(self.pair)}, {people}, {rates}"


def guess(parameters: int, pair: Pair, workers: int, bits_per_s: float) -> float:
    """The estimated seconds of a sync: all bytes over the broker's line, or the CPU."""
    bits = max(BITS[each] for each in pair) * parameters * workers
    return max(bits / bits_per_s / EFFICIENCY, CPU_S * parameters * workers)


def repeats(seconds: float, most: int = MOST_REPEATS) -> int:
    """The number of measurements of a sync of this length."""
    return max(1, min(most, int(AIM_S / seconds)))


def everything() -> list[Part]:
    """The whole of `make lan`, small models first."""
    parts = [
        Part("round", size, pair, WORKERS, LINES)
        for size in ("10M", "50M", "125M")
        for pair in (USUAL, INT8, INT4Z)
    ]
    parts += [
        Part("round", LARGEST, pair, workers, (FAST,))
        for pair in PAIRS_OF_LARGEST
        for workers in WORKERS_OF_LARGEST
    ]
    parts += [Part("round", "50M", pair, 8, (FAST,)) for pair in (USUAL, INT4Z)]
    parts += [
        Part("streaming", "50M", USUAL, WORKERS, (FAST,)),
        Part("streaming", "50M", SHORT_REPLIES, WORKERS, (FAST,)),
        Part("streaming", "50M", INT4Z, WORKERS, (FAST, MEDIUM)),
        Part("streaming", "125M", INT4Z, WORKERS, (FAST,)),
    ]
    return parts + [
        Part("mixed", "10M", pair, FAST_WORKERS + 1, (FAST,), mode)
        for pair in (USUAL, INT8)
        for mode in MODES
    ]


def quick() -> list[Part]:
    """One of each kind: a minute or two."""
    return [
        *(Part("round", "10M", pair, WORKERS, (FAST, MEDIUM)) for pair in (USUAL, INT8, INT4Z)),
        Part("streaming", "10M", USUAL, WORKERS, (FAST,)),
        Part("mixed", "10M", INT4Z, FAST_WORKERS + 1, (FAST,), "quorum"),
    ]


def too_long(part: Part) -> dict[float, float]:
    """The lines of a part on which one sync takes too long, with its estimated seconds."""
    times = {
        line: guess(parameters_of(part.size), part.pair, part.workers, line) for line in part.lines
    }
    return {line: seconds for line, seconds in times.items() if seconds > MOST_S}
