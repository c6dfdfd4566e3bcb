"""What the PUB socket says: one whole snapshot of the broker as a JSON object.

A subscriber that connects late or misses some needs nothing but the next one. Ages are durations by the
broker's own clock, so no two machines' clocks are ever compared.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any

from diloco_broker.core import effects
from diloco_broker.core.state.members import Member
from diloco_broker.core.state.run import RunState

FEED_VERSION = 1
TOPIC = b"status "
EVENTS_KEPT = 20
LONGEST_EVENT = 500  # characters: peers may provoke long sentences
VERSION = version("diloco-broker")
# A worker that missed two heartbeats of the default interval is called slow before it is called dead.
SLOW_AFTER_S = 75.0


@dataclass
class EventLog:
    """The last things that happened, for people who look later."""

    entries: deque[tuple[int, float, effects.Log]] = field(
        default_factory=lambda: deque(maxlen=EVENTS_KEPT)
    )
    count: int = 0

    def add(self, log: effects.Log, now: float) -> None:
        self.count += 1
        text = log.text if len(log.text) <= LONGEST_EVENT else log.text[:LONGEST_EVENT] + " ..."
        self.entries.append((self.count, now, effects.Log(log.level, text)))


@dataclass(frozen=True)
class LoopFigures:
    """What the loop knows of itself. Times in seconds of its own thread's CPU."""

    control: str
    longest_turn_s: float
    cpu_s: float
    rss_bytes: int


def snapshot(
    state: RunState, events: EventLog, figures: LoopFigures, sequence: int, now: float
) -> dict[str, Any]:
    """Everything that displays show, fit for strict JSON: numbers that are not finite are null."""
    return snapshot_and_line(state, events, figures, sequence, now)[0]


def snapshot_and_line(
    state: RunState, events: EventLog, figures: LoopFigures, sequence: int, now: float
) -> tuple[dict[str, Any], str]:
    """The snapshot, and the JSON of it."""
    whole = _snapshot(state, events, figures, sequence, now)
    try:
        return whole, json.dumps(whole, allow_nan=False)
    except (
        ValueError,
        TypeError,
    ):  # what a worker sent is in it; looking at all costs more than this
        safe: dict[str, Any] = json_safe(whole)
        return safe, json.dumps(safe, allow_nan=False)


