"""Status of the broker: the feed, filled from the state each second, and lines of the run's history."""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from diloco_broker.config.declaration import AUTO
from diloco_broker.core import effects
from diloco_broker.core.members.compatibility import sync_every_of
from diloco_broker.core.members.members import Member
from diloco_broker.core.members.start import Start
from diloco_broker.core.rounds import norms
from diloco_broker.core.rounds.decision import Reason
from diloco_broker.core.rounds.modes import mode_of
from diloco_broker.core.state import RunState
from diloco_broker.standby import fence
from diloco_protocol import feed
from diloco_protocol.records import field_names, to_plain
from diloco_protocol.version import as_hex

EVENTS_KEPT = 20
LONGEST_EVENT = 500  # characters: messages may contain long texts of peers
# Seconds of silence, more than two default heartbeat intervals, after which a worker is shown as slow.
SLOW_AFTER_S = 75.0

R = TypeVar("R")

# Fields of the feed that do not change from round to round.
_SETTINGS = (
    "outer",
    "sync_every",
    "num_fragments",
    "fragment_sync_delay",
    "fragment_delay_auto",
    "fragment_max_delay",
    "fragment_pattern",
    "fragment_update_alpha",
    "fragment_merge",
    "reducer",
    "liveness",
    "asynchronous",
    "wire_dtype",
    "feedback_decay",
    "reply_dtype",
    "workers_wanted",
    "min_workers",
    "save_every",
)


@dataclass
class EventLog:
    """The last log lines, which the feed repeats for displays that connect later."""

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
    """Figures of the loop about itself."""

    version: str  # of the broker's program
    control: str
    use: feed.Loop
    unix_s: float = 0.0  # the clock of its machine


def snapshot_and_line(
    state: RunState, events: EventLog, figures: LoopFigures, sequence: int, now: float
) -> tuple[dict[str, Any], str]:
    """The snapshot for displays, and its JSON, in which numbers that are not finite are null."""
    whole = to_plain(_snapshot(state, events, figures, sequence, now), with_none=True)
    try:
        return whole, json.dumps(whole, allow_nan=False)
    except (ValueError, TypeError):  # rare: a worker sent a bad value; checking all values is slow
        safe: dict[str, Any] = feed.json_safe(whole)
        return safe, json.dumps(safe, allow_nan=False)


def _snapshot(
    state: RunState, events: EventLog, figures: LoopFigures, sequence: int, now: float
) -> feed.Snapshot:
    config, is_auto = state.config, state.config.max_delta_norm == AUTO
    usual = {number: norms.usual(state, number) for number in range(config.num_fragments)}
    waiting_for, report = _waiting_for(state), state.last_report
    outer, schedule = _outer(state), config.outer_schedule
    return _filled(
        feed.Snapshot,
        config,
        feed=feed.FEED_VERSION,
        sequence=sequence,
        epoch=state.epoch,
        run=state.model.run,
        version=figures.version,
        control=figures.control,
        unix_s=figures.unix_s,
        uptime_s=_age(state.started_at, now),
        mode=state.run_config.mode,
        state=_condition(state, waiting_for),
        waiting_for=waiting_for,
        why=_why(state),
        ended=_has_ended(state),
        paused_for_s=_age_if(state.paused_at, now),
        end=_end(state),
        orders=tuple(
            feed.Order(action, tuple(sorted(each.waiting)), len(each.saved), len(each.left))
            for action, each in state.orders.items()
            if each.is_pending
        ),
        round=_round(state, now),
        counts=feed.Counts(
            alive=len(state.members),
            due=state.absences.due(config.workers, len(state.members)),
            participating=len(state.round.participating) if state.round else 0,
            averaged=report.averaged if report else 0,
        ),
        model=_model(state),
        outer=_outer(state),
        fragment_pattern=state.fragment_pattern if config.num_fragments > 1 else None,
        fragment_sync_delay=config.least_delay,
        fragment_delay_auto=config.has_auto_delay,
        fragment_max_delay=config.longest_delay,
        reducer=_filled(
            feed.Reducer,
            config,
            staged=mode_of(config).needs_whole,
            max_delta_norm=None if is_auto else config.max_delta_norm,
            max_delta_norm_auto=is_auto,
            trim=config.trim if config.aggregate == "trimmed-mean" else None,
            grace_s=round(state.grace_s, 3),
            grace_auto=config.grace == AUTO,
            submissions=sum(1 for _ in state.submissions),
            waiting=len(state.submissions.queue),
        ),
        liveness=feed.Liveness(
            heartbeat_timeout_s=config.heartbeat_timeout,
            stall_timeout_s=config.stall_timeout,
            disconnect_grace_s=config.disconnect_grace,
        ),
        asynchronous=_asynchronous(state),
        workers_wanted=config.workers,
        fragments=tuple(
            _filled(
                feed.Fragment,
                each,
                fragment=each.layout.fragment,
                version=each.version.counter,
                tag=as_hex(each.version.tag),
                buffered=each.gradients % config.dn_size if _has_buffer(state) else 0,
                usual_norm=usual[each.layout.fragment],
                lr=None if outer.lr is None else outer.lr * schedule.factor(each.gradients),
                momentum=outer.momentum
                if outer.momentum is None or outer.momentum_warmup is None
                else schedule.momentum(outer.momentum, each.gradients),
            )
            for each in state.versions.trained
            if each.version
        ),
        workers=_workers(state, usual, now),
        dead=_dead(state, usual, now),
        relays=_relays(state, now),
        totals=_totals(state),
        rejections=tuple(
            feed.Rejection(_age(each.at, now), each.worker_id, each.code, each.text[:LONGEST_EVENT])
            for each in state.rejections
        ),
        checkpoint=_checkpoint(state, now),
        term=state.term,
        standby=_standby(state),
        data_sets=tuple(
            _filled(
                feed.DataSet,
                each,
                name=name,
                epoch=each.oldest // each.size,
                held=sum(len(spans) for spans in each.held.values()),
                given_back=len(each.free),
            )
            for name, each in state.data.sets.items()
        ),
        last_round=_filled(feed.LastRound, report, seconds=round(report.seconds, 3))
        if report
        else None,
        events=tuple(
            feed.Event(number, _age(at, now), log.level, log.text)
            for number, at, log in events.entries
        ),
        loop=figures.use,
    )


