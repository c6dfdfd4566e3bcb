"""Declares every option of a broker: its field, its option of `diloco-broker serve`, and its help."""

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

AGGREGATES = ("mean", "clip-median-norm", "trimmed-mean", "coordinate-median", "rda")
AUTO = "auto"
MOST_DELTA_NORM = 1e30

# Upper limits that no run needs to exceed. An operator may change some of these during the run; a larger
# value alone could break training (parameters overflow, a boundary is never reached).
MOST_WORKERS = 10_000
MOST_TENSOR_THREADS = 64
MOST_STEPS = 1_000_000  # H
HIGHEST_LR = 10.0
LONGEST_GRACE_S = 86_400.0  # a day
HIGHEST_DECAY = 10.0
SMALLEST_EPSILON = 1e-12
MOST_CUTOFF = 1_000_000  # versions
SHORTEST_LEASE_S, LONGEST_LEASE_S = 0.5, 3600.0
LONGEST_S = 30 * 86_400.0

# Chosen by measurement; broker/SCHEDULES.md has the figures.
USUAL_WARMUP = "linear:200:0.5"
USUAL_OUTERS = {"sync": "nesterov", "async": "dn"}  # default by mode

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
    """The default of N: 1 for rounds, whose mean is one gradient; else the number of workers."""
    return workers if mode == "async" else 1


