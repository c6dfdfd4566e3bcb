"""Every metric of the exporter: its name, what it means, and where its value stands. Pure.

The tables go by the record of the feed that a value comes from. What kind of metric it is shows in its
name, as Prometheus has it: a counter ends in `_total`, an info in `_info`, anything else is a gauge.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from diloco_protocol.feed import (
    Asynchronous,
    Checkpoint,
    Counts,
    Fragment,
    LastRound,
    Liveness,
    Loop,
    Model,
    Outer,
    Reducer,
    Round,
    Snapshot,
    Totals,
    Worker,
)
from diloco_tools.feed.model import FeedModel

Of = TypeVar("Of")


@dataclass(frozen=True)
class Metric:
    """A metric as it is scraped."""

    name: str
    help: str
    labels: tuple[str, ...] = ()

    @property
    def kind(self) -> Literal["gauge", "counter", "info"]:
        """As the name says."""
        if self.name.endswith("_total"):
            return "counter"
        return "info" if self.name.endswith("_info") else "gauge"

    @property
    def unit(self) -> str:
        """The base unit that the name ends with, or nothing."""
        stem = self.name.removesuffix("_total")
        return next((unit for unit in ("seconds", "bytes") if stem.endswith(f"_{unit}")), "")


@dataclass(frozen=True)
class Row(Generic[Of]):
    """A metric and its value for one record; None where it is not known: then there is no sample."""

    metric: Metric
    value: Callable[[Of], float | None]


@dataclass(frozen=True)
class Reading:
    """What the exporter has read of the feed so far; counts since the exporter's start."""

    model: FeedModel
    received: int = 0
    unreadable: int = 0


def _row(
    name: str, text: str, value: Callable[[Of], float | None], label: str | None = None
) -> Row[Of]:
    return Row(Metric(name, text, () if label is None else (label,)), value)


EXPORTER = Metric("diloco_exporter_build_info", "Version of the exporter.", ("version",))
UP = Metric("diloco_feed_up", "1 if the broker was heard in the last 10 s, else 0.")
HEALTHY = Metric(
    "diloco_run_healthy",
    "1 if the run is as it should be or has ended, 0 if not or if the broker is silent.",
)
AGE = Metric("diloco_feed_age_seconds", "Time since the newest snapshot came.")
FEED: tuple[Row[Reading], ...] = (
    _row(
        "diloco_feed_snapshots_received_total",
        "Snapshots that the exporter received.",
        lambda of: of.received,
    ),
    _row(
        "diloco_feed_snapshots_missed_total",
        "Snapshots that the broker sent and the exporter never received.",
        lambda of: of.model.missed,
    ),
    _row(
        "diloco_feed_frames_unreadable_total",
        "Frames that were no snapshot, or one of another feed version.",
        lambda of: of.unreadable,
    ),
    _row(
        "diloco_broker_restarts_total",
        "Restarts of the broker that the exporter saw.",
        lambda of: of.model.restarts,
    ),
)

