"""Every option of a broker, declared once: the field, the option of `diloco-broker serve`, its help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from diloco_broker.config.option import (
    ADDRESS,
    BELOW_HALF,
    BELOW_ONE,
    DURATION,
    FINITE,
    SWITCH,
    UP_TO_ONE,
    Panel,
    above_0_up_to,
    one_of,
    path_of,
    schedule,
    up_to,
    whole,
    within,
    word_or,
)
from diloco_broker.config.schedule import CONSTANT, MOST_ROUNDS, OuterSchedule, Schedule
from diloco_protocol.addresses import DEFAULT_CONTROL_ADDRESS, DEFAULT_FEED_ADDRESS
from diloco_protocol.chunks import CHUNK_ELEMENTS
from diloco_protocol.dtypes import REPLY_DTYPES, WIRE_DTYPES
from diloco_protocol.fragments import PATTERNS, longest_delay
from diloco_protocol.messages import MERGES, MODES, WEIGHTS
from diloco_protocol.quantities import parse_duration
from diloco_protocol.ranges import MOST

AGGREGATES = ("mean", "clip-median-norm", "trimmed-mean", "coordinate-median")
AUTO = "auto"
MOST_DELTA_NORM = 1e30

# What no run has use for. Whoever may steer may change some of these while the run goes on, and beyond
# this the change alone would end the training: parameters overflow, a boundary never comes.
MOST_WORKERS = 10_000
MOST_TENSOR_THREADS = 64
MOST_STEPS = 1_000_000  # H
HIGHEST_LR = 10.0
LONGEST_GRACE_S = 86_400.0  # a day
SHORTEST_LEASE_S, LONGEST_LEASE_S = 0.5, 3600.0
LONGEST_S = 30 * 86_400.0

# Chosen by measuring; docs/evidence.md has the figures.
USUAL_WARMUP = "linear:200:0.5"
USUAL_OUTERS = {"sync": "nesterov", "async": "dn"}  # by mode, where none is named

RUN = Panel("The run")
OUTER = Panel("Outer optimizer")
ASYNC = Panel("Asynchronous mode")
FRAGMENTS = Panel("Streaming fragments")
REDUCING = Panel("Rounds and reducing")
SAVING = Panel("Checkpoints")
WIRE = Panel("Wire and liveness")
STANDBY = Panel("Hot standby")
NOT_ON_THE_COMMAND_LINE = Panel("")


def usual_buffer(mode: str, workers: int) -> int:
    """N of a broker that was not told: a round's mean is one gradient, an asynchronous push another."""
    return workers if mode == "async" else 1