def _filled(record: type[R], source: object, **others: Any) -> R:
    """Make a record of these fields, and take all others from attributes of the source by name.

    Raises AttributeError for a field that neither has, so that no field silently keeps its default.
    """
    kind: Any = record
    own = {name: getattr(source, name) for name in field_names(kind) if name not in others}
    return record(**own, **others)


def _age(at: float, now: float) -> float:
    return round(now - at, 3)


def _age_if(at: float | None, now: float) -> float | None:
    return None if at is None else round(now - at, 3)


def _round(state: RunState, now: float) -> feed.Round:
    open_ = state.round
    if open_ is None:
        return feed.Round(0, floor=state.config.workers)
    barrier = open_.barrier
    return _filled(
        feed.Round,
        open_,
        phase=open_.phase.value,
        age_s=_age(open_.opened_at, now - state.held_s),
        expected=tuple(sorted(barrier.expected)) if barrier else (),
        arrived=tuple(sorted(open_.begun)),
        missing=tuple(sorted(open_.missing)),
        floor=state.floor if barrier else 0,
    )


def _model(state: RunState) -> feed.Model | None:
    manifest = state.model.manifest
    if manifest is None:
        return None
    return feed.Model(
        parameters=manifest.trainable_elements,
        tensors=len(manifest.entries),
        bytes=4 * sum(entry.elements for entry in manifest.entries),
    )


def _outer(state: RunState) -> feed.Outer:
    """The outer optimizer; settings of a torch optimizer come from its groups."""
    config, name, is_nesterov = state.config, state.config.outer_name, False
    if state.has_own_optimizer:
        lr, momentum = _common(state, "lr"), _common(state, "momentum")
    else:
        is_nesterov = name not in ("sgd", "cgad")
        lr, momentum = config.outer_lr, config.outer_momentum if name != "sgd" else None
    return feed.Outer(
        optimizer=f"{config.outer or ''} torch".strip() if state.has_own_optimizer else name,
        lr=lr,
        momentum=momentum,
        groups=state.outer_groups,
        nesterov=config.nesterov if is_nesterov else None,
        variant=config.dn_variant if name == "dn" else None,
        buffer=config.dn_size if _has_buffer(state) else None,
        c=config.dn_c if name == "dn" else None,
        lr_schedule=config.outer_lr_schedule,
        momentum_warmup=config.outer_momentum_warmup if is_nesterov else None,
        momentum_restart=config.outer_momentum_restart or None,
    )


def _asynchronous(state: RunState) -> feed.Asynchronous | None:
    config, is_cgad = state.config, state.config.outer_name == "cgad"
    if mode_of(config).has_rounds:
        return None
    return _filled(
        feed.Asynchronous,
        config,
        dylu_min_steps=config.least_steps if config.dylu else None,
        slots=config.staging_slots,
        deadline_s=config.staging_deadline,
        cgad_decay=config.cgad_decay if is_cgad else None,
        cgad_cutoff=config.cgad_cutoff_versions if is_cgad else None,
        cgad_epsilon=config.cgad_epsilon if is_cgad else None,
    )


