"""The catalogue: every field of a snapshot that a display shows, declared once. Pure.

A field has a path in its record, a label, a unit and a format (a name of `quantities.FORMATS`). `row`
is its row in `diloco-broker status`, `diloco-top` and the dashboard, `title` its column in tables of
workers, `metric` its name in the exporter; `is_setting`: the history records it and the report lists it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from diloco_protocol.feed import DEAD, INSECURE, KEYS, LOOPBACK, Round, Snapshot, Totals
from diloco_protocol.quantities import (
    FORMATS,
    byte_size,
    duration,
    figure,
    names,
    norm,
    plural,
    scaled,
)

STATUS, TOP, DASHBOARD, REPORT = "status", "top", "dashboard", "report"
SCREENS = (STATUS, TOP, DASHBOARD)
LARGE = (TOP, DASHBOARD)  # `status` shows a run on 24 lines
GOOD, UNEASY, BAD = "good", "uneasy", "bad"  # tones; "" is none
LEVELS = {"info": "", "warning": UNEASY, "error": BAD}  # tones of events
UNHEARD = ("lost", DEAD)  # healths of workers whose state is unknown
SILENT_S = 10.0  # seconds without a message after which a relay counts as silent
STANDS_OUT = 5.0  # times the usual norm, above which the broker warns of a push


class Part(NamedTuple):
    """A part of a row: its text and its tone."""

    text: str
    tone: str = ""


@dataclass(frozen=True)
class Field:
    """One field. `say` makes its text if `phrase` and `format` do not suffice, `measure` the value of
    its metric if it is not that at `path`. Only metrics and columns need `help`."""

    path: str  # of an attribute in the record of its table; unique there
    label: str
    help: str = ""
    format: str = "whole"
    unit: str = ""
    row: str = ""
    phrase: str = "{}"
    tone: str = ""
    say: Callable[[Any], str | Part | None] | None = None
    title: str = ""
    metric: str = ""  # without `diloco_`
    measure: Callable[[Any], float | None] | None = None
    is_setting: bool = False
    displays: tuple[str, ...] = SCREENS  # that show its row or column

    def value(self, record: Any) -> Any:
        """The value at its path; None if a record on the path is None."""
        for name in self.path.split("."):
            record = None if record is None else getattr(record, name)
        return record

    def text(self, record: Any) -> str:
        """Its value in its format."""
        return FORMATS[self.format](self.value(record))

    def part(self, record: Any) -> Part:
        """Its part of a row; an empty text if it is not shown."""
        if self.say is not None:
            said = self.say(record)
            return said if isinstance(said, Part) else Part(said or "", self.tone * bool(said))
        value = self.value(record)
        if value is None or value == "":
            return Part("")
        return Part(self.phrase.format(FORMATS[self.format](value)), self.tone)

    def measured(self, record: Any) -> float | None:
        """The value of its metric; None where it is unknown."""
        found = self.value(record) if self.measure is None else self.measure(record)
        return None if found is None else float(found)


# The text of single fields.


def has_round(snapshot: Snapshot) -> bool:
    """Whether a round is open; before the first, the feed has a round 0 that expects no worker."""
    now = snapshot.round
    return snapshot.mode != "async" and now is not None and bool(now.number or now.expected)


def run_name(snapshot: Snapshot) -> str:
    """The first eight characters of the run's id, as displays show it."""
    return (snapshot.run or "")[:8]


def confirmed_by(snapshot: Snapshot | None) -> str:
    """The text to type to end a run: its name, if it has one yet."""
    return (run_name(snapshot) if snapshot else "") or "shutdown"


def state_of(snapshot: Snapshot) -> Part:
    """The state of the run, with its duration or reason."""
    state = snapshot.state
    if state == "waiting" and snapshot.ended:
        return Part("ended: all workers have left; others may still join")
    if state == "paused" and snapshot.paused_for_s is not None:
        return Part(f"paused for {duration(snapshot.paused_for_s)}", UNEASY)
    if state == "waiting" and snapshot.waiting_for:
        return Part(f"waiting {snapshot.waiting_for}", UNEASY)
    return Part(state, "" if state == "training" else UNEASY)


_SECURITY = {
    KEYS: Part("keys: only holders of a key connect"),
    LOOPBACK: Part("loopback: not reachable from other machines"),
    INSECURE: Part(
        "INSECURE: any machine that reaches it may train, steer and read; use serve --keys DIR", BAD
    ),
}


def _of_round(say: Callable[[Snapshot, Round], str]) -> Callable[[Snapshot], str]:
    """Text about the open round; empty before the first."""
    return lambda snapshot: (
        say(snapshot, snapshot.round) if snapshot.round and has_round(snapshot) else ""
    )


def _in_round(measure: Callable[[Round], float]) -> Callable[[Snapshot], float | None]:
    """A figure of the open round; None before the first."""
    return lambda snapshot: (
        measure(snapshot.round) if snapshot.round and has_round(snapshot) else None
    )


def _when_async(phrase: str, count: Callable[[Snapshot], int]) -> Callable[[Snapshot], str]:
    return lambda snapshot: phrase.format(count(snapshot)) if snapshot.mode == "async" else ""


