"""A snapshot of the feed as the text of `diloco-broker status`: what the run was told, how it fares.

Keys that an older broker does not send are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from diloco_protocol.feed import (
    DEAD,
    INSECURE,
    KEYS,
    LOOPBACK,
    read_snapshot,
    share_of_processes,
)
from diloco_protocol.monitor.verdict import Verdict, verdict_on

Data = Mapping[str, Any]
NAMES = 8  # of workers in one part of a row
REASONS = 4  # of a degraded run; the table has the rest
LEAST_WORKERS = 3  # lines of the table, however small the window
LONGEST_ID, LONGEST_HOST = 24, 16  # columns
TITLES = ("worker", "host", "health", "doing", "step", "inner", "steps/s", "loss", "stale", "heard")
_SECURITY = {
    KEYS: "keys: whoever has none is not let in",
    LOOPBACK: "loopback: no other machine reaches it",
    INSECURE: "INSECURE: whoever reaches it may train, steer and read; serve --keys DIR asks for keys",
}
LEFT = 4  # columns of words; the others are figures


def as_text(data: Data, room: int | None = None) -> str:
    """All of it in lines; `room`: how many there may be, at the cost of workers that are well."""
    snapshot = read_snapshot(data)
    verdict = verdict_on(snapshot)
    rows = (
        ("run", _run(data)),
        ("verdict", [verdict.word.upper()]),
        *(("", [reason]) for reason in _reasons(verdict)),
        ("state", [_state(data)]),
        ("security", [_SECURITY.get(data.get("security", ""), "")]),
        ("pushes" if data["mode"] == "async" else "round", _round(data)),
        ("missing", [*_named(snapshot.missing, data), *map(_away, data.get("sites_away", ()))]),
        ("training", _named(snapshot.training, data)),
        ("last", _last(data)),
        ("ends", _ends(data.get("end") or {})),
        ("asked", _asked(data.get("orders", ()))),
        *(("data", _data_set(each)) for each in data.get("data_sets", ())),
        ("workers", _workers(data)),
        ("parent", _parent(data.get("parent"))),
        ("model", _model(data)),
        ("optimizer", _optimizer(data["outer"], data.get("fragments", ()), data["round"] or {})),
        ("reducing", _reducing(data.get("reducer", {}))),
        ("fragments", _fragments(data)),
        ("async", _asynchronous(data.get("asynchronous") or {})),
        ("timeouts", _timeouts(data.get("liveness", {}))),
        ("checkpoint", () if data.get("parent") else _checkpoint(data.get("checkpoint"))),
        ("standby", _standby(data.get("term", 0), data.get("standby"))),
        ("refused", _refused(data["totals"])),
    )
    said = ((label, ", ".join(filter(None, parts))) for label, parts in rows)
    lines = [f"{label:<12}{text}" for label, text in said if text]
    listed = [*data["workers"], *data.get("dead", ())]
    if not listed:
        return "\n".join(lines)
    left = None if room is None else max(LEAST_WORKERS, room - len(lines) - 2)
    return "\n".join([*lines, "", *_table(list(_tree(listed)), left)])


def _run(data: Data) -> Iterable[str]:
    return (data["run"] or "not begun", data["mode"], f"up {span(data['uptime_s'])}")


def _reasons(verdict: Verdict) -> Iterable[str]:
    """Why a run is degraded. Of one that only waits or has ended `state` says it."""
    if verdict.word != "degraded":
        return ()
    more = len(verdict.reasons) - REASONS
    return (*verdict.reasons[:REASONS], f"and {more} more" if more > 0 else "")


def _state(data: Data) -> str:
    state = str(data["state"])
    if state == "waiting" and data.get("ended"):
        return "ended: all workers have left; others may still join"
    if state == "paused" and data.get("paused_for_s") is not None:
        return f"paused for {span(data['paused_for_s'])}"
    return f"waiting {data['waiting_for']}" if state == "waiting" else state


def _ends(end: Data) -> Iterable[str]:
    """What the run was given, and how much of it is used up."""
    if end.get("max_rounds") is not None:
        yield f"{end['rounds']} of {end['max_rounds']} rounds"
    if end.get("token_budget") is not None:
        yield f"{end['tokens']} of {end['token_budget']} tokens"
    if end.get("max_time_s") is not None:
        yield f"{span(end['seconds'])} of {span(end['max_time_s'])}"
    if end.get("is_over"):
        yield "the run is over"


def _asked(orders: Iterable[Data]) -> Iterable[str]:
    """What an operator has asked all workers to do, and who has not answered."""
    for order in orders:
        waiting = sorted(order["waiting"])
        more = " ..." if len(waiting) > NAMES else ""
        yield f"{order['action'].replace('_', '-')}: no answer from {' '.join(waiting[:NAMES])}{more}"
        yield f"{order['saved']} saved" if order["saved"] else ""
        yield f"{order['left']} left" if order["left"] else ""


def _data_set(of: Data) -> Iterable[str]:
    """How far the work queue is with it."""
    whole = of["size"] * of["epochs"]
    if whole and of["counted"] >= whole:
        yield f"{of['name']}: all {whole} units counted"
        return
    yield f"{of['name']}: epoch {of['epoch'] + 1}" + (f" of {of['epochs']}" if whole else "")
    yield f"{of['counted']} " + (f"of {whole} " if whole else "") + "units counted"
    yield f"{of['held']} handed out" if of["held"] else ""
    yield f"{max(0, whole - of['counted'] - of['held'])} left" if whole else ""


def _round(data: Data) -> Iterable[str]:
    """The open round; of an asynchronous run what is under way."""
    if data["mode"] == "async":
        reducer = data.get("reducer", {})
        return (
            f"{sum(part['gradients'] for part in data['fragments'])} applied",
            f"{reducer.get('submissions', 0)} under way",
            f"{reducer.get('waiting', 0)} waiting for a slot",
        )
    now = data["round"]
    return (
        f"{now['number']} {now['phase']} for {span(now['age_s'])}: "
        f"{len(now['arrived'])} of {len(now['expected'])} here",
        f"needs {now['floor']}" if now.get("floor") else "",
    )


def _named(ids: Sequence[str], data: Data) -> Iterable[str]:
    """Those that the open round waits for, a relay with how many are behind it."""
    if data["mode"] == "async":
        return
    behind = {w["id"]: w["workers"] for w in data["workers"] if w.get("workers") is not None}
    yield from (f"{n} ({behind[n]})" if n in behind else n for n in ids[:NAMES])
    yield f"and {len(ids) - NAMES} more" if len(ids) > NAMES else ""


def _last(data: Data) -> Iterable[str]:
    last = data["last_round"]
    if last is None:
        return ()
    staleness = last.get("staleness", 0)
    age = f"{staleness} version{'s'[: staleness != 1]} old"
    head = (
        (f"push {last['number'] + 1}", age)
        if data["mode"] == "async"
        else (
            f"round {last['number']} in {span(last['seconds'])}",
            f"{last['averaged']} averaged",
            age if staleness else "",
        )
    )
    return (
        *head,
        "" if last["loss"] is None else f"loss {last['loss']:.4f}",
        "" if last.get("delta_norm") is None else f"delta norm {last['delta_norm']:.3g}",
    )


def _workers(data: Data) -> Iterable[str]:
    counts = data["counts"]
    return (
        f"{counts['alive']} alive",
        f"{counts['participating']} participating",
        f"{counts['averaged']} averaged",
        f"{data['workers_wanted']} wanted" if data.get("workers_wanted") else "",
        f"no round below {data['min_workers']}" if (data.get("min_workers") or 1) > 1 else "",
        f"{data['totals'].get('deaths', 0)} died",
        f"{left} behind relays not listed"
        if (left := sum(map(_not_listed, data["workers"])))
        else "",
    )


def _not_listed(relay: Data) -> int:
    """Workers behind a relay that it has not told of, since there are so many."""
    told: int = sum(
        each.get("workers") is None and each["health"] != DEAD for each in relay.get("behind", ())
    )
    return max(0, (relay.get("workers") or 0) - told)


def _away(site: Data) -> str:
    return f"site {site['name']} ({site['workers']}) for {span(site['away_s'])}"


def _parent(parent: Data | None) -> Iterable[str]:
    """Of a relay: whose run its workers take part in, and how it stands with that."""
    if parent is None:
        return ()
    lost, sent = parent.get("lost_s"), parent.get("offered_s")
    since = "" if sent is None else f"since {span(sent)}"
    return (
        f"{parent['address']} as {parent['name']}",
        "there" if lost is None else f"NOT THERE for {span(lost)}",
        since
        and (f"the site's push is there {since}" if lost is None else f"a push waits {since}"),
    )


def _model(data: Data) -> Iterable[str]:
    model, every = data["model"], data.get("sync_every")
    return (
        f"{model['parameters']:,} parameters" if model else "",
        f"pushed every {every} steps" if every else "",
        f"{data['wire_dtype']} up" if data.get("wire_dtype") else "",
        f"{data['reply_dtype']} down" if data.get("reply_dtype") else "",
    )


def _optimizer(outer: Data, fragments: Sequence[Data], now: Data) -> Iterable[str]:
    """The outer optimizer, what its settings are now, and how full its buffer is, by fragment."""
    fill = " ".join(str(part.get("buffered", 0)) for part in fragments)
    turn: Data = next((e for e in fragments if e["fragment"] == now.get("fragment")), {})
    return (
        " ".join(filter(None, (outer["optimizer"], outer.get("variant")))),
        _scheduled("lr", turn.get("lr"), outer["lr"], outer.get("lr_schedule")),
        _scheduled(
            "momentum", turn.get("momentum"), outer["momentum"], outer.get("momentum_warmup")
        ),
        "" if outer.get("nesterov") is not False else "no Nesterov",
        f"c {outer['c']:g}" if outer.get("c") else "",
        f"buffer {fill or 0} of {outer['buffer']}" if (outer.get("buffer") or 0) > 1 else "",
    )


def _scheduled(what: str, now: float | None, given: float | None, schedule: str | None) -> str:
    """A setting of the outer optimizer, and where it is on its way."""
    if given is None or now is None or now == given:
        return "" if given is None else f"{what} {given:g}"
    return f"{what} {now:.3g} of {given:g} ({schedule})"


def _reducing(reducer: Data) -> Iterable[str]:
    """What is no plain mean of everybody's work."""
    has_quorum = reducer.get("quorum") is not None
    return (
        f"quorum {reducer['quorum']} and {reducer['grace_s']:g} s" if has_quorum else "",
        f"late work: {reducer['late']}" if has_quorum else "",
        reducer["aggregate"] if reducer.get("aggregate", "mean") != "mean" else "",
        f"norm to {reducer['max_delta_norm']:g}" if reducer.get("max_delta_norm") else "",
        "norm to 5 times the median" if reducer.get("max_delta_norm_auto") else "",
        f"without {reducer['trim']:.0%} at each end" if reducer.get("trim") is not None else "",
        "deterministic" if reducer.get("deterministic") else "",
        "with relays" if reducer.get("relays") else "",
        f"weights by {reducer['weight_by']}"
        if reducer.get("weight_by", "equal") != "equal"
        else "",
    )