def _checkpoint(state: RunState, now: float) -> feed.Checkpoint | None:
    config, saving = state.config, state.saving
    if config.save_dir is None:
        return None
    return feed.Checkpoint(
        folder=config.save_dir,
        round=saving.number,
        age_s=_age_if(saving.saved_at, now),
        error=saving.error,
        durable=config.durable,
    )


def _standby(state: RunState) -> feed.Standby | None:
    lease = state.standby
    if lease is None:
        return None
    heard = None if lease.incarnation is None else _age(lease.heard_at, lease.now)
    return feed.Standby(
        holds_lease=lease.holds,
        lease_s=lease.seconds,
        heard_age_s=heard,
        is_replaced=lease.superseded_by is not None,
        is_alone=lease.is_alone,
    )


def _totals(state: RunState) -> feed.Totals:
    """Counters of this incarnation of the broker, so that all of them start at the same time."""
    before = asdict(state.totals_before)
    counted = {name: value - before[name] for name, value in asdict(state.totals).items()}
    return feed.Totals(**counted, refused=dict(state.refused), bytes_down=state.versions.bytes_down)


def _condition(state: RunState, waiting_for: str | None) -> str:
    if state.stopping is not None:
        return "stopping"
    if state.paused_at is not None:
        return "paused"
    return "waiting" if waiting_for else "training"


def _end(state: RunState) -> feed.End | None:
    config = state.config
    if (config.max_rounds, config.token_budget, config.max_time) == (None, None, None):
        return None
    return feed.End(
        max_rounds=config.max_rounds,
        token_budget=config.token_budget,
        max_time_s=config.max_seconds,
        rounds=state.round.number if state.round else 0,
        tokens=state.totals.tokens,
        seconds=state.totals.open_s,
        last_round=state.ending.last,
        is_over=state.ending.is_over,
    )


def _has_ended(state: RunState) -> bool:
    """Whether no worker is left, and the last one finished a run that made versions."""
    made = any(each.version and each.version.counter for each in state.versions.trained)
    last = state.departed
    return made and not len(state.members) and last is not None and not last.why


def _common(state: RunState, name: str) -> float | None:
    """The value that all groups of a torch optimizer have; None if they differ."""
    values = {getattr(group, name) for group in state.outer_groups}
    found: float | None = values.pop() if len(values) == 1 else None
    return found


def _has_buffer(state: RunState) -> bool:
    name = state.config.outer if state.has_own_optimizer else state.config.outer_name
    return name in ("dn", "fedbuff")


def _workers(
    state: RunState, usual: Mapping[int, float | None], now: float
) -> tuple[feed.Worker, ...]:
    return tuple(
        _worker(state, member, usual, now, health=_health(member, now)) for member in state.members
    )


def _health(member: Member, now: float) -> str:
    """ok, slow, stalled or lost; a dead worker is not a member."""
    if member.liveness.disconnected_at is not None:
        return "lost"
    if member.liveness.is_stalled:
        return "stalled"
    return "slow" if now - member.liveness.last_seen > SLOW_AFTER_S else "ok"


def _dead(
    state: RunState, usual: Mapping[int, float | None], now: float
) -> tuple[feed.Worker, ...]:
    deaths = state.absences.dead.values()
    shown = [_worker(state, each.member, usual, now, health=feed.DEAD) for each in deaths]
    for worker, death in zip(shown, deaths, strict=True):
        worker.warning, worker.connections = death.why, 0
    return tuple(shown)


def _relays(state: RunState, now: float) -> tuple[feed.Relay, ...]:
    workers = Counter(member.via for member in state.members)
    return tuple(
        feed.Relay(each.name, workers[each.name], each.held_bytes, _age(each.heard_at, now))
        for each in state.relays
    )


def _worker(
    state: RunState, member: Member, usual: Mapping[int, float | None], now: float, *, health: str
) -> feed.Worker:
    figures = member.figures
    fragment, norm = next(reversed(figures.norms.items()), (0, None))
    middle = usual.get(fragment)
    is_finite = figures.loss is None or math.isfinite(figures.loss)
    return feed.Worker(
        id=member.worker_id,
        via=member.via,
        host=figures.host,
        pid=figures.pid,
        state=figures.state,
        health=health,
        round=figures.last_round,
        step=figures.step,
        inner_step=figures.inner_step,
        inner_age_s=_age_if(figures.told_at, now),
        sync_every=sync_every_of(state, member),
        steps_per_s=figures.steps_per_s,
        loss=figures.loss if is_finite else None,
        loss_is_finite=is_finite,
        staleness=figures.staleness,
        pushes=figures.pushes,
        beat_age_s=_age(member.liveness.last_seen, now),
        sync_age_s=_age_if(figures.counted_at, now),
        # Only while the other worker is a member.
        same_as=figures.same_as if (figures.same_as or "") in state.members else None,
        tokens=figures.tokens,
        merge_delay=figures.merge_delay,
        warning=figures.warning,
        bytes_up=member.account.bytes_up,
        bytes_down=member.account.bytes_down,
        rejected=figures.rejected,
        delta_norm=norm,
        times_usual=None if norm is None or middle is None else norm / middle,
        processes=member.processes,
        connections=len(member.lanes) + (member.bulk is not None) if member.processes > 1 else 1,
        extra=dict(figures.extra),
    )