@dataclass(frozen=True)
class Options:
    """The options of a broker; each field is the option of `diloco-broker serve` with the same name.

    `BrokerConfig` validates them. Times are in seconds.
    """

    mode: str = RUN.option(
        "sync", one_of(*MODES), "Mode: sync (rounds of all workers) or async (each push by itself)."
    )
    workers: int = RUN.option(
        1,
        whole(1, MOST_WORKERS),
        "Number of workers that round one waits for; in async mode, the planned number.",
    )
    min_workers: int = RUN.option(
        1, whole(1, MOST_WORKERS), "Minimum number of contributions of a round."
    )
    sync_every: int = RUN.option(
        500,
        whole(1, MOST_STEPS),
        "H: optimizer steps of a worker between two pushes of a fragment.",
    )

    max_workers: int = RUN.option(
        1000, whole(1, MOST_WORKERS), "Maximum number of workers at a time; more are rejected."
    )
    max_parameters: int | None = RUN.option(
        None,
        whole(0),
        "Maximum size of a model, in elements of all its tensors; 0: no limit.",
        if_none="what fits into the memory of the machine or its container",
    )

    tensor_threads: int = RUN.option(
        0,
        whole(0, MOST_TENSOR_THREADS),
        "Number of threads that decode, add and step chunks, with identical results; 0: one less than "
        "the number of cores, from 1 to 4.",
    )

    max_rounds: int | None = RUN.option(
        None,
        whole(1, MOST_ROUNDS),
        "Number of rounds (async: applied pushes) after which the run ends.",
        if_none="no limit",
    )
    token_budget: int | None = RUN.option(
        None,
        whole(1, MOST),
        "Number of tokens of counted work, as reported by workers, after which the run ends.",
        if_none="no limit",
    )
    max_time: str | None = RUN.option(
        None,
        DURATION,
        "Training time after which the run ends with its open round: 90s, 30m, 36h or 7d.",
        if_none="no limit",
    )

    outer: str | None = OUTER.option(
        None,
        one_of("nesterov", "dn", "fedbuff", "sgd", "cgad"),
        "Outer optimizer: nesterov, dn (Delayed Nesterov), fedbuff (a buffer of N gradients, then a "
        "Nesterov step), sgd (no momentum) or, in async mode, cgad (Adam; stale pushes count less).",
        if_none="nesterov in sync, dn in async",
    )
    outer_lr: float = OUTER.option(
        0.7, above_0_up_to(HIGHEST_LR), "Learning rate of the outer optimizer."
    )
    outer_momentum: float = OUTER.option(0.9, BELOW_ONE, "Momentum of the outer optimizer.")
    outer_lr_schedule: str = OUTER.option(
        CONSTANT,
        schedule("F", "above 0, at most 1", lambda given: 0 < given.final <= 1),
        "Learning rate schedule: constant, or linear:R[:F] or cosine:R[:F], a decay to F times "
        "--outer-lr over R rounds of each fragment. F defaults to 0.1.",
    )
    outer_momentum_warmup: str = OUTER.option(
        USUAL_WARMUP,
        schedule("M", "in [0, 1)", lambda given: 0 <= given.start < 1),
        "Momentum warm-up: constant, or linear:R[:M] or cosine:R[:M], a rise from M to "
        "--outer-momentum, if that is larger, over R rounds of each fragment. M defaults to 0.",
    )
    outer_momentum_restart: int = OUTER.option(
        0,
        whole(0, MOST_ROUNDS),
        "Number of rounds of each fragment after which its momentum is reset to zero; 0: never.",
    )
    nesterov: bool = OUTER.option(
        True, SWITCH, "Nesterov momentum, as in the paper; otherwise classical momentum."
    )
    dn_buffer: int | None = OUTER.option(
        None,
        whole(1, MOST_WORKERS),
        "N of dn and fedbuff: number of gradients per momentum step.",
        if_none="the number of workers in async, 1 in sync",
    )
    dn_c: float = OUTER.option(0.0, FINITE, "c of Delayed Nesterov, from 0 to 1/N.")
    # paper: Liu et al. 2024, algorithm 3.
    dn_variant: str = OUTER.option(
        "paper",
        one_of("paper", "direct"),
        "Variant of Delayed Nesterov: paper, or direct, which counts gradients twice.",
    )

    cgad_decay: float = ASYNC.option(
        0.1, up_to(HIGHEST_DECAY), "a of cgad: a push that is s versions old counts exp(-a s)."
    )
    cgad_cutoff: int | None = ASYNC.option(
        None,
        whole(1, MOST_CUTOFF),
        "Age of a push, in versions, from which it counts nothing with cgad; up to it the weight falls "
        "along a cosine.",
        if_none="4 times the workers",
    )
    cgad_epsilon: float = ASYNC.option(
        0.1,
        within(SMALLEST_EPSILON, 1.0),
        "Epsilon of Adam in cgad. With a smaller one, steps adapt more to each parameter, and need a "
        "smaller --outer-lr.",
    )
    staleness_weight: str = ASYNC.option(
        "none",
        one_of("none", "poly"),
        "Weight of a push that is s versions old: none (always 1) or poly, (1 + s)^-1/2.",
    )
    max_staleness: int | None = ASYNC.option(
        None,
        whole(0),
        "Maximum age of a push, in versions; older ones are rejected.",
        if_none="no limit",
    )
    dylu: bool = ASYNC.option(
        False, SWITCH, "Dynamic Local Updates: fewer steps for slower workers."
    )
    dylu_min_steps: int | None = ASYNC.option(
        None,
        whole(1),
        "Minimum number of steps of a slow worker between two pushes.",
        if_none="the fewest in which all fragments can be sent and merged",
    )
    staging_slots: int = ASYNC.option(
        2, whole(1, MOST_WORKERS), "Maximum number of pushes that are uploaded at a time."
    )
    staging_deadline: float = ASYNC.option(
        30.0,
        above_0_up_to(LONGEST_S, " seconds"),
        "Seconds without progress after which an upload loses its slot to another push.",
    )

    num_fragments: int = FRAGMENTS.option(
        1,
        whole(1, 1000),  # the header of a rejoining worker has a version of each
        "P: number of fragments of the model, which are synchronized in turn within H steps.",
    )
    fragment_pattern: str = FRAGMENTS.option(
        "strided",
        one_of(*PATTERNS),
        "Split of the model: strided (layers i, i+P, ...), contiguous or balanced (by bytes).",
    )
    fragment_plan: str | None = FRAGMENTS.option(
        None,
        path_of("file (pass a function to Broker(fragment_plan=...))"),
        "File with a custom split instead of a pattern: JSON, {name or pattern of names: fragment}. "
        "Show it with diloco-broker plan.",
        reads=Path,
    )
    fragment_sync_delay: int | str | None = FRAGMENTS.option(
        None,
        word_or(AUTO, whole(0)),
        "tau: steps between sending a fragment and merging the reply; auto: merge it at the first "
        "step after it has arrived.",
        if_none="auto with several fragments (0 with --deterministic), else 0",
        reads=str,
    )
    fragment_update_alpha: float = FRAGMENTS.option(
        0.0, UP_TO_ONE, "Weight of the local parameters when merging a reply, 0 to 1."
    )
    fragment_merge: str = FRAGMENTS.option(
        "alpha",
        one_of(*MERGES),
        "Merge of a reply: alpha (weighted mean) or rebase (keeps the local steps since sending).",
    )
    fragment_max_delay: int | None = FRAGMENTS.option(
        None,
        whole(0),
        "Steps after sending at which a worker pauses to wait for a late reply.",
        if_none="tau; with auto H/P",
    )

    quorum: int | None = REDUCING.option(
        None,
        whole(1, MOST_WORKERS),
        "Number of contributions after which a round closes, --grace seconds later.",
        if_none="all workers",
    )
    grace: float | str = REDUCING.option(
        0.0,
        word_or(AUTO, up_to(LONGEST_GRACE_S, " seconds")),
        "Seconds to wait for more contributions after the quorum; in async mode, after the first push "
        "for others to apply together with it. auto: as long as no worker pauses for it "
        "(--fragment-sync-delay).",
        reads=str,
    )
    late: str = REDUCING.option(
        "carry",
        one_of("carry", "drop"),
        "Late contributions: carry them into the next round, or drop them.",
    )
    deterministic: bool = REDUCING.option(
        False,
        SWITCH,
        "Bitwise identical results in any order of arrival; keeps complete pushes in memory.",
    )
    relays: bool = REDUCING.option(
        False, SWITCH, "Accept workers that connect through diloco-broker relay."
    )
    weight_by: str = REDUCING.option(
        "equal",
        one_of(*WEIGHTS),
        "Weight of a contribution: equal, tokens, samples, or tokens2-per-step (tokens^2 / steps).",
    )
    aggregate: str = REDUCING.option(
        "mean",
        one_of(*AGGREGATES),
        "Aggregate of contributions: mean, clip-median-norm (norms are clipped to the median), "
        "trimmed-mean or coordinate-median (element by element, without extremes), or rda (mean length "
        "times mean direction of each tensor).",
    )
    trim: float = REDUCING.option(
        0.2, BELOW_HALF, "Share of workers that trimmed-mean leaves out at each end, rounded up."
    )
    max_delta_norm: float | str | None = REDUCING.option(
        None,
        word_or(AUTO, above_0_up_to(MOST_DELTA_NORM)),
        "Maximum Euclidean norm of a push; larger ones are rejected. auto: 5 times the median of the "
        "workers.",
        if_none="no limit",
        reads=str,
    )

    save_dir: str | None = SAVING.option(
        None, path_of("folder"), "Folder for checkpoints; a run found in it is resumed.", reads=Path
    )
    save_every: int = SAVING.option(
        1,
        whole(1, MOST_ROUNDS),
        "Number of rounds (async: applied pushes) between two checkpoints.",
    )
    keep: int = SAVING.option(3, whole(1), "Number of checkpoints to keep.")
    durable: bool = SAVING.option(
        False, SWITCH, "Save each version before it is released; rounds take longer."
    )
    resume: str = SAVING.option(
        AUTO,
        path_of("checkpoint, auto or none"),
        "Checkpoint to resume: auto (the newest intact one in --save-dir), none, or the path of a "
        "checkpoint or of a folder with checkpoints.",
    )
    fresh: bool = SAVING.option(
        False,
        SWITCH,
        "Start a new run at each start. A run found in --save-dir is moved aside, not deleted; the log "
        "has its new path.",
    )
    recover: str = SAVING.option(
        "adopt",
        one_of("adopt", "rewind"),
        "After a restart, adopt newer versions that workers hold, or rewind to the checkpoint.",
    )
    audit: str | None = SAVING.option(
        None,
        path_of("file"),
        "File to which a line of JSON with the contributions is appended for each version.",
        reads=Path,
    )

    tape: str | None = SAVING.option(
        None,
        path_of("file"),
        "File that records the broker's inputs and decisions for diloco-broker replay; at most 64 MB, "
        "plus as much in an earlier file with the suffix .1.",
        reads=Path,
    )

    bind: str = WIRE.option(
        DEFAULT_CONTROL_ADDRESS, ADDRESS, "Control address; port * picks a free one and prints it."
    )
    feed: str = WIRE.option(DEFAULT_FEED_ADDRESS, ADDRESS, "Address of the status feed.")
    wire_dtype: str = WIRE.option(
        "bf16",
        one_of(*WIRE_DTYPES),
        "Dtype of pseudo-gradients (upload): fp32, bf16, fp16; quantized: int8, int4, int4z; sparse: "
        "the 64 largest of 4096 elements, or sparse:K with K = 32, 64, 128, 256 or 512.",
    )
    feedback_decay: float = WIRE.option(
        1.0,
        UP_TO_ONE,
        "Decay of what a quantized push leaves out, before it is added to the next one; SparseLoCo: "
        "0.95.",
    )
    reply_dtype: str = WIRE.option(
        "fp32",
        one_of(*REPLY_DTYPES),
        "Dtype of parameters (download): fp32, bf16, fp16; quantized: int8, int4, int4z.",
    )
    heartbeat_timeout: float = WIRE.option(
        120.0,
        up_to(LONGEST_S, " seconds"),
        "Seconds of silence after which a worker counts as dead; 0: never.",
    )
    stall_timeout: float = WIRE.option(
        600.0,
        up_to(LONGEST_S, " seconds"),
        "Seconds without a step after which rounds stop waiting for a worker; 0: never.",
    )
    disconnect_grace: float = WIRE.option(
        1.0,
        up_to(LONGEST_S, " seconds"),
        "Seconds for a worker to reconnect after its connection broke.",
    )
    recover_wait: float = WIRE.option(
        10.0,
        up_to(LONGEST_S, " seconds"),
        "Seconds to wait after the start for workers that may hold the run, or newer versions of it.",
    )
    standby: bool = STANDBY.option(
        False,
        SWITCH,
        "Run with a standby (diloco-broker standby): versions are released only under a lease from the "
        "standby, or from a majority of the workers.",
    )
    lease: float = STANDBY.option(
        3.0,
        within(SHORTEST_LEASE_S, LONGEST_LEASE_S, " seconds"),
        "Duration of a lease, seconds; a standby takes over no sooner.",
    )
    keys: str | None = WIRE.option(
        None,
        path_of("folder"),
        "Folder of keys made by diloco-broker keygen; only peers with such a key may connect.",
        reads=Path,
    )
    ipc: bool = WIRE.option(
        True, SWITCH, "Unix socket for the chunks of workers on this machine with the same user."
    )
    insecure: bool = WIRE.option(
        False,
        SWITCH,
        "Allow addresses that other machines can reach without keys: anyone there may operate the run.",
    )
    # Elements. Smaller chunks are slower; larger ones exceed the limits of frames.
    chunk_elements: int = NOT_ON_THE_COMMAND_LINE.option(
        CHUNK_ELEMENTS, whole(1, CHUNK_ELEMENTS), "Elements of a chunk on the wire."
    )

    @property
    def has_new_address(self) -> bool:
        """Whether the system picks a port (`*` or 0), so that no worker knows the address in advance."""
        return self.bind.rpartition(":")[2] in ("*", "0")

    @property
    def is_async(self) -> bool:
        return self.mode == "async"

    @property
    def max_seconds(self) -> float | None:
        """`max_time` in seconds."""
        return None if self.max_time is None else parse_duration(self.max_time)

    @property
    def outer_name(self) -> str:
        return self.outer or USUAL_OUTERS[self.mode]

    @property
    def has_momentum(self) -> bool:
        """Whether the outer optimizer, unless a factory makes it, remembers earlier rounds."""
        return self.outer_name != "sgd" and self.outer_momentum > 0

    @property
    def has_buffer(self) -> bool:
        """Whether the outer optimizer buffers gradients."""
        return self.outer_name in ("dn", "fedbuff")

    @property
    def dn_size(self) -> int:
        """N: gradients in a buffer of dn and fedbuff."""
        return self.dn_buffer or usual_buffer(self.mode, self.workers)

    @property
    def cgad_cutoff_versions(self) -> int:
        """The staleness from which a push does not count with cgad."""
        return self.cgad_cutoff or 4 * self.workers

    @property
    def outer_schedule(self) -> OuterSchedule:
        """The schedules of learning rate and momentum; in async mode N pushes count as a round."""
        lr, warmup = map(Schedule.parse, (self.outer_lr_schedule, self.outer_momentum_warmup))
        size = self.dn_size if self.is_async else 1
        return OuterSchedule(lr, warmup, size, self.outer_momentum_restart)

    @property
    def has_auto_delay(self) -> bool:
        """Whether replies are merged on arrival instead of a fixed number of steps after sending."""
        return self.fragment_sync_delay == AUTO

    @property
    def least_delay(self) -> int:
        """Fewest steps after which a reply is merged: tau, or 0 with "auto"."""
        delay = self.fragment_sync_delay
        return delay if isinstance(delay, int) else 0

    @property
    def longest_delay(self) -> int:
        """Steps after sending at which a worker pauses to wait for a reply."""
        if self.fragment_max_delay is not None:
            return self.fragment_max_delay
        if self.has_auto_delay:
            return longest_delay(self.sync_every, self.num_fragments)
        return self.least_delay

    def overlap_steps(self, sync_every: int | None = None) -> int:
        """Steps for which a worker trains on after sending a fragment, if nothing is late.

        tau; with "auto" as long as it does not pause. `sync_every` is a worker's own H, if it has one.
        """
        if not self.has_auto_delay:
            return self.least_delay
        if self.fragment_max_delay is not None:
            return self.fragment_max_delay
        steps = min(sync_every or self.sync_every, self.sync_every)
        return longest_delay(steps, self.num_fragments)

    @property
    def fixed_grace(self) -> float:
        """`grace` in seconds; 0 with "auto", which `core.rounds.grace` determines in each round."""
        return 0.0 if isinstance(self.grace, str) else self.grace

    @property
    def least_steps(self) -> int:
        """H_min of Dynamic Local Updates."""
        return self.fewest_steps if self.dylu_min_steps is None else self.dylu_min_steps

    @property
    def fewest_steps(self) -> int:
        """Smallest H in which all fragments can be sent and merged: P (tau + 1), tau 0 with "auto"."""
        return self.num_fragments * (self.least_delay + 1)