BUILD = Metric("diloco_build_info", "Version of the broker.", ("version",))
RUN = Metric(
    "diloco_run_info",
    "The run and its setup.",
    ("run", "mode", "optimizer", "wire_dtype", "reply_dtype"),
)
SETTINGS = Metric(
    "diloco_settings_info",
    "What the run was told in words; empty where it has none.",
    ("fragment_pattern", "fragment_merge", "staleness_weight", "aggregate", "weight_by"),
)
STATE = Metric("diloco_run_state", "1 for the state of the run, 0 for the others.", ("state",))
SNAPSHOT: tuple[Row[Snapshot], ...] = (
    _row(
        "diloco_run_ended",
        "1 once all workers have left as done, after a round at least, else 0.",
        lambda of: float(of.ended),
    ),
    _row(
        "diloco_run_paused_seconds",
        "How long the run has been paused; absent while it is not.",
        lambda of: of.paused_for_s,
    ),
    _row("diloco_broker_uptime_seconds", "Time since the broker's start.", lambda of: of.uptime_s),
    _row(
        "diloco_workers_wanted", "Workers that round one waits for.", lambda of: of.workers_wanted
    ),
    _row(
        "diloco_workers_minimum", "Workers below which no round closes.", lambda of: of.min_workers
    ),
    _row("diloco_sync_every_steps", "Inner steps to a round (H).", lambda of: of.sync_every),
    _row("diloco_fragments", "Fragments of the model.", lambda of: len(of.fragments) or None),
    _row(
        "diloco_fragment_delay_steps",
        "Steps after which a reply is merged; absent where it is when it is here.",
        lambda of: None if of.fragment_delay_auto else of.fragment_sync_delay,
    ),
    _row(
        "diloco_fragment_max_delay_steps",
        "Steps after which a worker waits for a reply.",
        lambda of: of.fragment_max_delay,
    ),
    _row(
        "diloco_fragment_alpha_ratio",
        "Weight of the local parameters where a reply is merged; absent where it is rebased.",
        lambda of: of.fragment_update_alpha if of.fragment_merge == "alpha" else None,
    ),
)
LIVENESS: tuple[Row[Liveness], ...] = (
    _row(
        "diloco_heartbeat_timeout_seconds",
        "Silence after which a worker counts as dead; 0 is never.",
        lambda of: of.heartbeat_timeout_s,
    ),
    _row(
        "diloco_stall_timeout_seconds",
        "Time without a step after which a worker is not waited for; 0 is never.",
        lambda of: of.stall_timeout_s,
    ),
    _row(
        "diloco_disconnect_grace_seconds",
        "Time that a worker has to come back after its connection broke.",
        lambda of: of.disconnect_grace_s,
    ),
)
ASYNCHRONOUS: tuple[Row[Asynchronous], ...] = (
    _row(
        "diloco_dylu_enabled",
        "1 with Dynamic Local Updates, else 0; absent in a run with rounds.",
        lambda of: float(of.dylu),
    ),
    _row(
        "diloco_dylu_minimum_steps",
        "Least steps that a slow worker is given; absent without Dynamic Local Updates.",
        lambda of: of.dylu_min_steps,
    ),
    _row(
        "diloco_staleness_limit_versions",
        "Staleness above which work is refused; absent without a limit.",
        lambda of: of.max_staleness,
    ),
    _row(
        "diloco_submission_slots",
        "Submissions under way at a time; absent in a run with rounds.",
        lambda of: of.slots,
    ),
)
LOOP: tuple[Row[Loop], ...] = (
    _row(
        "diloco_broker_cpu_seconds_total",
        "CPU time of the broker's own thread.",
        lambda of: of.cpu_s,
    ),
    _row(
        "diloco_broker_resident_memory_bytes",
        "Resident memory of the broker.",
        lambda of: of.rss_bytes,
    ),
    _row(
        "diloco_broker_longest_turn_seconds",
        "CPU time of the longest turn of the broker's loop between its last two snapshots.",
        lambda of: None if of.longest_turn_ms is None else of.longest_turn_ms / 1000,
    ),
)
COUNTS: tuple[Row[Counts], ...] = (
    _row("diloco_workers_alive", "Workers that are alive.", lambda of: of.alive),
    _row(
        "diloco_workers_participating",
        "Workers whose push for the coming version is under way or here.",
        lambda of: of.participating,
    ),
    _row("diloco_workers_averaged", "Workers averaged in the last round.", lambda of: of.averaged),
)
TOTALS: tuple[Row[Totals], ...] = (
    _row("diloco_rounds_total", "Rounds closed.", lambda of: of.rounds),
    _row("diloco_pushes_total", "Pushes begun.", lambda of: of.pushes),
    _row("diloco_contributions_total", "Pushes counted whole.", lambda of: of.contributions),
    _row("diloco_deaths_total", "Workers that died.", lambda of: of.deaths),
    _row(
        "diloco_malformed_messages_total",
        "Messages that broke the wire protocol.",
        lambda of: of.malformed,
    ),
    _row(
        "diloco_uploaded_bytes_total",
        "Pseudo-gradients, and the first parameters, received from workers.",
        lambda of: of.bytes_up,
    ),
    _row("diloco_downloaded_bytes_total", "Parameters sent to workers.", lambda of: of.bytes_down),
)
REFUSED = Metric(
    "diloco_refused_pushes_total",
    "Work of workers that the broker refused, by reason.",
    ("code",),
)
OUTER: tuple[Row[Outer], ...] = (
    _row("diloco_outer_learning_rate", "Outer learning rate.", lambda of: of.lr),
    _row("diloco_outer_momentum", "Outer momentum.", lambda of: of.momentum),
    _row(
        "diloco_outer_buffer_gradients",
        "Pseudo-gradients to one step of a buffered outer optimizer; absent without a buffer.",
        lambda of: of.buffer,
    ),
)
REDUCER: tuple[Row[Reducer], ...] = (
    _row(
        "diloco_pending_submissions",
        "Submissions that the broker keeps, whole or in part.",
        lambda of: of.submissions,
    ),
    _row("diloco_waiting_submissions", "Submissions that wait for a slot.", lambda of: of.waiting),
)
MODEL: tuple[Row[Model], ...] = (
    _row("diloco_model_parameters", "Trainable parameters.", lambda of: of.parameters),
    _row("diloco_model_size_bytes", "Size of the model at the broker.", lambda of: of.bytes),
)
CHECKPOINT: tuple[Row[Checkpoint], ...] = (
    _row(
        "diloco_checkpoint_age_seconds",
        "Time since the newest checkpoint; absent before the first.",
        lambda of: of.age_s,
    ),
    _row(
        "diloco_checkpoint_round", "Round that follows the newest checkpoint.", lambda of: of.round
    ),
    _row(
        "diloco_checkpoint_failed",
        "1 if the last save failed; absent without a save folder.",
        lambda of: float(of.error is not None),
    ),
)
OPEN_ROUND: tuple[Row[Round], ...] = (
    _row("diloco_round_number", "Round that is open or closing.", lambda of: of.number),
    _row("diloco_round_fragment", "Fragment that the round concerns.", lambda of: of.fragment),
    _row("diloco_round_age_seconds", "Time since the round opened.", lambda of: of.age_s),
    _row(
        "diloco_round_closing",
        "1 if the round is closing, 0 if it is open.",
        lambda of: float(of.phase == "closing"),
    ),
    _row(
        "diloco_round_workers_expected",
        "Workers that the round expects.",
        lambda of: len(of.expected),
    ),
    _row(
        "diloco_round_workers_arrived", "Workers whose push has begun.", lambda of: len(of.arrived)
    ),
    _row(
        "diloco_round_workers_missing",
        "Workers that the round waits for.",
        lambda of: len(of.missing),
    ),
    _row(
        "diloco_round_workers_floor",
        "Workers below which the round stays open.",
        lambda of: of.floor,
    ),
)
LAST_ROUND: tuple[Row[LastRound], ...] = (
    _row("diloco_last_round_number", "Round that closed last.", lambda of: of.number),
    _row(
        "diloco_last_round_weight",
        "Sum of the weights averaged in the last round.",
        lambda of: of.weight,
    ),
    _row(
        "diloco_last_round_loss",
        "Mean loss that the workers of the last round reported.",
        lambda of: of.loss,
    ),
    _row(
        "diloco_last_round_delta_norm",
        "Mean norm of the pseudo-gradients of the last round.",
        lambda of: of.delta_norm,
    ),
    _row(
        "diloco_last_round_staleness_versions",
        "Versions between the oldest base in the last round and the version that it made.",
        lambda of: of.staleness,
    ),
)
DURATION = Metric(
    "diloco_last_round_seconds", "Time that the last round took; absent in asynchronous mode."
)
FRAGMENT: tuple[Row[Fragment], ...] = (
    _row(
        "diloco_fragment_version",
        "Counter of the fragment's newest version.",
        lambda of: of.version,
        "fragment",
    ),
    _row(
        "diloco_fragment_buffered_gradients",
        "Pseudo-gradients in the buffer of the outer optimizer.",
        lambda of: of.buffered,
        "fragment",
    ),
    _row(
        "diloco_fragment_contributions_total",
        "Pushes counted into the fragment.",
        lambda of: of.contributions,
        "fragment",
    ),
)