def _fragments(data: Data) -> Iterable[str]:
    """How the model is split, and when and how a worker merges a reply."""
    count, is_auto = data.get("num_fragments", 1), data.get("fragment_delay_auto", False)
    delay = data.get("fragment_sync_delay", 0)
    if count == 1 and not is_auto and not delay:
        return ()
    longest = data.get("fragment_max_delay")
    delays = [w["merge_delay"] for w in data["workers"] if w.get("merge_delay") is not None]
    is_alpha = data.get("fragment_merge", "alpha") == "alpha"
    return (
        f"{count} {data.get('fragment_pattern') or ''}".strip() if count > 1 else "one",
        f"merged {_after([delay])}" if not is_auto else "merged when the reply arrives",
        f"last {_after(delays)}" if is_auto and delays else "",
        f"at most {longest}" if longest is not None and (is_auto or longest != delay) else "",
        f"alpha {data.get('fragment_update_alpha', 0.0):g}" if is_alpha else data["fragment_merge"],
    )


def _asynchronous(told: Data) -> Iterable[str]:
    if not told:
        return ()
    most = told["max_staleness"]
    return (
        f"DyLU from {told['dylu_min_steps']} steps" if told["dylu"] else "no DyLU",
        "any staleness" if most is None else f"staleness up to {most}",
        f"weight {told['staleness_weight']}"
        if told["staleness_weight"] != "none"
        else "not weighed",
        f"{told['slots']} slots of {told['deadline_s']:g} s",
    )