def _named(snapshot: Snapshot, what: str, ids: tuple[str, ...]) -> str:
    return f"{what}: {names(ids)}" if ids and has_round(snapshot) else ""


_WAITS = {"grace": "grace period", "closing": "closing"}


def _why(snapshot: Snapshot) -> str:
    """Why the round is open; missing pushes are a part of their own."""
    why = snapshot.why
    if why is None or why.reason not in _WAITS:
        return ""
    left = "" if why.left_s is None else f", {duration(why.left_s)} left"
    return f"{_WAITS[why.reason]} for {duration(why.since_s)}{left}"


def _last(snapshot: Snapshot) -> str:
    last = snapshot.last_round
    if last is None:
        return ""
    return f"push {last.number + 1}" if snapshot.mode == "async" else f"round {last.number}"


def _of_last_round(phrase: str, value: Callable[[Any], str]) -> Callable[[Snapshot], str]:
    """Text about the last round of a synchronous run."""

    def say(snapshot: Snapshot) -> str:
        last = snapshot.last_round
        return phrase.format(value(last)) if last and snapshot.mode != "async" else ""

    return say


def _last_staleness(snapshot: Snapshot) -> str:
    last = snapshot.last_round
    if last is None or (snapshot.mode != "async" and not last.staleness):
        return ""
    return f"staleness {plural(last.staleness, 'version')}"


def _progress(made: str, limit: str, unit: str, format: str) -> Callable[[Snapshot], str]:
    """Progress towards a limit of the run."""

    def say(snapshot: Snapshot) -> str:
        end, write = snapshot.end, FORMATS[format]
        if end is None or getattr(end, limit) is None:
            return ""
        return f"{write(getattr(end, made))} of {write(getattr(end, limit))}{unit}"

    return say


def _scheduled(name: str, label: str) -> Callable[[Snapshot], str]:
    """A setting of the outer optimizer, with its scheduled value first if that differs."""

    def say(snapshot: Snapshot) -> str:
        outer, fragment = snapshot.outer, snapshot.round.fragment if snapshot.round else 0
        given = getattr(outer, name)
        now = next((getattr(f, name) for f in snapshot.fragments if f.fragment == fragment), None)
        if given is None or now is None or now == given:
            return "" if given is None else f"{label} {given:g}"
        schedule = outer.lr_schedule if name == "lr" else outer.momentum_warmup
        return f"{label} {now:.3g} of {given:g}" + (f" ({schedule})" if schedule else "")

    return say


def _versions(snapshot: Snapshot) -> str:
    parts = snapshot.fragments
    if len(parts) == 1:
        return f"v{parts[0].version}"
    return " ".join(f"{part.fragment}:v{part.version}" for part in parts)


def _contributions(snapshot: Snapshot) -> str:
    counts = [part.contributions for part in snapshot.fragments]
    if not any(counts):
        return ""
    by_fragment = f" ({' '.join(map(str, counts))})" if len(counts) > 1 else ""
    return f"{plural(sum(counts), 'push', 'pushes')} averaged{by_fragment}"


def _has_fragments(snapshot: Snapshot) -> bool:
    count = snapshot.num_fragments or len(snapshot.fragments)
    return count > 1 or snapshot.fragment_delay_auto or snapshot.fragment_sync_delay > 0


def _split(snapshot: Snapshot) -> str:
    count = snapshot.num_fragments or len(snapshot.fragments)
    return f"{count} {snapshot.fragment_pattern or ''}".strip() if _has_fragments(snapshot) else ""


def _delay(snapshot: Snapshot) -> str:
    if not _has_fragments(snapshot):
        return ""
    if not snapshot.fragment_delay_auto:
        return f"merged after {plural(snapshot.fragment_sync_delay, 'step')}"
    delays = [each.merge_delay for each in snapshot.workers if each.merge_delay is not None]
    if not delays:
        return "merged on arrival"
    since = "" if min(delays) == max(delays) else f"{min(delays)} to "
    return f"merged on arrival, last after {since}{plural(max(delays), 'step')}"


def _longest_delay(snapshot: Snapshot) -> str:
    longest = snapshot.fragment_max_delay
    varies = snapshot.fragment_delay_auto or longest != snapshot.fragment_sync_delay
    return f"at most {longest}" if _has_fragments(snapshot) and longest and varies else ""


def _merge(snapshot: Snapshot) -> str:
    if not _has_fragments(snapshot):
        return ""
    is_alpha = snapshot.fragment_merge == "alpha"
    return f"alpha {snapshot.fragment_update_alpha:g}" if is_alpha else snapshot.fragment_merge


def _of_quorum(phrase: str, name: str) -> Callable[[Snapshot], str]:
    """Text about a setting that applies only with a quorum."""
    return lambda snapshot: (
        "" if snapshot.reducer.quorum is None else phrase.format(getattr(snapshot.reducer, name))
    )


def _grace(snapshot: Snapshot) -> str:
    of = snapshot.reducer
    phrase = "grace auto, now {:g} s" if of.grace_auto else "grace {:g} s"
    return "" if of.quorum is None else phrase.format(of.grace_s)


def _dylu(snapshot: Snapshot) -> str:
    of = snapshot.asynchronous
    if of is None:
        return ""
    least = "" if of.dylu_min_steps is None else f" from {plural(of.dylu_min_steps, 'step')}"
    return f"DyLU{least}" if of.dylu else "no DyLU"