def json_safe(value: Any) -> Any:
    """What workers send may hold anything that msgpack can; JSON takes less."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    if value is None or isinstance(value, str | int):
        return value
    return str(value)


def _snapshot(
    state: RunState, events: EventLog, figures: LoopFigures, sequence: int, now: float
) -> dict[str, Any]:
    config, round_ = state.config, state.round
    manifest, report = state.bootstrap.manifest, state.last_report
    waiting_for = _waiting_for(state)
    return {
        "feed": FEED_VERSION,
        "sequence": sequence,
        "epoch": state.epoch,
        "run": state.bootstrap.run,
        "version": VERSION,
        "control": figures.control,
        "uptime_s": round(now - state.started_at, 3),
        "mode": state.run_config.mode,
        "state": _condition(state, waiting_for),
        "waiting_for": waiting_for,
        "ended": _has_ended(state),
        "paused_for_s": None if state.paused_at is None else round(now - state.paused_at, 3),
        "round": {
            "number": round_.number if round_ else 0,
            "fragment": round_.fragment if round_ else 0,
            "phase": round_.phase.value if round_ else "open",
            "age_s": round(now - round_.opened_at, 3) if round_ else 0.0,
            "expected": sorted(round_.expected) if round_ else [],
            "arrived": sorted(round_.begun) if round_ else [],
            "missing": sorted(round_.missing) if round_ else [],
            "floor": round_.floor if round_ else config.workers,
        },
        "counts": {
            "alive": len(state.members),
            "participating": len(_participating(state)),
            "averaged": report.averaged if report else 0,
        },
        "model": {
            "parameters": manifest.trainable_elements,
            "tensors": len(manifest.entries),
            "bytes": 4 * sum(entry.elements for entry in manifest.entries),
        }
        if manifest
        else None,
        "outer": {
            "optimizer": _outer_name(state),
            "lr": _common(state, "lr") if state.has_own_optimizer else config.outer_lr,
            "momentum": (
                _common(state, "momentum")
                if state.has_own_optimizer
                else config.outer_momentum
                if _has_momentum(state)
                else None
            ),
            "groups": [asdict(group) for group in state.outer_groups],
            "nesterov": config.nesterov if _has_momentum(state) else None,
            "variant": config.dn_variant if config.outer_name == "dn" else None,
            "buffer": config.dn_size if _has_buffer(state) else None,
            "c": config.dn_c if config.outer_name == "dn" else None,
        },
        "sync_every": config.sync_every,
        "num_fragments": config.num_fragments,
        "fragment_pattern": state.fragment_pattern if config.num_fragments > 1 else None,
        "fragment_sync_delay": config.least_delay,
        "fragment_delay_auto": config.has_auto_delay,
        "fragment_max_delay": config.longest_delay,
        "fragment_update_alpha": config.fragment_update_alpha,
        "fragment_merge": config.fragment_merge,
        "reducer": {
            "staged": config.is_staged,
            "aggregate": config.aggregate,
            "deterministic": config.deterministic,
            "weight_by": config.weight_by,
            "quorum": config.quorum,
            "grace_s": config.grace,
            "late": config.late,
            "submissions": sum(1 for _ in state.staging),
            "waiting": len(state.staging.waiting),
        },
        "liveness": {
            "heartbeat_timeout_s": config.heartbeat_timeout,
            "stall_timeout_s": config.stall_timeout,
            "disconnect_grace_s": config.disconnect_grace,
        },
        "asynchronous": {
            "dylu": config.dylu,
            "dylu_min_steps": config.least_steps if config.dylu else None,
            "staleness_weight": config.staleness_weight,
            "max_staleness": config.max_staleness,
            "slots": config.staging_slots,
            "deadline_s": config.staging_deadline,
        }
        if config.is_async
        else None,
        "wire_dtype": config.wire_dtype,
        "reply_dtype": config.reply_dtype,
        "workers_wanted": config.workers,
        "min_workers": config.min_workers,
        "save_every": config.save_every,
        "fragments": [
            {
                "fragment": each.layout.fragment,
                "version": each.version.counter,
                "tag": f"{each.version.tag:016x}",
                "gradients": each.gradients,
                "contributions": each.contributions,
                "buffered": each.gradients % config.dn_size if _has_buffer(state) else 0,
            }
            for each in state.versions.trained
            if each.version
        ],
        "workers": [_worker(state, member, now) for member in state.members],
        "totals": _totals(state),
        "rejections": [
            {
                "age_s": round(now - each.at, 3),
                "worker": each.worker_id,
                "code": each.code,
                "text": each.text[:LONGEST_EVENT],
            }
            for each in state.rejections
        ],
        "checkpoint": {
            "folder": config.save_dir,
            "round": state.saving.number,
            "age_s": None
            if state.saving.saved_at is None
            else round(now - state.saving.saved_at, 3),
            "error": state.saving.error,
            "durable": config.durable,
        }
        if config.save_dir is not None
        else None,
        "last_round": {
            "number": report.number,
            "fragment": report.fragment,
            "version": report.version,
            "seconds": round(report.seconds, 3),
            "averaged": report.averaged,
            "weight": report.weight,
            "loss": report.loss,
            "delta_norm": report.delta_norm,
            "staleness": report.staleness,
        }
        if report
        else None,
        "events": [
            {
                "sequence": number,
                "age_s": round(now - at, 3),
                "level": log.level,
                "text": log.text,
            }
            for number, at, log in events.entries
        ],
        "loop": {
            "longest_turn_ms": round(figures.longest_turn_s * 1e3, 3),
            "cpu_s": round(figures.cpu_s, 3),
            "rss_bytes": figures.rss_bytes,
        },
    }


def _totals(state: RunState) -> dict[str, Any]:
    """Counters of this life of the broker, so that all of them begin at the same time."""
    before = asdict(state.totals_before)
    counted = {name: value - before[name] for name, value in asdict(state.totals).items()}
    return {
        **counted,
        "refused": dict(state.refused),
        "bytes_down": state.versions.bytes_down,
    }


def _condition(state: RunState, waiting_for: str | None) -> str:
    if state.stopping is not None:
        return "stopping"
    if state.paused_at is not None:
        return "paused"
    return "waiting" if waiting_for else "training"


def _has_ended(state: RunState) -> bool:
    """Versions were made, nobody is here, and who went last was done. Others may still join."""
    made = any(each.version and each.version.counter for each in state.versions.trained)
    last = state.departed
    return made and not len(state.members) and last is not None and not last.why


def _outer_name(state: RunState) -> str:
    """What steps the parameters; a torch optimizer's settings are its own."""
    if not state.has_own_optimizer:
        return state.config.outer_name
    return f"{state.config.outer} torch" if state.config.outer else "torch"


