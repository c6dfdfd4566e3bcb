"""What operators ask for: each request is answered by a `result` with a sentence that states the effect.

What changes the run is written into the log of control actions, with who asked for it.
"""

from __future__ import annotations

from diloco_broker.core import effects
from diloco_broker.core.rules import admission, checkpoints, rounds, settings
from diloco_broker.core.state.members import printable
from diloco_broker.core.state.run import RunState
from diloco_broker.core.state.update import Phase
from diloco_protocol import messages
from diloco_protocol.errors import UsageError
from diloco_protocol.records import to_plain

# `status` is answered by the loop, which has figures of its own.
ACTIONS = ("status", "manifest", "save", "kick", "set", "pause", "resume", "shutdown")
WHO = "who"  # the argument in which operators name themselves


def control(state: RunState, route: effects.Route, control: messages.Control) -> effects.Effects:
    """Carry out a request, or say why not."""
    match control.action:
        case "manifest":
            yield _manifest(state, route, control)
        case "save":
            yield from _save(state, route, control)
        case "kick":
            yield from _kick(state, route, control)
        case "set":
            yield from _set(state, route, control)
        case "pause":
            yield from _pause(state, route, control)
        case "resume":
            yield from _resume(state, route, control)
        case "shutdown":
            yield from _shutdown(state, route, control)
        case _:
            known = f"{', '.join(ACTIONS[:-1])} and {ACTIONS[-1]}"
            yield _no(
                route,
                control,
                f"This broker knows no control action {control.action!r:.60}; it knows {known}.",
            )


def _who(control: messages.Control) -> str:
    """Who asks, as they call themselves."""
    who = control.arguments.get(WHO)
    name = who if isinstance(who, str) and who else "an operator"
    return printable(name, 100)


def _yes(route: effects.Route, control: messages.Control, text: str) -> effects.Send:
    return effects.Send(route, messages.Result(control.request, True, text))


def _no(route: effects.Route, control: messages.Control, text: str) -> effects.Send:
    return effects.Send(route, messages.Result(control.request, False, text))


def _manifest(state: RunState, route: effects.Route, control: messages.Control) -> effects.Send:
    manifest = state.model.manifest
    if manifest is None:
        return _no(
            route, control, "The broker has no model yet; the first worker that joins brings it."
        )
    data = {
        "manifest": to_plain(manifest),
        "config": to_plain(state.run_config),
        "plan": list(state.model.plan if state.config.num_fragments > 1 else ()),
        "pattern": state.fragment_pattern,
    }
    text = f"The model has {manifest.trainable_elements} trainable parameters."
    return effects.Send(route, messages.Result(control.request, True, text, data))


def _save(state: RunState, route: effects.Route, control: messages.Control) -> effects.Effects:
    if state.config.save_dir is None:
        yield _no(route, control, "This broker saves nothing; start it with --save-dir DIR.")
    elif state.round is None:
        yield _no(route, control, "There is nothing to save yet: the run has no parameters.")
    else:
        yield from checkpoints.save_soon(state)
        text = (
            f"A checkpoint is being written to {state.config.save_dir}; see the log and the feed."
        )
        yield effects.RecordAction(_who(control), "save", None, None, "a checkpoint is asked for")
        yield _yes(route, control, text)


def _kick(state: RunState, route: effects.Route, control: messages.Control) -> effects.Effects:
    name = control.arguments.get("worker")
    member = state.members.named(name) if isinstance(name, str) else None
    if member is None:
        here = ", ".join(m.worker_id for m in state.members)[:300] or "nobody"
        yield _no(route, control, f"No worker named {name!r:.80} is here; here: {here}.")
        return
    who = _who(control)
    yield effects.Send(
        member.control,
        messages.Notice("kicked", f"{member.worker_id} was removed from the run by an operator."),
    )
    yield effects.RecordAction(
        who, "kick", member.worker_id, None, f"{member.worker_id} removed from the run"
    )
    yield from admission.remove(state, member, "an operator removed it")
    left = len(state.members)
    yield _yes(
        route,
        control,
        f"{member.worker_id} was removed; {left} {'worker is' if left == 1 else 'workers are'} left. "
        "It trains on alone, or stops, and may join again when it is started again.",
    )