def _most_staleness(snapshot: Snapshot) -> str:
    if snapshot.asynchronous is None:
        return ""
    most = snapshot.asynchronous.max_staleness
    return "any staleness" if most is None else f"staleness up to {plural(most, 'version')}"


def _limit(name: str, phrase: str, never: str) -> Callable[[Snapshot], str]:
    """Text about a timeout; 0 is never, None is unknown."""

    def say(snapshot: Snapshot) -> str:
        seconds = getattr(snapshot.liveness, name)
        return "" if seconds is None else phrase.format(f"{seconds:g} s") if seconds else never

    return say


def _checkpoint(snapshot: Snapshot) -> Part:
    saved = snapshot.checkpoint
    if saved is None:
        is_known = "checkpoint" in snapshot.raw  # another broker may not report checkpoints
        return Part("none: the broker has no save folder", UNEASY) if is_known else Part("")
    if saved.round is None or saved.age_s is None:
        return Part("none yet")
    said = f"before round {saved.round}, {duration(saved.age_s)} ago"
    return Part(said, "" if saved.error else GOOD)


def _standby(snapshot: Snapshot) -> Part:
    of = snapshot.standby
    if of is None:
        return Part("")
    if of.is_replaced:
        return Part("replaced: the standby has taken over", BAD)
    if of.is_alone:
        return Part("declared gone: this broker continues alone", UNEASY)
    held = "held" if of.holds_lease else "lost"
    heard = "never heard" if of.heard_age_s is None else f"heard {duration(of.heard_age_s)} ago"
    return Part(f"lease of {of.lease_s:g} s {held}, {heard}", "" if of.holds_lease else BAD)


def refusals(totals: Totals) -> dict[str, int]:
    """Rejected work by reason. The values of a mapping in the feed are not validated."""
    return {code: count for code, count in totals.refused.items() if isinstance(count, int)}


def _rejected(snapshot: Snapshot) -> Part:
    count, reasons = snapshot.totals.rejected, refusals(snapshot.totals).items()
    most = sorted(reasons, key=lambda item: (-item[1], item[0]))
    why = ", ".join(f"{number} {code.replace('_', ' ')}" for code, number in most)
    said = f"{count:,}: {why}" if why else f"{count:,}"
    return Part(said, UNEASY if count else "")


def _counted(phrase: str, value: Callable[[Snapshot], int], tone: str) -> Callable[[Any], Part]:
    """A number in a tone if it is not 0."""

    def say(snapshot: Snapshot) -> Part:
        count = value(snapshot)
        return Part(phrase.format(f"{count:,}"), tone if count else "")

    return say


