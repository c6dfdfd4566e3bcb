"""What there is to say about a run, as labelled rows of short parts. Pure; no widths in here.

Each function answers one question with parts that a display puts in a row. An empty part is left out.
"""

from collections.abc import Sequence

from rich.text import Text

from diloco_protocol.feed import Fragment, Rejection, Snapshot
from diloco_protocol.monitor import tree
from diloco_tools.top.drawing.notation import (
    BAD,
    OK,
    UNEASY,
    Glyphs,
    byte_size,
    duration,
    number,
    scaled,
)
from diloco_tools.top.drawing.sheet import Part

Parts = Sequence[Part]
NAMES = 4  # of workers in one part of a row


def run_name(snapshot: Snapshot) -> str:
    """The first eight signs of the run's id: what displays show, and what shutdown wants typed."""
    return (snapshot.run or "")[:8]


def run_title(snapshot: Snapshot) -> str:
    name = run_name(snapshot)
    return f"run {name}" if name else "no run yet"


def has_round(snapshot: Snapshot) -> bool:
    """Before the first round the feed has a round 0 in which nobody is expected."""
    now_open = snapshot.round
    return snapshot.mode != "async" and bool(now_open and (now_open.number or now_open.expected))


def now(snapshot: Snapshot, glyphs: Glyphs) -> tuple[str, Parts]:
    """Label and parts of what goes on: the open round and whom it waits for, or pushes."""
    if snapshot.mode == "async":
        count = sum(part.gradients for part in snapshot.fragments)
        reducer = snapshot.reducer
        return "applied", (
            f"{count} push{'es' if count != 1 else ''}",
            f"{reducer.submissions} under way" if reducer.submissions else "",
            f"{reducer.waiting} waiting for a slot" if reducer.waiting else "",
        )
    now_open = snapshot.round
    if now_open is None or not has_round(snapshot):
        return "round", ()
    arrived, expected = len(now_open.arrived), len(now_open.expected)
    return "round", (
        f"{now_open.number} {now_open.phase} {duration(now_open.age_s)}",
        f"fragment {now_open.fragment}" if len(snapshot.fragments) > 1 else "",
        Text(f"{arrived}/{expected} arrived {glyphs.bar(arrived, expected)}"),
        _named("missing", snapshot.missing, snapshot),
        _named("training:", snapshot.training, snapshot),
    )


def _named(what: str, ids: Sequence[str], snapshot: Snapshot) -> str:
    """Some workers by name, a relay with how many are behind it; nothing where there are none."""
    titles = {worker.id: worker.title for worker in snapshot.workers if worker.workers is not None}
    shown = ", ".join(titles.get(name, name) for name in ids[:NAMES])
    more = f" and {len(ids) - NAMES} more" if len(ids) > NAMES else ""
    return f"{what} {shown}{more}" if ids else ""


def state(snapshot: Snapshot, glyphs: Glyphs) -> Text:
    """Training, or in colour what it does instead."""
    if snapshot.state == "paused" and snapshot.paused_for_s is not None:
        return Text(f"paused for {duration(snapshot.paused_for_s)}", UNEASY)
    if snapshot.ended and snapshot.state == "waiting":
        return Text("ended")
    return Text(glyphs.printable(snapshot.state), "" if snapshot.state == "training" else UNEASY)


def nobody(snapshot: Snapshot) -> str:
    """What stands where the workers would."""
    return "all workers have left" if snapshot.ended else "no workers yet"


def counts(snapshot: Snapshot) -> Parts:
    """Workers alive, participating in this round, averaged in the last one: never one number."""
    here, wanted = snapshot.counts, snapshot.workers_wanted
    return (
        f"{here.alive} alive",
        f"{here.participating} participating",
        f"{here.averaged} averaged",
        f"{wanted} wanted" if wanted is not None else "",
        count(snapshot.totals.deaths, "died", BAD),
        not_listed(snapshot),
    )


def not_listed(snapshot: Snapshot) -> str:
    """Workers that stand in no row, since there are so many behind a relay."""
    left = sum(map(tree.not_listed, snapshot.workers))
    return f"{left} behind relays not listed" if left else ""