def _why(state: RunState) -> feed.Wait | None:
    """Why the round stays open, as decided after the last event."""
    why, now = state.decision.why, state.run_time
    if why is None:
        return None
    left = None if why.until is None else round(why.until - now, 3)
    is_for_workers = why.reason in (Reason.WORKERS, Reason.PUSHES, Reason.GRACE)
    workers = tuple(sorted(state.round.lacking)) if state.round and is_for_workers else ()
    return feed.Wait(why.reason.value, workers, why.needed, _age(why.since, now), left)


def _waiting_for(state: RunState) -> str | None:
    """Describe what blocks training, as the end of a sentence; None if nothing does."""
    round_, why = state.round, state.decision.why
    if why is not None and why.reason is Reason.LEASE:
        assert state.standby is not None
        return f"for its lease: this hub {fence.why_not(state.standby)}"
    if round_ is None:
        return _for_parameters(state)
    if not len(state.members):
        return _for_workers(state)
    if why is not None and why.reason is Reason.WORKERS:
        stalled = sum(member.liveness.is_stalled for member in state.members)
        verb = "is" if stalled == 1 else "are"
        idle = f", of which {stalled} {verb} stalled" if stalled else ""
        return (
            f"for workers to join: {len(state.members)} joined{idle}; the round needs {state.floor}"
        )
    return None


def _for_parameters(state: RunState) -> str:
    match state.start:
        case Start.WAITING_FOR_HOLDERS:
            return f"for {state.recovery.waits_for}"
        case Start.LOADING_FILE:
            return "for the model file to be loaded"
        case Start.ADOPTING | Start.SEEDING:
            return f"for the parameters of {state.seeding.worker_id}"
    if len(state.members):
        return "for the parameters of a worker"
    has_rounds = mode_of(state.config).has_rounds
    needed = f"; round one needs {state.config.workers}" if has_rounds else ""
    return f"for workers to join{needed}"


def _for_workers(state: RunState) -> str:
    """Describe why no worker is connected."""
    if (last := state.departed) is None:
        return "for workers to join: none has joined yet"
    if last.why:
        return f"for workers to join: none is left; {last.worker_id} left last: {last.why}"
    return "for workers to join: all have left"


# The history.


def round_line(
    state: RunState, report: effects.RoundReport, figures: LoopFigures
) -> dict[str, Any]:
    """A line of the history: a closed round, with figures of its workers."""
    told = asdict(report) | {"seconds": round(report.seconds, 3)}
    del told["workers"]
    return {
        "kind": "round",
        **told,
        "alive": len(state.members),
        "bytes_up": state.totals.bytes_up - state.totals_before.bytes_up,
        "bytes_down": state.versions.bytes_down,
        "cpu_s": figures.use.cpu_s,
        "rss_bytes": figures.use.rss_bytes,
        "longest_turn_ms": figures.use.longest_turn_ms,
        "workers": [
            {
                "id": member.worker_id,
                "via": member.via,
                "host": member.figures.host,
                "step": member.figures.step,
                "steps_per_s": member.figures.steps_per_s,
                "loss": member.figures.loss,
                "delta_norm": next(reversed(member.figures.norms.values()), None),
                "staleness": member.figures.staleness,
                "bytes_up": member.account.bytes_up,
                "bytes_down": member.account.bytes_down,
            }
            for name in report.workers
            if (member := state.members.named(name)) is not None
        ],
    }


def start_line(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    """A line of the history: the settings in a snapshot of the feed."""
    return {
        "kind": "start",
        **{name: snapshot[name] for name in ("version", "run", "mode", "control", "model")},
        "settings": {name: snapshot[name] for name in _SETTINGS},
    }


def action_line(state: RunState, acted: effects.RecordAction) -> dict[str, Any]:
    """A line of the log of actions: an action of an operator."""
    number = state.round.number if state.round else None
    return {**asdict(acted), "run": state.model.run, "round": number}
