"""Every metric of the exporter: its name, where its value stands, and what it means. Pure.

The tables go by the record that a value comes from; `metrics` finds the records. What kind of metric it
is shows in its name, as Prometheus has it: a counter ends in `_total`, an info in `_info`, anything else
is a gauge.
"""

import math
from collections.abc import Callable
from typing import Any

from diloco_protocol.feed import INSECURE

Value = Callable[[Any], float | None]  # of a record; None where it is not known

# fmt: off
# What tells the records of one table apart, where there are several.
LABELS = {
    "exporter": ("version",),
    "broker": ("version",),
    "run": ("run", "mode", "optimizer", "wire_dtype", "reply_dtype"),
    "states": ("state",),
    "settings": ("fragment_pattern", "fragment_merge", "staleness_weight", "aggregate", "weight_by"),
    "refused": ("code",),
    "fragments": ("fragment",),
    "healths": ("health",),
    "workers": ("worker",),
}
# Record -> name without `diloco_` -> attribute in the record, or what is made of it; what it means.
TABLES: dict[str, dict[str, tuple[str | Value, str]]] = {
    "exporter": {"exporter_build_info": (float, "Version of the exporter.")},
    "feed": {
        "feed_up": ("is_fresh", "1 if the broker was heard in the last 10 s, else 0."),
        "run_healthy": (lambda of: of.model.verdict(of.now).healthy,
            "1 if the run is as it should be or has ended, 0 if not or if the broker is silent."),
        "feed_age_seconds": (lambda of: of.model.age_s(of.now) if of.model.snapshot else None,
            "Time since the newest snapshot came."),
        "feed_snapshots_received_total": ("received", "Snapshots that the exporter received."),
        "feed_snapshots_missed_total": ("model.missed",
            "Snapshots that the broker sent and the exporter never received."),
        "feed_frames_unreadable_total": ("unreadable",
            "Frames that were no snapshot, or one of another feed version."),
        "broker_restarts_total": ("model.restarts",
            "Restarts of the broker that the exporter saw."),
    },
    "broker": {"build_info": (float, "Version of the broker.")},
    "run": {"run_info": (float, "The run and its setup.")},
    "states": {"run_state": (float, "1 for the state of the run, 0 for the others.")},
    "settings": {
        "settings_info": (float, "What the run was told in words; empty where it has none."),
    },
    "snapshot": {
        "run_ended": ("ended",
            "1 once all workers have left as done, after a round at least, else 0."),
        "run_paused_seconds": ("paused_for_s",
            "How long the run has been paused; absent while it is not."),
        "broker_uptime_seconds": ("uptime_s", "Time since the broker's start."),
        "workers_wanted": ("workers_wanted", "Workers that round one waits for."),
        "workers_minimum": ("min_workers", "Workers below which no round closes."),
        "sync_every_steps": ("sync_every", "Inner steps to a round (H)."),
        "fragments": (lambda of: len(of.fragments) or None, "Fragments of the model."),
        "fragment_delay_steps": (lambda of: None if of.fragment_delay_auto else of.fragment_sync_delay,
            "Steps after which a reply is merged; absent where it is when it is here."),
        "fragment_max_delay_steps": ("fragment_max_delay",
            "Steps after which a worker waits for a reply."),
        "fragment_alpha_ratio": (
            lambda of: of.fragment_update_alpha if of.fragment_merge == "alpha" else None,
            "Weight of the local parameters where a reply is merged; absent where it is rebased."),
        "heartbeat_timeout_seconds": ("liveness.heartbeat_timeout_s",
            "Silence after which a worker counts as dead; 0 is never."),
        "stall_timeout_seconds": ("liveness.stall_timeout_s",
            "Time without a step after which a worker is not waited for; 0 is never."),
        "disconnect_grace_seconds": ("liveness.disconnect_grace_s",
            "Time that a worker has to come back after its connection broke."),
        "dylu_enabled": ("asynchronous.dylu",
            "1 with Dynamic Local Updates, else 0; absent in a run with rounds."),
        "dylu_minimum_steps": ("asynchronous.dylu_min_steps",
            "Least steps that a slow worker is given; absent without Dynamic Local Updates."),
        "staleness_limit_versions": ("asynchronous.max_staleness",
            "Staleness above which work is refused; absent without a limit."),
        "submission_slots": ("asynchronous.slots",
            "Submissions under way at a time; absent in a run with rounds."),
        "broker_insecure": (lambda of: of.security == INSECURE if of.security else None,
            "1 if other machines reach the broker and it asks for no keys, so that anybody may steer, "
            "else 0."),
        "broker_cpu_seconds_total": ("loop.cpu_s", "CPU time of the broker's own thread."),
        "broker_resident_memory_bytes": ("loop.rss_bytes", "Resident memory of the broker."),
        "broker_longest_turn_seconds": (
            lambda of: None if of.loop.longest_turn_ms is None else of.loop.longest_turn_ms / 1000,
            "CPU time of the longest turn of the broker's loop between its last two snapshots."),
        "workers_alive": ("counts.alive", "Workers that are alive."),
        "workers_participating": ("counts.participating",
            "Workers whose push for the coming version is under way or here."),
        "workers_averaged": ("counts.averaged", "Workers averaged in the last round."),
        "rounds_total": ("totals.rounds", "Rounds closed."),
        "pushes_total": ("totals.pushes", "Pushes begun."),
        "contributions_total": ("totals.contributions", "Pushes counted whole."),
        "deaths_total": ("totals.deaths", "Workers that died."),
        "malformed_messages_total": ("totals.malformed", "Messages that broke the wire protocol."),
        "uploaded_bytes_total": ("totals.bytes_up",
            "Pseudo-gradients, and the first parameters, received from workers."),
        "downloaded_bytes_total": ("totals.bytes_down", "Parameters sent to workers."),
        "outer_learning_rate": ("outer.lr", "Outer learning rate."),
        "outer_momentum": ("outer.momentum", "Outer momentum."),
        "outer_buffer_gradients": ("outer.buffer",
            "Pseudo-gradients to one step of a buffered outer optimizer; absent without a buffer."),
        "pending_submissions": ("reducer.submissions",
            "Submissions that the broker keeps, whole or in part."),
        "waiting_submissions": ("reducer.waiting", "Submissions that wait for a slot."),
        "model_parameters": ("model.parameters", "Trainable parameters."),
        "model_size_bytes": ("model.bytes", "Size of the model at the broker."),
        "checkpoint_age_seconds": ("checkpoint.age_s",
            "Time since the newest checkpoint; absent before the first."),
        "checkpoint_round": ("checkpoint.round", "Round that follows the newest checkpoint."),
        "checkpoint_failed": (lambda of: of.checkpoint and of.checkpoint.error is not None,
            "1 if the last save failed; absent without a save folder."),
        "last_round_number": ("last_round.number", "Round that closed last."),
        "last_round_weight": ("last_round.weight", "Sum of the weights averaged in the last round."),
        "last_round_loss": ("last_round.loss", "Mean loss that the workers of the last round reported."),
        "last_round_delta_norm": ("last_round.delta_norm",
            "Mean norm of the pseudo-gradients of the last round."),
        "last_round_staleness_versions": ("last_round.staleness",
            "Versions between the oldest base in the last round and the version that it made."),
        "last_round_seconds": (
            lambda of: of.last_round.seconds if of.last_round and of.mode != "async" else None,
            "Time that the last round took; absent in asynchronous mode."),
    },
    "refused": {
        "refused_pushes_total": (float, "Work of workers that the broker refused, by reason."),
    },
    "round": {
        "round_number": ("number", "Round that is open or closing."),
        "round_fragment": ("fragment", "Fragment that the round concerns."),
        "round_age_seconds": ("age_s", "Time since the round opened."),
        "round_closing": (lambda of: of.phase == "closing",
            "1 if the round is closing, 0 if it is open."),
        "round_workers_expected": (lambda of: len(of.expected), "Workers that the round expects."),
        "round_workers_arrived": (lambda of: len(of.arrived), "Workers whose push has begun."),
        "round_workers_missing": (lambda of: len(of.missing), "Workers that the round waits for."),
        "round_workers_floor": ("floor", "Workers below which the round stays open."),
    },
    "fragments": {
        "fragment_version": ("version", "Counter of the fragment's newest version."),
        "fragment_buffered_gradients": ("buffered",
            "Pseudo-gradients in the buffer of the outer optimizer."),
        "fragment_contributions_total": ("contributions", "Pushes counted into the fragment."),
    },
    "healths": {"workers": (float, "Workers that the broker lists, by health.")},
    "without_series": {
        "workers_without_series": (float,
            "Workers that have no series of their own: there are more than --max-workers."),
    },
    "workers": {
        "worker_healthy": (lambda of: of.health == "ok",
            "1 if the worker is well, 0 if it is slow, stalled or lost."),
        "worker_heartbeat_age_seconds": ("beat_age_s", "Time since the worker was last heard."),
        "worker_sync_age_seconds": ("sync_age_s",
            "Time since work of the worker was last counted; absent before the first."),
        "worker_round": ("round", "Last round that the worker pushed for."),
        "worker_steps_total": ("step", "Inner steps that the worker has made."),
        "worker_inner_steps": (lambda of: None if of.health == "lost" else of.inner_step,
            "Inner steps since the worker's last boundary; absent while it is lost."),
        "worker_sync_every_steps": (lambda of: of.sync_every or None,
            "Inner steps to a push of the worker (H, with DyLU its own)."),
        "worker_steps_per_second": (lambda of: None if of.health == "lost" else of.steps_per_s,
            "Inner steps a second, as the worker reports; absent while it is lost."),
        "worker_loss": (lambda of: of.loss if of.loss_is_finite else math.nan,
            "Loss that the worker reported last; NaN if that was not finite."),
        "worker_staleness_versions": ("staleness",
            "Versions between the base of the worker's last push and the version that it went into."),
        "worker_tokens_total": ("tokens", "Tokens that the worker reported."),
        "worker_pushes_total": ("pushes", "Pushes of the worker."),
        "worker_refused_pushes_total": ("rejected", "Work of the worker that the broker refused."),
        "worker_uploaded_bytes_total": ("bytes_up",
            "Pseudo-gradients, and the first parameters, received from the worker."),
        "worker_downloaded_bytes_total": ("bytes_down", "Parameters sent to the worker."),
    },
}
# fmt: on