# fmt: off
OF_SNAPSHOT: tuple[Field, ...] = (
    Field("run", "Run", row="run", say=lambda s: run_name(s) or "not begun"),
    Field("mode", "Mode", format="text", row="run"),
    Field("version", "Version", format="text", row="broker", displays=LARGE),
    Field("uptime_s", "Uptime", "Time since the broker's start.", "duration", row="run",
        phrase="up {}", metric="broker_uptime_seconds"),
    Field("state", "State", row="state", say=state_of),
    Field("ended", "Ended", "1 once all workers have left as done, after a round at least, else 0.",
        metric="run_ended"),
    Field("paused_for_s", "Paused for", "How long the run has been paused; absent while it is not.",
        metric="run_paused_seconds"),
    Field("security", "Security",
        "1 if other machines reach the broker and it requires no keys, so that anyone may steer, "
        "else 0.",
        row="security", say=lambda s: _SECURITY.get(s.security), metric="broker_insecure",
        measure=lambda s: s.security == INSECURE if s.security else None),

    Field("round", "Round", "Round that is open or closing.", row="round",
        say=_of_round(lambda _, now: f"{now.number} {now.phase} for {duration(now.age_s)}"),
        metric="round_number", measure=_in_round(lambda now: now.number)),
    Field("round.age_s", "Round open for", "Time since the round opened.", "duration",
        metric="round_age_seconds", measure=_in_round(lambda now: now.age_s)),
    Field("round.phase", "Phase", "1 if the round is closing, 0 if it is open.", "text",
        metric="round_closing", measure=_in_round(lambda now: now.phase == "closing")),
    Field("round.fragment", "Fragment of the round", "Fragment that the round concerns.", row="round",
        say=_of_round(lambda s, now: f"fragment {now.fragment}" * (len(s.fragments) > 1)),
        metric="round_fragment", measure=_in_round(lambda now: now.fragment)),
    Field("round.expected", "Expected", "Workers that the round expects.", "names",
        metric="round_workers_expected", measure=_in_round(lambda now: len(now.expected))),
    Field("round.arrived", "Arrived", "Workers whose push has begun.", row="round",
        say=_of_round(lambda _, now: f"{len(now.arrived)} of {len(now.expected)} arrived"),
        metric="round_workers_arrived", measure=_in_round(lambda now: len(now.arrived))),
    Field("applied", "Applied", row="pushes",
        say=_when_async("{} applied", lambda s: sum(f.gradients for f in s.fragments))),
    Field("reducer.submissions", "In progress",
        "Submissions that the broker keeps, whole or in part.", row="pushes",
        say=_when_async("{} in progress", lambda s: s.reducer.submissions),
        metric="pending_submissions"),
    Field("reducer.waiting", "Waiting for a slot", "Submissions that wait for a slot.", row="pushes",
        say=_when_async("{} waiting for a slot", lambda s: s.reducer.waiting),
        metric="waiting_submissions"),
    Field("missing", "Missing", "Workers that the round waits for.", row="round",
        say=lambda s: _named(s, "missing", s.missing),
        metric="round_workers_missing", measure=_in_round(lambda now: len(now.missing))),
    Field("training", "Training", row="round", say=lambda s: _named(s, "training", s.training)),
    Field("round.floor", "Least contributions", "Workers below which the round stays open.",
        row="round", say=_of_round(lambda _, now: f"needs {now.floor}" if now.floor else ""),
        metric="round_workers_floor", measure=_in_round(lambda now: now.floor)),
    Field("why.reason", "Waits for", row="round", say=_of_round(lambda s, _: _why(s))),

    Field("counts.alive", "Workers alive", "Workers that are alive.", row="workers",
        phrase="{} alive", metric="workers_alive"),
    Field("counts.participating", "Workers participating",
        "Workers whose push for the coming version is in progress or complete.", row="workers",
        phrase="{} participating", metric="workers_participating"),
    Field("counts.averaged", "Workers averaged", "Workers averaged in the last round.", row="workers",
        phrase="{} averaged", metric="workers_averaged"),
    Field("counts.due", "Workers due",
        "Workers that should be alive: --workers less those that left properly, or the living and the "
        "dead together where these are more.",
        metric="workers_due"),
    Field("workers_wanted", "Workers", "Workers that round one waits for.", row="workers",
        phrase="{} wanted", metric="workers_wanted", is_setting=True),
    Field("min_workers", "Least contributions to a round", "Workers below which no round closes.",
        row="workers",
        say=lambda s: f"no round below {s.min_workers}" if (s.min_workers or 1) > 1 else "",
        metric="workers_minimum", is_setting=True),
    Field("totals.deaths", "Deaths", "Workers that died.", row="workers",
        say=_counted("{} died", lambda s: s.totals.deaths, BAD), metric="deaths_total"),

    Field("last_round.number", "Last round", "Round that closed last.", row="last", say=_last,
        metric="last_round_number"),
    Field("last_round.seconds", "Last round's time",
        "Time that the last round took; absent in asynchronous mode.", row="last",
        say=_of_last_round("took {}", lambda last: duration(last.seconds)),
        metric="last_round_seconds",
        measure=lambda s: s.last_round.seconds if s.last_round and s.mode != "async" else None),
    Field("last_round.averaged", "Averaged", row="last",
        say=_of_last_round("{} averaged", lambda last: str(last.averaged))),
    Field("last_round.weight", "Weight", "Sum of the weights averaged in the last round.",
        metric="last_round_weight"),
    Field("last_round.loss", "Loss", "Mean loss that the workers of the last round reported.",
        "figure", row="last", phrase="loss {}", metric="last_round_loss"),
    Field("last_round.delta_norm", "Delta norm",
        "Mean norm of the pseudo-gradients of the last round.", "norm", row="last",
        phrase="delta norm {}", metric="last_round_delta_norm"),
    Field("last_round.staleness", "Staleness",
        "Versions between the oldest base in the last round and the version that it made.",
        row="last", say=_last_staleness, metric="last_round_staleness_versions"),

    Field("end.max_rounds", "Limit of rounds",
        "Rounds after which the run ends (--max-rounds); absent without such an end.", row="end",
        say=_progress("rounds", "max_rounds", " rounds", "count"), metric="end_limit_rounds"),
    Field("end.token_budget", "Limit of tokens",
        "Tokens after which the run ends (--token-budget); absent without such an end.", row="end",
        say=_progress("tokens", "token_budget", " tokens", "amount"), metric="end_limit_tokens"),
    Field("end.max_time_s", "Limit of time",
        "Time after which the run ends (--max-time); absent without such an end.", row="end",
        say=_progress("seconds", "max_time_s", "", "duration"), metric="end_limit_seconds"),
    Field("end.rounds", "Rounds made", "Rounds made, of a run that was given an end.",
        metric="end_made_rounds"),
    Field("end.tokens", "Tokens counted", "Tokens in counted work, of a run that was given an end.",
        metric="end_made_tokens"),
    Field("end.seconds", "Time used",
        "Time in which rounds could close, of a run that was given an end.",
        metric="end_made_seconds"),
    Field("end.is_over", "Over", "1 once no other version will be made, else 0.", row="end",
        tone=UNEASY, say=lambda s: "the run is over" if s.end and s.end.is_over else "",
        metric="end_reached"),

    Field("model.parameters", "Parameters", "Trainable parameters.", "parameters", row="model",
        phrase="{} parameters", metric="model_parameters"),
    Field("model.tensors", "Tensors", row="model", phrase="{} tensors"),
    Field("model.bytes", "Model size", "Size of the model at the broker.", "bytes", row="model",
        metric="model_size_bytes"),
    Field("versions", "Versions", row="model", say=_versions),
    Field("contributions", "Pushes averaged", row="model", say=_contributions),

    Field("outer.optimizer", "Outer optimizer", row="outer", is_setting=True,
        say=lambda s: " ".join(filter(None, (s.outer.optimizer, s.outer.variant)))),
    Field("outer.variant", "Variant of Delayed Nesterov", is_setting=True),
    Field("outer.lr", "Outer learning rate", "Outer learning rate.", row="outer",
        say=_scheduled("lr", "lr"), metric="outer_learning_rate", is_setting=True),
    Field("outer.lr_schedule", "Learning-rate schedule", is_setting=True),
    Field("outer.momentum", "Outer momentum", "Outer momentum.", row="outer",
        say=_scheduled("momentum", "momentum"), metric="outer_momentum", is_setting=True),
    Field("outer.momentum_warmup", "Momentum warm-up", is_setting=True),
    Field("outer.momentum_restart", "Rounds between momentum restarts", row="outer", is_setting=True,
        say=lambda s: f"momentum reset every {s.outer.momentum_restart} rounds"
        if s.outer.momentum_restart else ""),
    Field("outer.nesterov", "Nesterov", row="outer", is_setting=True,
        say=lambda s: "no Nesterov" if s.outer.nesterov is False else ""),
    Field("outer.c", "Constant c of Delayed Nesterov", row="outer", is_setting=True,
        say=lambda s: f"c {s.outer.c:g}" if s.outer.c else ""),
    Field("outer.buffer", "Gradients to a momentum step",
        "Pseudo-gradients to one step of a buffered outer optimizer; absent without a buffer.",
        row="outer", metric="outer_buffer_gradients", is_setting=True,
        say=lambda s: f"buffer {' '.join(str(f.buffered) for f in s.fragments) or 0} of {size}"
        if (size := s.outer.buffer or 0) > 1 else ""),
    Field("outer.groups", "Groups of the torch optimizer", is_setting=True),

    Field("sync_every", "Steps to a boundary (H)", "Inner steps to a round (H).", row="outer",
        phrase="every {} steps", metric="sync_every_steps", is_setting=True),
    Field("wire_dtype", "Pseudo-gradients are sent as", is_setting=True, row="outer",
        say=lambda s: f"{s.wire_dtype} up, {s.reply_dtype} down" if s.wire_dtype else ""),
    Field("reply_dtype", "Parameters are sent as", is_setting=True),
    Field("feedback_decay", "Decay of error feedback", is_setting=True, row="outer",
        say=lambda s: f"feedback decays by {s.feedback_decay:g}" if s.feedback_decay != 1 else ""),

    Field("num_fragments", "Fragments (P)", "Fragments of the model.", row="fragments", say=_split,
        metric="fragments", measure=lambda s: len(s.fragments) or None, is_setting=True),
    Field("fragment_pattern", "How the model is split", is_setting=True),
    Field("fragment_delay_auto", "Replies are merged on arrival", is_setting=True),
    Field("fragment_sync_delay", "Steps from sending to merging (tau)",
        "Steps after which a reply is merged; absent where it is merged on arrival.", row="fragments",
        say=_delay, metric="fragment_delay_steps",
        measure=lambda s: None if s.fragment_delay_auto else s.fragment_sync_delay, is_setting=True),
    Field("fragment_max_delay", "Steps after which a worker waits",
        "Steps after which a worker waits for a reply.", row="fragments", say=_longest_delay,
        metric="fragment_max_delay_steps", is_setting=True),
    Field("fragment_merge", "Merge", is_setting=True),
    Field("fragment_update_alpha", "Weight of local parameters (alpha)",
        "Weight of the local parameters where a reply is merged; absent where it is rebased.",
        row="fragments", say=_merge, metric="fragment_alpha_ratio", is_setting=True,
        measure=lambda s: s.fragment_update_alpha if s.fragment_merge == "alpha" else None),

    Field("reducer.aggregate", "Aggregate", row="reducing", is_setting=True,
        say=lambda s: s.reducer.aggregate.removeprefix("mean")),
    Field("reducer.trim", "Trimmed at each end", format="percent", row="reducing",
        phrase="without {} at each end", is_setting=True),
    Field("reducer.weight_by", "Weights", row="reducing", is_setting=True,
        say=lambda s: f"weights by {by}" if (by := s.reducer.weight_by) != "equal" else ""),
    Field("reducer.staged", "Submissions are staged", is_setting=True),
    Field("reducer.deterministic", "Deterministic order of folds", row="reducing", is_setting=True,
        say=lambda s: "deterministic" * s.reducer.deterministic),
    Field("reducer.relays", "Relays", row="reducing", say=lambda s: "with relays" * s.reducer.relays),
    Field("reducer.max_delta_norm", "Longest pseudo-gradient", format="setting", row="reducing",
        phrase="norm to {}", is_setting=True),
    Field("reducer.max_delta_norm_auto", "Longer than 5 times the usual is rejected", row="reducing",
        is_setting=True, say=lambda s: "norm to 5 times the median" * s.reducer.max_delta_norm_auto),
    Field("reducer.quorum", "Quorum", row="reducing", say=_of_quorum("quorum {}", "quorum"),
        is_setting=True),
    Field("reducer.grace_s", "Grace",
        "Wait for more contributions once there are enough; with --grace auto that of the last quorum.",
        row="reducing", say=_grace, metric="grace_seconds", is_setting=True),
    Field("reducer.grace_auto", "Grace as long as no worker pauses for it", is_setting=True),
    Field("reducer.late", "Late work", row="reducing", say=_of_quorum("late work: {}", "late"),
        is_setting=True),

    Field("asynchronous.dylu", "Dynamic Local Updates",
        "1 with Dynamic Local Updates, else 0; absent in a run with rounds.", row="async", say=_dylu,
        metric="dylu_enabled", is_setting=True),
    Field("asynchronous.dylu_min_steps", "Least steps of a slow worker",
        "Least steps that a slow worker is given; absent without Dynamic Local Updates.",
        metric="dylu_minimum_steps", is_setting=True),
    Field("asynchronous.staleness_weight", "Weight of stale work", row="async", is_setting=True,
        say=lambda s: f"weight {of.staleness_weight}"
        if (of := s.asynchronous) and of.staleness_weight != "none" else ""),
    Field("asynchronous.max_staleness", "Most staleness",
        "Staleness above which work is rejected; absent without a limit.", row="async",
        say=_most_staleness, metric="staleness_limit_versions", is_setting=True),
    Field("asynchronous.slots", "Slots",
        "Submissions in progress at a time; absent in a run with rounds.", row="async",
        phrase="{} slots", metric="submission_slots", is_setting=True),
    Field("asynchronous.deadline_s", "Slot lost without progress for", format="duration", row="async",
        phrase="deadline {}", is_setting=True),

    Field("asynchronous.cgad_decay", "Decay of stale work", format="setting", row="async",
        phrase="decay {} a version", is_setting=True),
    Field("asynchronous.cgad_cutoff", "Staleness that counts nothing", row="async",
        phrase="cutoff {}", is_setting=True),
    Field("asynchronous.cgad_epsilon", "Epsilon of Adam", format="setting", row="async",
        phrase="epsilon {}", is_setting=True),

    Field("liveness.heartbeat_timeout_s", "Dead after silence of",
        "Silence after which a worker counts as dead; 0 is never.", row="timeouts",
        say=_limit("heartbeat_timeout_s", "silent {}: dead", "silent: never dead"),
        metric="heartbeat_timeout_seconds", is_setting=True),
    Field("liveness.stall_timeout_s", "Stalled without a step for",
        "Time without a step after which no round waits for a worker; 0 is never.", row="timeouts",
        say=_limit("stall_timeout_s", "no step {}: stalled", "no step: not stalled"),
        metric="stall_timeout_seconds", is_setting=True),
    Field("liveness.disconnect_grace_s", "Time to reconnect",
        "Time that a worker has to come back after its connection broke.", row="timeouts",
        say=_limit("disconnect_grace_s", "{} to reconnect", "no time to reconnect"),
        metric="disconnect_grace_seconds", is_setting=True),

    Field("checkpoint.age_s", "Newest checkpoint",
        "Time since the newest checkpoint; absent before the first.", row="checkpoint",
        say=_checkpoint, metric="checkpoint_age_seconds"),
    Field("checkpoint.round", "Round of the newest checkpoint",
        "Round that follows the newest checkpoint.", metric="checkpoint_round"),
    Field("checkpoint.error", "Save error",
        "1 if the last save failed; absent without a save folder.", "text", row="checkpoint",
        tone=BAD, phrase="NOT SAVED: {}", metric="checkpoint_failed",
        measure=lambda s: None if s.checkpoint is None else s.checkpoint.error is not None),
    Field("checkpoint.folder", "Save folder", format="text", row="checkpoint", phrase="in {}",
        displays=(STATUS, DASHBOARD)),
    Field("checkpoint.durable", "Durable", row="checkpoint",
        say=lambda s: "durable" if s.checkpoint and s.checkpoint.durable else ""),
    Field("save_every", "Rounds between checkpoints", is_setting=True),

    Field("term", "Term", row="standby", say=lambda s: f"term {s.term}" if s.term else ""),
    Field("standby.holds_lease", "Lease", row="standby", say=_standby),

    Field("totals.rejected", "Rejected", row="rejected", say=_rejected),
    Field("totals.malformed", "Malformed", "Messages that broke the wire protocol.", row="rejected",
        metric="malformed_messages_total",
        say=_counted("{} malformed", lambda s: s.totals.malformed, UNEASY)),
    Field("totals.bytes_up", "Sent up",
        "Pseudo-gradients, and the first parameters, received from workers.", "bytes", row="traffic",
        displays=LARGE, phrase="{} up", metric="uploaded_bytes_total"),
    Field("totals.bytes_down", "Sent down", "Parameters sent to workers.", "bytes", row="traffic",
        displays=LARGE, phrase="{} down", metric="downloaded_bytes_total"),
    Field("totals.pushes", "Pushes", "Pushes begun.", "count", row="traffic", displays=LARGE,
        phrase="{} pushes", metric="pushes_total"),
    Field("totals.contributions", "Pushes counted", "Pushes counted whole.",
        metric="contributions_total"),
    Field("totals.rounds", "Rounds", "Rounds closed.", "count", row="broker", displays=LARGE,
        phrase="{} rounds", metric="rounds_total"),
    Field("loop.longest_turn_ms", "Longest turn",
        "CPU time of the longest turn of the broker's loop between its last two snapshots.", "norm",
        row="broker", displays=LARGE, phrase="turn {} ms", metric="broker_longest_turn_seconds",
        measure=lambda s: None if (turn := s.loop.longest_turn_ms) is None else turn / 1000),
    Field("loop.cpu_s", "CPU time", "CPU time of the broker's own thread.", "duration", row="broker",
        displays=LARGE, phrase="cpu {}", metric="broker_cpu_seconds_total"),
    Field("loop.rss_bytes", "Memory", "Resident memory of the broker.", "bytes", row="broker",
        displays=LARGE, phrase="rss {}", metric="broker_resident_memory_bytes"),
)