@dataclass(frozen=True)
class Options:
    """Each field equals the option of `diloco-broker serve` of the same name, which its text explains.

    `BrokerConfig` is the same, checked. Times are in seconds.
    """

    mode: str = RUN.option(
        "sync", one_of(*MODES), "sync: rounds, all together; async: each worker by itself."
    )
    workers: int = RUN.option(
        1,
        whole(1, MOST_WORKERS),
        "Round one waits for this number of workers; in async mode, how many are planned.",
    )
    min_workers: int = RUN.option(
        1, whole(1, MOST_WORKERS), "A round never closes with fewer contributions."
    )
    sync_every: int = RUN.option(
        500,
        whole(1, MOST_STEPS),
        "H: optimizer steps of a worker between two pushes of a fragment.",
    )

    max_workers: int = RUN.option(
        1000, whole(1, MOST_WORKERS), "Workers that may be here at a time; more are refused."
    )
    max_parameters: int | None = RUN.option(
        None,
        whole(0),
        "Refuse a worker whose model has more elements, of all its tensors; 0: any number.",
        if_none="as many as the machine, or its container, has memory for",
    )

    tensor_threads: int = RUN.option(
        0,
        whole(0, MOST_TENSOR_THREADS),
        "Threads that decode, add up and step chunks, to the same bits; 0: one less than there are "
        "cores, from 1 to 4.",
    )

    max_rounds: int | None = RUN.option(
        None,
        whole(1, MOST_ROUNDS),
        "The run is over after this number of rounds; in async mode, of applied pushes.",
        if_none="until an operator ends it",
    )
    token_budget: int | None = RUN.option(
        None,
        whole(1, MOST),
        "The run is over once the counted work was computed from this number of tokens, as workers "
        "report them.",
        if_none="any number",
    )
    max_time: str | None = RUN.option(
        None,
        DURATION,
        "The run is over with the round in which it has been trained for so long: 90s, 30m, 36h or 7d.",
        if_none="any time",
    )

    outer: str | None = OUTER.option(
        None,
        one_of("nesterov", "dn", "fedbuff", "sgd"),
        "nesterov, dn (Delayed Nesterov), fedbuff (a buffer of N gradients, then a Nesterov step) "
        "or sgd (no momentum).",
        if_none="nesterov in sync, dn in async",
    )
    outer_lr: float = OUTER.option(
        0.7, above_0_up_to(HIGHEST_LR), "Learning rate of the outer optimizer."
    )
    outer_momentum: float = OUTER.option(0.9, BELOW_ONE, "Momentum of the outer optimizer.")
    outer_lr_schedule: str = OUTER.option(
        CONSTANT,
        schedule("F", "above 0, at most 1", lambda given: 0 < given.final <= 1),
        "constant; linear:R[:F] or cosine:R[:F]: within R rounds of each fragment it falls to F times "
        "--outer-lr. F is 0.1 if left out.",
    )
    outer_momentum_warmup: str = OUTER.option(
        USUAL_WARMUP,
        schedule("M", "in [0, 1)", lambda given: 0 <= given.start < 1),
        "constant; linear:R[:M] or cosine:R[:M]: within R rounds of each fragment it rises from M to "
        "--outer-momentum, where that is larger. M is 0 if left out.",
    )
    nesterov: bool = OUTER.option(
        True, SWITCH, "Nesterov's form of the momentum, as in the paper; else the classical form."
    )
    dn_buffer: int | None = OUTER.option(
        None,
        whole(1, MOST_WORKERS),
        "N of dn and fedbuff: gradients to a momentum step.",
        if_none="the workers in async, 1 in sync",
    )
    dn_c: float = OUTER.option(0.0, FINITE, "c of Delayed Nesterov, from 0 to 1/N.")
    # paper: Liu et al. 2024, algorithm 3.
    dn_variant: str = OUTER.option(
        "paper", one_of("paper", "direct"), "paper, or direct, which counts gradients twice."
    )

    staleness_weight: str = ASYNC.option(
        "none",
        one_of("none", "poly"),
        "none, or poly: a push that is s versions old counts (1 + s)^-1/2.",
    )
    max_staleness: int | None = ASYNC.option(
        None, whole(0), "Refuse pushes that start from older versions.", if_none="none is too old"
    )
    dylu: bool = ASYNC.option(
        False, SWITCH, "Dynamic Local Updates: fewer steps for slower workers."
    )
    dylu_min_steps: int | None = ASYNC.option(
        None, whole(1), "Least steps of a slow worker.", if_none="as few as fit"
    )
    staging_slots: int = ASYNC.option(2, whole(1, MOST_WORKERS), "Submissions under way at a time.")
    staging_deadline: float = ASYNC.option(
        30.0,
        above_0_up_to(LONGEST_S, " seconds"),
        "Seconds without progress after which one loses its slot to others.",
    )

    num_fragments: int = FRAGMENTS.option(
        1,
        whole(1, 1000),  # a worker that joins again names a version of each in its header
        "P: parts that the model travels in, one after the other within H steps.",
    )
    fragment_pattern: str = FRAGMENTS.option(
        "strided",
        one_of(*PATTERNS),
        "strided (layers i, i+P, ...), contiguous or balanced (by bytes).",
    )
    fragment_plan: str | None = FRAGMENTS.option(
        None,
        path_of("file, and a function goes to Broker(fragment_plan=...)"),
        "Your own split instead of a pattern: JSON, {name or pattern of names: fragment}. Look at "
        "it with diloco-broker plan.",
        reads=Path,
    )
    fragment_sync_delay: int | str | None = FRAGMENTS.option(
        None,
        word_or(AUTO, whole(0)),
        "tau: steps between sending a fragment and merging the reply; or auto: merge it at the "
        "first step at which it is all there.",
        if_none="auto with several fragments (0 with --deterministic), else 0",
        reads=str,
    )
    fragment_update_alpha: float = FRAGMENTS.option(
        0.0, UP_TO_ONE, "Weight of the local parameters in that merge, 0 to 1."
    )
    fragment_merge: str = FRAGMENTS.option(
        "alpha", one_of(*MERGES), "alpha, or rebase: keep the steps made since sending."
    )
    fragment_max_delay: int | None = FRAGMENTS.option(
        None,
        whole(0),
        "Steps after which a worker waits for a late reply.",
        if_none="tau; with auto H/P",
    )

    quorum: int | None = REDUCING.option(
        None,
        whole(1, MOST_WORKERS),
        "Close a round --grace seconds after this number of contributions is in.",
        if_none="all",
    )
    grace: float = REDUCING.option(
        0.0,
        up_to(LONGEST_GRACE_S, " seconds"),
        "Seconds to wait for the rest after the quorum; in async mode, for more pushes after the "
        "first: they are applied together.",
    )
    late: str = REDUCING.option(
        "carry", one_of("carry", "drop"), "carry late work into the next round, or drop it."
    )
    deterministic: bool = REDUCING.option(
        False, SWITCH, "The same bits in any order of arrival; keeps whole submissions."
    )
    relays: bool = REDUCING.option(
        False, SWITCH, "Workers may connect through diloco-broker relay."
    )
    weight_by: str = REDUCING.option(
        "equal", one_of(*WEIGHTS), "What a contribution weighs: equal, tokens or samples."
    )
    aggregate: str = REDUCING.option(
        "mean",
        one_of(*AGGREGATES),
        "mean; clip-median-norm: none counts longer than the median; trimmed-mean or "
        "coordinate-median: of each number, without its extremes.",
    )
    trim: float = REDUCING.option(
        0.2,
        BELOW_HALF,
        "Of trimmed-mean: part of the workers left out at each end, rounded up.",
    )
    max_delta_norm: float | str | None = REDUCING.option(
        None,
        word_or(AUTO, above_0_up_to(MOST_DELTA_NORM)),
        "Refuse pushes whose Euclidean norm is above this; auto: above 5 times the median of the "
        "workers'.",
        if_none="none is too long",
        reads=str,
    )

    save_dir: str | None = SAVING.option(
        None, path_of("folder"), "Folder for checkpoints; a run found in it is resumed.", reads=Path
    )
    save_every: int = SAVING.option(
        1,
        whole(1, MOST_ROUNDS),
        "Rounds, or applied pushes in async mode, between two checkpoints.",
    )
    keep: int = SAVING.option(3, whole(1), "Checkpoints that are kept.")
    durable: bool = SAVING.option(
        False, SWITCH, "Save each version before anybody gets it; rounds take longer."
    )
    resume: str = SAVING.option(
        AUTO,
        path_of("checkpoint, auto or none"),
        "auto: the newest sound checkpoint in --save-dir; none; or the path of one, or of a folder.",
    )
    fresh: bool = SAVING.option(
        False,
        SWITCH,
        "Begin a new run at each start: a run found in --save-dir is moved aside first, never deleted; "
        "the log says where to.",
    )
    recover: str = SAVING.option(
        "adopt",
        one_of("adopt", "rewind"),
        "adopt newer versions that workers hold, or rewind to the checkpoint.",
    )
    audit: str | None = SAVING.option(
        None,
        path_of("file"),
        "Append to this file, for each version, a line of JSON: what it contains.",
        reads=Path,
    )

    tape: str | None = SAVING.option(
        None,
        path_of("file"),
        "Record what the broker is told and decides, for diloco-broker replay: two files of 64 MB, this "
        "one and one that is called so with .1.",
        reads=Path,
    )

    bind: str = WIRE.option(
        DEFAULT_CONTROL_ADDRESS, ADDRESS, "Control address; port * picks a free one and prints it."
    )
    feed: str = WIRE.option(DEFAULT_FEED_ADDRESS, ADDRESS, "Address of the status feed.")
    wire_dtype: str = WIRE.option(
        "bf16",
        one_of(*WIRE_DTYPES),
        "Dtype of pseudo-gradients on the way up: fp32, bf16, fp16; in few bits int8, int4, int4z; "
        "top64 is an experiment.",
    )
    reply_dtype: str = WIRE.option(
        "fp32",
        one_of(*REPLY_DTYPES),
        "Dtype of parameters on the way down: fp32, bf16, fp16; in few bits int8, int4, int4z.",
    )
    heartbeat_timeout: float = WIRE.option(
        120.0,
        up_to(LONGEST_S, " seconds"),
        "Seconds of silence after which a worker counts as dead; 0: never.",
    )
    stall_timeout: float = WIRE.option(
        600.0,
        up_to(LONGEST_S, " seconds"),
        "Seconds without a step after which the others do not wait for a worker; 0: never.",
    )
    disconnect_grace: float = WIRE.option(
        1.0,
        up_to(LONGEST_S, " seconds"),
        "Seconds a worker has to come back after its connection broke.",
    )
    recover_wait: float = WIRE.option(
        10.0,
        up_to(LONGEST_S, " seconds"),
        "Seconds to wait after the start for workers that may hold the run, or newer rounds of it.",
    )
    standby: bool = STANDBY.option(
        False,
        SWITCH,
        "This hub has a standby (diloco-broker standby), and releases a version only while it holds a "
        "lease: of its standby, or of a majority of its workers.",
    )
    lease: float = STANDBY.option(
        3.0,
        within(SHORTEST_LEASE_S, LONGEST_LEASE_S, " seconds"),
        "Seconds that the lease lasts; a standby takes over no sooner.",
    )
    keys: str | None = WIRE.option(
        None,
        path_of("folder"),
        "Folder of keys that diloco-broker keygen made: only who has one of them may connect.",
        reads=Path,
    )
    ipc: bool = WIRE.option(
        True, SWITCH, "Workers of this machine and user send chunks through a Unix socket."
    )
    insecure: bool = WIRE.option(
        False, SWITCH, "Allow an address other machines reach, without keys: any peer may steer."
    )
    # Smaller chunks are slower, larger ones are refused by the limits of frames.
    chunk_elements: int = NOT_ON_THE_COMMAND_LINE.option(
        CHUNK_ELEMENTS, whole(1, CHUNK_ELEMENTS), "Elements of a chunk on the wire."
    )

    @property
    def has_new_address(self) -> bool:
        """The system picks a port (`*` or 0): no worker can have known this address before."""
        return self.bind.rpartition(":")[2] in ("*", "0")

    @property
    def is_async(self) -> bool:
        return self.mode == "async"

    @property
    def max_seconds(self) -> float | None:
        """`max_time` as a number."""
        return None if self.max_time is None else parse_duration(self.max_time)

    @property
    def outer_name(self) -> str:
        return self.outer or USUAL_OUTERS[self.mode]

    @property
    def has_buffer(self) -> bool:
        """Whether the outer optimizer of that name collects gradients."""
        return self.outer_name in ("dn", "fedbuff")

    @property
    def dn_size(self) -> int:
        """N: gradients in a buffer of dn and fedbuff."""
        return self.dn_buffer or usual_buffer(self.mode, self.workers)

    @property
    def outer_schedule(self) -> OuterSchedule:
        """Learning rate and momentum over rounds; asynchronously N pushes are a round's worth."""
        lr, warmup = map(Schedule.parse, (self.outer_lr_schedule, self.outer_momentum_warmup))
        return OuterSchedule(lr, warmup, self.dn_size if self.is_async else 1)

    @property
    def has_auto_delay(self) -> bool:
        """Whether replies are merged when they are here, instead of a number of steps after the slot."""
        return self.fragment_sync_delay == AUTO

    @property
    def least_delay(self) -> int:
        """Steps after which a reply is merged, not earlier: tau, or 0 with "auto"."""
        delay = self.fragment_sync_delay
        return delay if isinstance(delay, int) else 0

    @property
    def longest_delay(self) -> int:
        """Steps after which a worker waits for a reply."""
        if self.fragment_max_delay is not None:
            return self.fragment_max_delay
        if self.has_auto_delay:
            return longest_delay(self.sync_every, self.num_fragments)
        return self.least_delay

    @property
    def least_steps(self) -> int:
        """H_min of Dynamic Local Updates."""
        return self.fewest_steps if self.dylu_min_steps is None else self.dylu_min_steps

    @property
    def fewest_steps(self) -> int:
        """The least H in which every fragment can be sent and merged: P (tau + 1), tau 0 with "auto"."""
        return self.num_fragments * (self.least_delay + 1)