def sites_away(snapshot: Snapshot, glyphs: Glyphs) -> Parts:
    """Relays that were given up and have not come back, with how many workers."""
    return [
        Text(
            f"site {glyphs.printable(each.name)} ({each.workers}) for {duration(each.away_s)}", BAD
        )
        for each in snapshot.sites_away
    ]


def parent(snapshot: Snapshot, glyphs: Glyphs) -> Parts:
    """Of a relay: whose run its workers take part in, and how it stands with that."""
    told = snapshot.parent
    if told is None:
        return ()
    lost = told.lost_s is not None
    sent = told.offered_s
    return (
        glyphs.printable(told.address),
        glyphs.printable(f"as {told.name}"),
        Text(f"not there for {duration(told.lost_s or 0.0)}", BAD) if lost else Text("there", OK),
        f"the site's push is there for {duration(sent)}" if sent is not None and not lost else "",
        f"a push waits since {duration(sent)}" if sent is not None and lost else "",
    )


def last(snapshot: Snapshot) -> Parts:
    """The round, or the push, that was counted last."""
    closed = snapshot.last_round
    if closed is None:
        return ()
    what: tuple[str, ...] = (
        f"push {closed.number + 1}",
        f"{plural(closed.staleness, 'version')} old",
    )
    if snapshot.mode != "async":
        took = f"took {closed.seconds:.1f} s"
        what = (f"round {closed.number}", took, f"{closed.averaged} averaged")
    return (
        *what,
        f"loss {number(closed.loss)}" if closed.loss is not None else "",
        f"delta norm {closed.delta_norm:.3g}" if closed.delta_norm is not None else "",
    )


def end(snapshot: Snapshot) -> Parts:
    """The end that the run was given, and how far it is."""
    given = snapshot.end
    if given is None:
        return ()
    limit_s = given.max_time_s
    return (
        f"{given.rounds} of {given.max_rounds} rounds" if given.max_rounds is not None else "",
        f"{scaled(given.tokens)} of {scaled(given.token_budget)} tokens"
        if given.token_budget is not None
        else "",
        f"{duration(given.seconds)} of {duration(limit_s)}" if limit_s is not None else "",
        Text("the run is over", UNEASY) if given.is_over else "",
    )


def asked(snapshot: Snapshot) -> Parts:
    """What an operator has asked all workers to do, who has not answered, how many have."""
    parts: list[Part] = []
    for order in snapshot.orders:
        names = sorted(order.waiting)
        more = f" and {len(names) - NAMES} more" if len(names) > NAMES else ""
        what = order.action.replace("_", "-")
        parts.append(Text(f"{what}: no answer from {', '.join(names[:NAMES])}{more}", UNEASY))
        parts += (
            f"{order.saved} saved" if order.saved else "",
            f"{order.left} left" if order.left else "",
        )
    return parts


def data(snapshot: Snapshot, glyphs: Glyphs) -> Parts:
    """How far the work queue is with each data set."""
    parts: list[str] = []
    for each in snapshot.data_sets:
        whole, name = each.size * each.epochs, glyphs.printable(each.name)
        if whole and each.counted >= whole:
            parts.append(f"{name}: all {scaled(whole)} units counted")
            continue
        left = max(0, whole - each.counted - each.held)
        parts += (
            f"{name}: epoch {each.epoch + 1}" + (f" of {each.epochs}" if whole else ""),
            scaled(each.counted) + (f" of {scaled(whole)}" if whole else "") + " units counted",
            f"{scaled(each.held)} handed out" if each.held else "",
            f"{scaled(left)} left" if whole else "",
        )
    return parts


def optimizer(snapshot: Snapshot) -> Parts:
    """The outer optimizer and what may be changed about it."""
    outer, turn = snapshot.outer, snapshot.round and snapshot.round.fragment
    now = next((part for part in snapshot.fragments if part.fragment == turn), None)
    return (
        f"{outer.optimizer} {outer.variant or ''}".strip(),
        _scheduled("lr", now.lr if now else None, outer.lr),
        _scheduled("momentum", now.momentum if now else None, outer.momentum),
    )