OF_FRAGMENT: tuple[Field, ...] = (
    Field("version", "Version", "Counter of the fragment's newest version.",
        metric="fragment_version"),
    Field("buffered", "Buffered", "Pseudo-gradients in the buffer of the outer optimizer.",
        metric="fragment_buffered_gradients"),
    Field("contributions", "Pushes averaged", "Pushes counted into the fragment.",
        metric="fragment_contributions_total"),
    Field("usual_norm", "Usual norm",
        "Median norm of the workers' last pseudo-gradients; absent with fewer than three.",
        metric="fragment_usual_norm"),
    Field("lr", "Learning rate",
        "Outer learning rate of the fragment's next step, as its schedule has it.",
        metric="fragment_outer_learning_rate"),
    Field("momentum", "Momentum",
        "Outer momentum of the fragment's next step, as its warm-up has it.",
        metric="fragment_outer_momentum"),
)

# Commands of an operator to all workers, until each has answered.
OF_ORDER: tuple[Field, ...] = (
    Field("waiting", "No answer from",
        "Workers that have not answered an operator's command; absent while there is none.", "names",
        row="commands", phrase="no answer from {}", tone=UNEASY, metric="order_waiting_workers",
        measure=lambda of: len(of.waiting)),
    Field("saved", "Saved", "Workers that have saved for it.", row="commands",
        say=lambda of: f"{of.saved} saved" if of.saved else "", metric="order_saved_workers"),
    Field("left", "Left", "Workers that have left for it.", row="commands",
        say=lambda of: f"{of.left} left" if of.left else "", metric="order_left_workers"),
)