def _standby(term: int, told: Data | None) -> Iterable[str]:
    """How a hub stands with its standby, and whether a standby has become the hub."""
    yield f"term {term}" if term else ""
    if told is None:
        return
    if told["is_replaced"]:
        yield "replaced: the standby has the run"
        return
    if told["is_alone"]:
        yield "given up: this hub goes on alone"
    else:
        yield f"lease of {told['lease_s']:g} s {'held' if told['holds_lease'] else 'lost'}"
        age = told["heard_age_s"]
        yield "not heard yet" if age is None else f"heard {span(age)} ago"


def _timeouts(liveness: Data) -> Iterable[str]:
    """When a worker counts as dead, stalled, gone; a limit of 0 is none."""
    said = {
        "heartbeat_timeout_s": ("silent {:g} s: dead", "silent for ever: not dead"),
        "stall_timeout_s": ("no step {:g} s: stalled", "no step: not stalled"),
        "disconnect_grace_s": ("{:g} s to reconnect", "no time to reconnect"),
    }
    for key, (limit, none) in said.items():
        if (value := liveness.get(key)) is not None:
            yield limit.format(value) if value else none


def _checkpoint(saved: Data | None) -> Iterable[str]:
    if saved is None:
        return ("none: the broker saves nothing",)
    if saved["error"] is not None:
        return (f"NOT WRITTEN: {saved['error']}",)
    return (
        f"none yet, in {saved['folder']}"
        if saved["age_s"] is None
        else f"before round {saved['round']}, {span(saved['age_s'])} ago, in {saved['folder']}",
        "durable" if saved.get("durable") else "",
    )