def _scheduled(what: str, now: float | None, given: float | None) -> str:
    """A setting of the outer optimizer; where a schedule has it elsewhere now, that first."""
    if given is None or now is None or now == given:
        return "" if given is None else f"{what} {given:g}"
    return f"{what} {now:.3g} of {given:g}"


def exchange(snapshot: Snapshot) -> Parts:
    """How often is exchanged, and in which dtypes."""
    return (
        f"every {snapshot.sync_every} steps" if snapshot.sync_every else "",
        f"{snapshot.wire_dtype} up, {snapshot.reply_dtype} down" if snapshot.wire_dtype else "",
    )


def _has_buffer(snapshot: Snapshot) -> bool:
    """Whether gradients are buffered between momentum steps; a buffer of one is none."""
    return (snapshot.outer.buffer or 0) > 1


def buffers(snapshot: Snapshot) -> str:
    """How full the buffer of the outer optimizer is, fragment by fragment."""
    size = snapshot.outer.buffer
    fill = " ".join(f"{part.buffered}/{size}" for part in snapshot.fragments)
    return f"buffer {fill}" if _has_buffer(snapshot) else ""


def reducing(snapshot: Snapshot) -> Parts:
    """What differs from a plain mean of everyone's contribution."""
    told = snapshot.reducer
    quorum = f"quorum {told.quorum}, {told.grace_s:g} s grace, late work: {told.late}"
    return (
        quorum if told.quorum is not None else "",
        told.aggregate if told.aggregate != "mean" else "",
        f"norm to {told.max_delta_norm:g}" if told.max_delta_norm is not None else "",
        "norm to 5 times the median" if told.max_delta_norm_auto else "",
        f"without {told.trim:.0%} at each end" if told.trim is not None else "",
        "deterministic" if told.deterministic else "",
        "with relays" if told.relays else "",
        f"weights by {told.weight_by}" if told.weight_by != "equal" else "",
    )


def merging(snapshot: Snapshot) -> Parts:
    """How workers take in the fragments; nothing where the model is one fragment."""
    if len(snapshot.fragments) < 2:
        return ()
    longest = snapshot.fragment_max_delay
    varies = snapshot.fragment_delay_auto or longest != snapshot.fragment_sync_delay
    is_alpha = snapshot.fragment_merge == "alpha"
    return (
        snapshot.fragment_pattern or "",
        _delay(snapshot),
        f"at most {longest}" if longest is not None and varies else "",
        f"alpha {snapshot.fragment_update_alpha:g}" if is_alpha else snapshot.fragment_merge,
    )


def _delay(snapshot: Snapshot) -> str:
    """How many steps after its slot a fragment is merged; where it varies, what workers had last."""
    if not snapshot.fragment_delay_auto:
        return f"merged after {snapshot.fragment_sync_delay} steps"
    delays = [each.merge_delay for each in snapshot.workers if each.merge_delay is not None]
    if not delays:
        return "merged when here"
    least, most = min(delays), max(delays)
    since = "" if least == most else f"{least} to "
    return f"merged when here, after {since}{plural(most, 'step')}"


def asynchronous(snapshot: Snapshot) -> Parts:
    """What an asynchronous run was told about slow workers and stale work."""
    told = snapshot.asynchronous
    if told is None:
        return ()
    least = "" if told.dylu_min_steps is None else f" from {told.dylu_min_steps} steps"
    limit = "any staleness" if told.max_staleness is None else f"staleness to {told.max_staleness}"
    return (
        f"DyLU{least}" if told.dylu else "no DyLU",
        limit if told.staleness_weight == "none" else f"{limit}, weight {told.staleness_weight}",
        f"{told.slots} slots" if told.slots is not None else "",
    )


def liveness(snapshot: Snapshot) -> Parts:
    """When a worker counts as dead, stalled, gone; a limit of 0 is none."""
    limits = snapshot.liveness
    told = (
        (limits.heartbeat_timeout_s, "silent {:g}s: dead", "silent for ever: not dead"),
        (limits.stall_timeout_s, "no step {:g}s: stalled", "no step: not stalled"),
        (limits.disconnect_grace_s, "{:g}s to reconnect", "no time to reconnect"),
    )
    return [
        limit.format(seconds) if seconds else none
        for seconds, limit, none in told
        if seconds is not None
    ]