def _common(state: RunState, name: str) -> float | None:
    """What all groups of a torch optimizer have of a setting; None where they differ."""
    values = {getattr(group, name) for group in state.outer_groups}
    found: float | None = values.pop() if len(values) == 1 else None
    return found


def _has_momentum(state: RunState) -> bool:
    return not state.has_own_optimizer and state.config.outer_name != "sgd"


def _has_buffer(state: RunState) -> bool:
    name = state.config.outer if state.has_own_optimizer else state.config.outer_name
    return name in ("dn", "fedbuff")


def _participating(state: RunState) -> set[str]:
    """Workers whose push is under way or whole and not yet in a version."""
    if state.round is None:
        return set()
    if state.config.is_async:
        return {submission.worker_id for submission in state.staging}
    return state.round.participating


def _worker(state: RunState, member: Member, now: float) -> dict[str, Any]:
    silent = now - member.last_seen
    lost = member.disconnected_at is not None
    return {
        "id": member.worker_id,
        "host": member.host,
        "pid": member.pid,
        "state": member.state,
        "health": (
            "lost"
            if lost
            else "stalled"
            if member.is_stalled
            else "slow"
            if silent > SLOW_AFTER_S
            else "ok"
        ),
        "round": member.last_round,
        "inner_step": member.inner_step,
        "inner_age_s": None if member.told_at is None else round(now - member.told_at, 3),
        "sync_every": state.sync_every_of(member),
        "step": member.step,
        "steps_per_s": member.steps_per_s,
        "loss": member.loss,
        "loss_is_finite": member.loss is None or math.isfinite(member.loss),
        "tokens": member.tokens,
        "beat_age_s": round(silent, 3),
        "sync_age_s": None if member.counted_at is None else round(now - member.counted_at, 3),
        "staleness": member.staleness,
        "merge_delay": member.merge_delay,
        "warning": member.warning,
        "bytes_up": member.account.bytes_up,
        "bytes_down": member.account.bytes_down,
        "pushes": member.pushes,
        "rejected": member.rejected,
        "extra": dict(member.extra),
    }


def _waiting_for(state: RunState) -> str | None:
    """What has to happen before training goes on, in a sentence; None when nothing has."""
    alive, round_ = len(state.members), state.round
    if round_ is None and (alive or state.bootstrap.waits_for):
        return f"for {state.bootstrap.waits_for or 'the parameters of a worker'}"
    if round_ is None:
        needed = f"; round one needs {state.config.workers}" if not state.config.is_async else ""
        return f"for workers to join{needed}"
    if not alive:
        if (last := state.departed) is None:
            return "for workers to join: none is here yet"
        if last.why:
            return f"for workers to join: nobody is left; {last.worker_id} went last: {last.why}"
        return "for workers to join: all have left"
    if round_.below_floor:
        still = sum(member.is_stalled for member in state.members)
        verb = "stands" if still == 1 else "stand"
        idle = f" of which {still} {verb} still" if still else ""
        return f"for workers to join: {alive} here{idle}, the round needs {round_.floor}"
    return None