def _set(state: RunState, route: effects.Route, control: messages.Control) -> effects.Effects:
    arguments = {name: value for name, value in control.arguments.items() if name != WHO}
    try:
        changes = settings.changes(state, arguments)
    except UsageError as error:
        yield _no(route, control, str(error))
        return
    if not changes:
        yield _yes(route, control, "Nothing changes: it is set to that already.")
        return
    when, remark = settings.first_use(state), settings.remark(state, changes)
    yield from settings.want(state, _who(control), changes)
    if state.round is None or state.round.phase is Phase.OPEN:
        yield from settings.take_effect(state)
        yield from rounds.expect_all(state)  # more workers may be needed than were
        yield from rounds.close_if_due(state)
    said = "; ".join(change.text for change in changes)
    again = settings.after_restart(state, changes)
    text = f"{said[0].upper()}{said[1:]}{when}.{remark}{again}"
    data = {
        "changes": [
            {"name": change.name, "before": change.before, "after": change.after}
            for change in changes
        ]
    }
    yield effects.Send(route, messages.Result(control.request, True, text, data))


def _pause(state: RunState, route: effects.Route, control: messages.Control) -> effects.Effects:
    if state.paused_at is not None:
        yield _yes(route, control, "The run is paused already; go on with: diloco-broker resume")
        return
    state.paused_at = state.now
    yield effects.RecordAction(_who(control), "pause", None, None, "the run is paused")
    closing = state.round is not None and state.round.phase is Phase.CLOSING
    first = (
        f"Round {state.round.number} is being finished; then n" if closing and state.round else "N"
    )
    yield _yes(
        route,
        control,
        f"{first}o round closes: workers train to their next boundary and wait there. Go on with: "
        "diloco-broker resume",
    )


def _resume(state: RunState, route: effects.Route, control: messages.Control) -> effects.Effects:
    if state.paused_at is None:
        yield _yes(route, control, "The run is not paused.")
        return
    paused_s = state.now - state.paused_at
    state.paused_at = None
    yield effects.RecordAction(
        _who(control), "resume", None, None, f"the run goes on after {paused_s:.0f} s"
    )
    yield from rounds.close_if_due(state)
    yield _yes(route, control, f"The run goes on; it was paused for {paused_s:.0f} s.")


def _shutdown(state: RunState, route: effects.Route, control: messages.Control) -> effects.Effects:
    who = _who(control)
    restarting = control.arguments.get("restarting", False)
    if not isinstance(restarting, bool):
        yield _no(route, control, f"restarting is {restarting!r:.40}; it must be true or false.")
        return
    if state.stopping is not None:
        what = "to come back" if state.stopping.restarting else "for good"
        text = f"The broker is stopping already, {what}: {state.stopping.reason}."
        yield effects.Send(
            route, messages.Result(control.request, restarting == state.stopping.restarting, text)
        )
        return
    closing = state.round is not None and state.round.phase is Phase.CLOSING
    finish = f"finishes round {state.round.number}, " if closing and state.round else ""
    saves = f"saves to {state.config.save_dir}, " if state.config.save_dir else "saves nothing, "
    what = "the broker restarts" if restarting else "the run is over, the broker stops"
    yield effects.RecordAction(who, "restart" if restarting else "shutdown", None, None, what)
    then = (
        "Workers train on and come back to the broker that is started next."
        if restarting
        else "The run is over: the workers' scripts are told to end."
    )
    yield _yes(route, control, f"The broker {finish}{saves}tells its workers and stops. {then}")
    yield effects.End(f"{who} asked for it", restarting)