def fragment(part: Fragment, snapshot: Snapshot, *, wordy: bool) -> Text:
    """Version and buffer of one fragment; bold for the one that the open round concerns."""
    several = len(snapshot.fragments) > 1
    words = [f"{part.fragment}:v{part.version}" if several else f"v{part.version}"]
    if _has_buffer(snapshot):
        fill = f"{part.buffered}/{snapshot.outer.buffer}"
        words.append(fill if several and not wordy else f"buffer {fill}")
    if wordy and part.contributions:
        words.append(f"{part.contributions} in")
    now_open = has_round(snapshot) and snapshot.round and snapshot.round.fragment == part.fragment
    return Text(" ".join(words), "bold" if several and now_open else "")


def model(snapshot: Snapshot) -> Parts:
    size = snapshot.model
    if size is None:
        return ()
    versions = " ".join(str(part.version) for part in snapshot.fragments)
    many = "s" if len(snapshot.fragments) > 1 else ""
    return (
        f"{scaled(size.parameters)} parameters",
        f"{size.tensors} tensors",
        byte_size(size.bytes),
        f"version{many} {versions}" if versions else "",
    )


def traffic(snapshot: Snapshot) -> Parts:
    """Bytes and pushes so far."""
    totals = snapshot.totals
    return (
        f"{byte_size(totals.bytes_up)} up",
        f"{byte_size(totals.bytes_down)} down",
        f"{totals.pushes} pushes",
        count(totals.rejected, "rejected", UNEASY),
        count(totals.malformed, "malformed", UNEASY),
    )


def loop(snapshot: Snapshot, cpu: float | None = None) -> Parts:
    """What the broker itself takes. `cpu` is its use of one core over the last moments, 0 to 1."""
    taken = snapshot.loop
    used = f"{100 * cpu:.0f}%" if cpu is not None else ""
    spent = duration(taken.cpu_s) if taken.cpu_s is not None else ""
    return (
        f"turn {taken.longest_turn_ms:.1f} ms" if taken.longest_turn_ms is not None else "",
        f"cpu {used or spent}" if used or spent else "",
        f"rss {byte_size(taken.rss_bytes)}" if taken.rss_bytes is not None else "",
    )


def checkpoint(snapshot: Snapshot, glyphs: Glyphs) -> Parts:
    """The newest checkpoint and its age, or why there is none."""
    saved = snapshot.checkpoint
    if saved is None:
        # A broker that says nothing of its checkpoints is an older one, not one without a folder.
        nothing = "checkpoint" in snapshot.raw and snapshot.parent is None
        return (Text("no save folder: nothing is kept", UNEASY),) if nothing else ()
    parts: list[Part] = []
    if saved.error:
        parts.append(Text(f"NOT SAVED: {glyphs.printable(saved.error)}", BAD))
    if saved.round is not None and saved.age_s is not None:
        style = "" if saved.error else OK
        parts.append(Text(f"saved round {saved.round} {duration(saved.age_s)} ago", style))
    elif not saved.error:
        parts.append("not saved yet")
    return parts


def reasons(snapshot: Snapshot) -> str:
    """Refused pushes and messages by reason, the most frequent first."""
    # The feed's parser leaves what is inside a mapping as it came.
    counted = ((code, n) for code, n in snapshot.totals.refused.items() if isinstance(n, int))
    refused = sorted(counted, key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{number} {code.replace('_', ' ')}" for code, number in refused)


def newest_rejections(snapshot: Snapshot, most: int) -> list[Rejection]:
    return sorted(snapshot.rejections, key=lambda refused: refused.age_s)[:most]


def rejection(refused: Rejection, glyphs: Glyphs) -> str:
    """Whose push it was and why it was refused; the sentence says it better than its code."""
    return glyphs.printable(f"{refused.worker}: {refused.text or refused.code}")


def plural(value: int, what: str) -> str:
    """A count of things: 1 restart, 2 restarts."""
    return f"{value} {what}{'s'[: value != 1]}"


def count(value: int, what: str, style: str) -> Text:
    """A number that should be 0: in colour where it is not."""
    return Text(f"{value} {what}", style if value else "")