def _is_exhausted(of: Any) -> bool:
    return bool(of.epochs) and of.counted >= of.size * of.epochs


def _epoch(of: Any) -> str:
    return "" if _is_exhausted(of) else f"epoch {of.epoch + 1}" + f" of {of.epochs}" * bool(of.epochs)


def _units(of: Any) -> str:
    total = of.size * of.epochs
    if _is_exhausted(of):
        return f"all {scaled(total)} units counted"
    return scaled(of.counted) + f" of {scaled(total)}" * bool(total) + " units counted"


def _units_left(of: Any) -> str:
    left = of.size * of.epochs - of.counted - of.held
    return f"{scaled(max(0, left))} left" if of.epochs and not _is_exhausted(of) else ""


OF_DATA_SET: tuple[Field, ...] = (
    Field("epoch", "Epoch", "Oldest epoch of which something is not counted, from 0.", row="data",
        say=_epoch, metric="data_set_epoch"),
    Field("epochs", "Epochs", "Epochs that are handed out; absent where they have no end.",
        metric="data_set_epochs", measure=lambda of: of.epochs or None),
    Field("counted", "Counted", "Units in the global parameters, of all epochs together.", row="data",
        say=_units, metric="data_set_counted_units_total"),
    Field("held", "Handed out", "Units that workers have and that are not counted.", row="data",
        say=lambda of: f"{scaled(of.held)} handed out" if of.held else "",
        metric="data_set_handed_out_units"),
    Field("size", "Size", "Units in one epoch of the data set.", row="data", say=_units_left,
        metric="data_set_size_units"),
    Field("given_back", "Given back", "Units that were given back and not handed out again yet.",
        metric="data_set_given_back_units"),
)