BY_HEALTH = Metric("diloco_workers", "Workers that the broker lists, by health.", ("health",))
WITHOUT_SERIES = Metric(
    "diloco_workers_without_series",
    "Workers that have no series of their own: there are more than --max-workers.",
)


def _of_worker(name: str, text: str, value: Callable[[Worker], float | None]) -> Row[Worker]:
    return _row(name, text, value, "worker")


WORKER: tuple[Row[Worker], ...] = (
    _of_worker(
        "diloco_worker_healthy",
        "1 if the worker is well, 0 if it is slow, stalled or lost.",
        lambda of: float(of.health == "ok"),
    ),
    _of_worker(
        "diloco_worker_heartbeat_age_seconds",
        "Time since the worker was last heard.",
        lambda of: of.beat_age_s,
    ),
    _of_worker(
        "diloco_worker_sync_age_seconds",
        "Time since work of the worker was last counted; absent before the first.",
        lambda of: of.sync_age_s,
    ),
    _of_worker(
        "diloco_worker_round", "Last round that the worker pushed for.", lambda of: of.round
    ),
    _of_worker(
        "diloco_worker_steps_total", "Inner steps that the worker has made.", lambda of: of.step
    ),
    _of_worker(
        "diloco_worker_inner_steps",
        "Inner steps since the worker's last boundary; absent while it is lost.",
        lambda of: None if of.health == "lost" else of.inner_step,
    ),
    _of_worker(
        "diloco_worker_sync_every_steps",
        "Inner steps to a push of the worker (H, with DyLU its own).",
        lambda of: of.sync_every or None,
    ),
    _of_worker(
        "diloco_worker_steps_per_second",
        "Inner steps a second, as the worker reports; absent while it is lost.",
        lambda of: None if of.health == "lost" else of.steps_per_s,
    ),
    _of_worker(
        "diloco_worker_loss",
        "Loss that the worker reported last; NaN if that was not finite.",
        lambda of: of.loss if of.loss_is_finite else math.nan,
    ),
    _of_worker(
        "diloco_worker_staleness_versions",
        "Versions between the base of the worker's last push and the version that it went into.",
        lambda of: of.staleness,
    ),
    _of_worker(
        "diloco_worker_tokens_total", "Tokens that the worker reported.", lambda of: of.tokens
    ),
    _of_worker("diloco_worker_pushes_total", "Pushes of the worker.", lambda of: of.pushes),
    _of_worker(
        "diloco_worker_refused_pushes_total",
        "Work of the worker that the broker refused.",
        lambda of: of.rejected,
    ),
    _of_worker(
        "diloco_worker_uploaded_bytes_total",
        "Pseudo-gradients, and the first parameters, received from the worker.",
        lambda of: of.bytes_up,
    ),
    _of_worker(
        "diloco_worker_downloaded_bytes_total",
        "Parameters sent to the worker.",
        lambda of: of.bytes_down,
    ),
)


def catalogue() -> list[Metric]:
    """Every metric that can be scraped, in the order in which they come."""

    def of(rows: tuple[Row[Of], ...]) -> list[Metric]:
        return [row.metric for row in rows]

    return [
        *(EXPORTER, UP, HEALTHY, AGE, *of(FEED)),
        *(
            BUILD,
            RUN,
            STATE,
            SETTINGS,
            *of(SNAPSHOT),
            *of(LIVENESS),
            *of(ASYNCHRONOUS),
            *of(LOOP),
            *of(COUNTS),
            *of(TOTALS),
            REFUSED,
        ),
        *(*of(OUTER), *of(REDUCER), *of(MODEL), *of(CHECKPOINT)),
        *(*of(OPEN_ROUND), *of(LAST_ROUND), DURATION, *of(FRAGMENT)),
        *(BY_HEALTH, WITHOUT_SERIES, *of(WORKER)),
    ]