def _refused(totals: Data) -> Iterable[str]:
    reasons = totals.get("refused", {})
    counted = " ".join(
        f"{count} {code}" for code, count in sorted(reasons.items(), key=lambda r: -r[1])
    )
    rejected, malformed = totals["rejected"], totals["malformed"]
    return (
        f"{rejected}: {counted}" if counted else str(rejected or ""),
        f"{malformed} malformed" if malformed else "",
    )


def _tree(workers: Iterable[Data]) -> Iterator[Data]:
    """Each by id, and below a relay those behind it, as it has told."""
    for each in sorted(workers, key=lambda worker: str(worker["id"])):
        yield each
        for told in each.get("behind", ()):
            is_unknown = each["health"] == "lost" and told["health"] != DEAD
            level, health = 1 + told["level"], "unknown" if is_unknown else told["health"]
            yield {**told, "id": told["worker_id"], "level": level, "health": health}


def _table(workers: Sequence[Data], most: int | None) -> list[str]:
    """A line for each worker; those that are not well stay where there is no room for all."""
    shown = list(workers)
    if most is not None and len(shown) > most:
        first = sorted(shown, key=_is_well)[: most - 1]
        shown = [each for each in shown if each in first]
    rows = [TITLES, *map(_cells, shown)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if place < LEFT else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    if left := len(workers) - len(shown):
        lines.append(f"and {left} more; diloco-top and --json show all")
    return lines


def _is_well(worker: Data) -> bool:
    return bool(worker["health"] == "ok")


def _title(worker: Data) -> str:
    """Of a relay with how many are behind it; further in below one."""
    processes, connections = worker.get("processes", 1), worker.get("connections", 1)
    behind = "" if worker.get("workers") is None else f" ({worker['workers']})"
    inset = "  " * worker.get("level", 0)
    return f"{inset}{worker['id']}{share_of_processes(processes, connections)}{behind}"


def _cells(worker: Data) -> tuple[str, ...]:
    is_lost, pace = worker["health"] in ("lost", DEAD), worker.get("steps_per_s")
    loss = worker.get("loss")
    return (
        _clipped(_title(worker), LONGEST_ID),
        _clipped(worker.get("host", ""), LONGEST_HOST),
        worker["health"],
        "-" if is_lost else worker["state"],
        str(worker["step"]),
        "-" if is_lost else f"{worker.get('inner_step', 0)}/{worker.get('sync_every', 0)}",
        "-" if is_lost or pace is None else f"{pace:.3g}",
        "-" if loss is None else f"{loss:.3f}" if abs(loss) < 1e4 else f"{loss:.1e}",
        str(worker.get("staleness", 0)),
        span(worker["beat_age_s"]),
    )


def _clipped(text: str, columns: int) -> str:
    """Cut in the middle: names differ at either end."""
    if len(text) <= columns:
        return text
    head = columns // 2 - 1
    return f"{text[:head]}..{text[head + 2 - columns :]}"


def _after(delays: Sequence[int]) -> str:
    return f"{_range(delays)} step{'s'[: max(delays) != 1]} after the push"


def _range(values: Sequence[int]) -> str:
    least, most = min(values), max(values)
    return f"{least}" if least == most else f"{least} to {most}"


def span(seconds: float) -> str:
    """A time in the unit that people would use."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s"