OF_RELAY: tuple[Field, ...] = (
    Field("workers", "Workers", "Workers that come through the relay.", row="relays",
        say=lambda of: plural(of.workers, "worker"), metric="relay_workers"),
    Field("held_bytes", "Held", "Chunks that the relay holds for the broker.",
        metric="relay_held_bytes"),
    Field("silent_s", "Silent", "Time since the relay was heard.", row="relays",
        say=lambda of: Part(f"silent {duration(of.silent_s)}", UNEASY)
        if of.silent_s >= SILENT_S else "",
        metric="relay_heard_age_seconds"),
)

IN_TABLES = (STATUS, TOP, DASHBOARD, REPORT)
# In the order of columns; `title` is the column's, in terminals in capitals; `say` is of `rows.Listed`.
OF_WORKER: tuple[Field, ...] = (
    Field("id", "Worker", "Id of the worker.", "text", title="Worker", displays=IN_TABLES,
        say=lambda of: of.worker.title),
    Field("health", "Health", "Whether the worker is well (1), or slow, stalled, lost or dead (0).",
        "text", title="Health", metric="worker_healthy", measure=lambda of: of.health == "ok",
        say=lambda of: Part(health := of.worker.health,
            GOOD if health == "ok" else BAD if health in UNHEARD else UNEASY)),
    Field("host", "Host", "Machine that the worker runs on.", "text", title="Host",
        displays=IN_TABLES),
    Field("via", "Via", "Relay that the worker comes through.", "text", title="Via",
        displays=IN_TABLES),
    Field("state", "State", "State of the worker; unknown while it is lost or dead.", "text",
        title="State"),
    Field("round", "Round", "Last round that the worker pushed for.", title="Round", displays=LARGE,
        metric="worker_round"),
    Field("step", "Steps", "Inner steps that the worker has made.", "amount", title="Steps",
        unit="steps", displays=(STATUS, TOP), metric="worker_steps_total"),
    Field("inner_step", "Inner steps",
        "Inner steps since the worker's last boundary; absent while it is lost or dead.",
        title="Inner", unit="steps", metric="worker_inner_steps",
        say=lambda of: (f"{of.worker.inner_step if of.inner_now is None else f'~{of.inner_now}'}"
            f"/{of.worker.sync_every}"),
        measure=lambda of: None if of.health in UNHEARD else of.inner_step),
    Field("sync_every", "Steps to a boundary (H)",
        "Inner steps to a push of the worker (H, with DyLU its own).", unit="steps",
        metric="worker_sync_every_steps", measure=lambda of: of.sync_every or None),
    Field("steps_per_s", "Speed",
        "Inner steps a second, as the worker reports; absent while it is lost or dead.", "amount",
        title="Speed", unit="steps/s", displays=IN_TABLES, metric="worker_steps_per_second",
        measure=lambda of: None if of.health in UNHEARD else of.steps_per_s),
    Field("loss", "Loss", "Loss that the worker reported last; NaN if that was not finite.", "figure",
        title="Loss", displays=IN_TABLES, metric="worker_loss",
        measure=lambda of: of.loss if of.loss_is_finite else math.nan,
        say=lambda of: figure(of.worker.loss) if of.worker.loss_is_finite else Part("nan", BAD)),
    Field("delta_norm", "Delta norm",
        "Euclidean norm of the worker's last pseudo-gradient, as the broker measured it.", "norm",
        title="Norm", displays=(TOP, DASHBOARD, REPORT), metric="worker_delta_norm",
        say=lambda of: Part(norm(of.worker.delta_norm),
            UNEASY * ((of.worker.times_usual or 0) > STANDS_OUT))),
    Field("times_usual", "Times the usual norm",
        "That over the median of the workers, of the same fragment; absent with fewer than three.",
        "norm", metric="worker_times_usual_norm"),
    Field("beat_age_s", "Heard", "Time since the worker was last heard.", "duration", title="Heard",
        metric="worker_heartbeat_age_seconds"),
    Field("sync_age_s", "Synced",
        "Time since work of the worker was last counted; absent before the first.", "duration",
        title="Synced", displays=LARGE, metric="worker_sync_age_seconds"),
    Field("staleness", "Staleness",
        "Versions between the base of the worker's last push and the version that it went into.",
        title="Stale", unit="versions", displays=IN_TABLES, metric="worker_staleness_versions"),
    Field("rate_up", "Up/s", "Bytes a second that the worker sends.", "bytes/s", title="Up/s",
        displays=LARGE, say=lambda of: byte_size(of.up)),
    Field("rate_down", "Down/s", "Bytes a second that the worker receives.", "bytes/s",
        title="Down/s", displays=LARGE, say=lambda of: byte_size(of.down)),
    Field("bytes_up", "Sent up",
        "Pseudo-gradients, and the first parameters, received from the worker.", "bytes", title="Up",
        displays=(TOP, REPORT), metric="worker_uploaded_bytes_total"),
    Field("bytes_down", "Sent down", "Parameters sent to the worker.", "bytes", title="Down",
        displays=(TOP, REPORT), metric="worker_downloaded_bytes_total"),
    Field("pushes", "Pushes", "Pushes of the worker.", "count", title="Pushes", unit="pushes",
        displays=(TOP,), metric="worker_pushes_total"),
    Field("rejected", "Rejected", "Work of the worker that the broker rejected.", "count",
        title="Rej", unit="pushes", displays=(TOP,), metric="worker_refused_pushes_total",
        say=lambda of: Part(f"{of.worker.rejected}", UNEASY * bool(of.worker.rejected))),
    Field("tokens", "Tokens", "Tokens that the worker reported.", "amount", title="Tokens",
        unit="tokens", displays=(TOP,), metric="worker_tokens_total"),
    Field("processes", "Processes", "Processes that are this worker together.",
        metric="worker_processes"),
    Field("connections", "Connections",
        "Connections for chunks that the worker has; one for each of its processes.",
        metric="worker_connections"),
    Field("same_as", "Same updates as",
        "1 if the worker last sent the same update as another worker, else 0.", "text",
        metric="worker_updates_identical", measure=lambda of: of.same_as is not None),
)
# fmt: on

SETTINGS = {field.path: field for field in OF_SNAPSHOT if field.is_setting}


def columns(display: str) -> list[Field]:
    """The columns of a display's table of workers, in their order."""
    return [each for each in OF_WORKER if each.title and display in each.displays]
