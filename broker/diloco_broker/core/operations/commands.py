"""Requests of operators: each is answered by a `result` with a sentence that states the effect.

Requests that change the run are written to the log of control actions, with the operator's name.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from diloco_broker.core import effects
from diloco_broker.core.members import admission
from diloco_broker.core.operations import orders, settings
from diloco_broker.core.rounds import sequence
from diloco_broker.core.state import RunState
from diloco_broker.core.versions import checkpoints
from diloco_protocol import messages
from diloco_protocol.chunks import Segment
from diloco_protocol.errors import UsageError
from diloco_protocol.packed import Packed, pack_with
from diloco_protocol.records import to_plain

LONGEST_FILE = 1 << 62  # bytes; no file system has longer files
WHO = "who"  # the argument in which operators name themselves


@dataclass(frozen=True)
class Request:
    """A request of an operator, and its connection. `is_proven`: a key proves the operator's name."""

    route: effects.Route
    control: messages.Control
    is_proven: bool

    @property
    def who(self) -> str:
        who = self.control.arguments.get(WHO)
        return (who if isinstance(who, str) and who else "an operator")[:100]

    def noted(
        self, what: str, text: str, before: Any = None, after: Any = None
    ) -> effects.RecordAction:
        return effects.RecordAction(self.who, what, before, after, text, self.is_proven)

    def yes(self, text: str, **data: Any) -> effects.Send:
        return effects.Send(self.route, messages.Result(self.control.request, True, text, data))

    def no(self, text: str) -> effects.Send:
        return effects.Send(self.route, messages.Result(self.control.request, False, text))


def control(state: RunState, route: effects.Route, control: messages.Control) -> effects.Effects:
    request = Request(route, control, is_proven=state.config.keys is not None)
    if control.action in REQUESTS:
        yield from REQUESTS[control.action](state, request)
        return
    known = f"{', '.join(ACTIONS[:-1])} and {ACTIONS[-1]}"
    yield request.no(f"Unknown control action {control.action!r:.60}; this broker has {known}.")


def _manifest(state: RunState, request: Request) -> effects.Effects:
    layout, description = state.model.layout, state.model.description
    if layout is None or description is None:
        yield request.no("The broker has no model yet; the first worker that joins provides it.")
        return
    elements = sum(each.lengths[Segment.PARAMETERS] for each in layout.fragments)
    others = {
        "config": to_plain(state.run_config),
        "plan": state.model.plan if state.config.num_fragments > 1 else (),
        "pattern": state.fragment_pattern,
    }
    # A request of 50 bytes is answered with megabytes, so the manifest is packed only once.
    data = Packed(pack_with(others, {"manifest": description.packed}))
    text = f"The model has {elements} trainable parameters."
    yield effects.Send(request.route, messages.Result(request.control.request, True, text, data))


def _save(state: RunState, request: Request) -> effects.Effects:
    if state.config.save_dir is None:
        yield request.no(_SAVES_NOTHING)
    elif state.round is None:
        yield request.no("Nothing to save yet: the run has no parameters.")
    else:
        yield from checkpoints.save_soon(state)
        yield request.noted("save", "a checkpoint was requested")
        yield request.yes(
            f"Writing a checkpoint to {state.config.save_dir}; see the log and the feed for the result."
        )


def _checkpoint(state: RunState, request: Request) -> effects.Effects:
    """List the files of the newest checkpoint, with their sizes and checksums."""
    if state.config.save_dir is None:
        yield request.no(_SAVES_NOTHING)
    else:
        yield effects.ReadCheckpoint(request.route, request.control.request)


def _piece(state: RunState, request: Request) -> effects.Effects:
    """Read a part of a file of a checkpoint."""
    given = request.control.arguments
    name, file, offset = (given.get(each) for each in ("checkpoint", "file", "offset"))
    if state.config.save_dir is None:
        yield request.no(_SAVES_NOTHING)
    elif (
        isinstance(name, str)
        and isinstance(file, str)
        and isinstance(offset, int)
        and 0 <= offset < LONGEST_FILE
    ):
        yield effects.ReadCheckpoint(request.route, request.control.request, name, file, offset)
    else:
        yield request.no(
            "The action 'piece' needs checkpoint and file, as returned by the action 'checkpoint', and "
            "offset, in bytes from 0."
        )


def _kick(state: RunState, request: Request) -> effects.Effects:
    name = request.control.arguments.get("worker")
    member = state.members.named(name) if isinstance(name, str) else None
    if isinstance(name, str) and member is None and state.absences.kicked(name):
        yield request.noted("kick", f"{name}, which is dead, is not due any more", name)
        yield request.yes(f"{name} is dead; the run no longer expects it.")
        return
    if member is None:
        here = ", ".join(each.worker_id for each in state.members)[:300] or "none"
        yield request.no(f"No worker is named {name!r:.80}; connected workers: {here}.")
        return
    yield request.noted("kick", f"{member.worker_id} removed from the run", member.worker_id)
    yield from admission.kick(state, member)
    left = len(state.members)
    yield request.yes(
        f"{member.worker_id} was removed; {left} {'worker is' if left == 1 else 'workers are'} left. "
        "It continues alone or stops; to join again, it must be restarted."
    )


def _set(state: RunState, request: Request) -> effects.Effects:
    arguments = {name: value for name, value in request.control.arguments.items() if name != WHO}
    try:
        changes = settings.changes(state, arguments)
    except UsageError as error:
        yield request.no(str(error))
        return
    if not changes:
        yield request.yes("Nothing changes: the settings have these values already.")
        return
    when, remark = settings.first_use(state), settings.remark(state, changes)
    for change in changes:
        text, what = f"{change.text}{when}", f"set {change.name}"
        yield request.noted(what, text, change.before, change.after)
    settings.want(state, changes)
    if not state.closing:
        yield from settings.take_effect(state)
        yield from sequence.expect_all(state)  # the round may need more workers than before
    said = "; ".join(change.text for change in changes)
    again = settings.after_restart(state, changes)
    text = f"{said[0].upper()}{said[1:]}{when}.{remark}{again}"
    yield request.yes(text, changes=[asdict(change) for change in changes])


def _pause(state: RunState, request: Request) -> effects.Effects:
    if state.paused_at is not None:
        yield request.yes("The run is paused already; to continue: diloco-broker resume")
        return
    state.paused_at = state.now
    yield request.noted("pause", "the run is paused")
    closing = state.closing
    first = f"Round {closing.number} finishes; then n" if closing else "N"
    yield request.yes(
        f"{first}o round closes: workers train to their next boundary and wait there. To continue: "
        "diloco-broker resume"
    )


def _resume(state: RunState, request: Request) -> effects.Effects:
    if state.paused_at is None:
        yield request.yes("The run is not paused.")
        return
    paused_s = state.now - state.paused_at
    state.paused_at = None
    yield request.noted("resume", f"the run continues after {paused_s:.0f} s")
    yield request.yes(f"The run continues; it was paused for {paused_s:.0f} s.")


def _shutdown(state: RunState, request: Request) -> effects.Effects:
    restarting = request.control.arguments.get("restarting", False)
    if not isinstance(restarting, bool):
        yield request.no(f"restarting must be true or false, got {restarting!r:.40}.")
        return
    if state.stopping is not None:
        what = "restarting" if state.stopping.restarting else "stopping"
        text = f"The broker is already {what}: {state.stopping.reason}."
        yield request.yes(text) if restarting == state.stopping.restarting else request.no(text)
        return
    finish = f"finishes round {state.closing.number}, " if state.closing else ""
    saves = f"saves to {state.config.save_dir}, " if state.config.save_dir else "saves nothing, "
    what = "the broker restarts" if restarting else "the broker ends the run and stops"
    noted = request.noted("restart" if restarting else "shutdown", what)
    yield noted
    then = "The run is over: the workers' scripts stop training."
    if restarting:
        then = "Workers continue to train and rejoin when a broker is back."
    yield request.yes(f"The broker {finish}{saves}notifies its workers and stops. {then}")
    yield effects.End(f"{noted.by} asked for it", restarting)


def _promote(state: RunState, request: Request) -> effects.Effects:
    """Let a hub continue without a lease because its standby will not come back."""
    lease, force = state.standby, request.control.arguments.get("force", False)
    if not isinstance(force, bool):
        yield request.no(f"force must be true or false, got {force!r:.40}.")
    elif lease is None:
        text = f"This broker already has the run, in term {state.term}, and has no standby."
        yield request.yes(text, is_over=True)
    elif lease.superseded_by is not None:
        yield request.no("This hub was replaced by its standby, which has the run now.")
    elif lease.hears_standby and not force:
        yield request.no(
            f"The standby of this hub ({lease.standby}) is alive. To hand the run over to it, promote "
            "the standby's address. To remove the standby, stop it and try again in "
            f"{lease.seconds:g} s; with --force this hub continues alone at once."
        )
    else:
        lease.goes_on_alone()
        text = "this hub continues without a lease until a standby connects"
        yield request.noted("promote", text)
        yield request.yes(
            "This hub continues alone, without a lease, until a standby connects. If its standby has "
            "taken over, stop this hub: only one may have the run."
        )


def _order(state: RunState, request: Request) -> effects.Effects:
    """Send a command to all workers; with its number, only report which workers have answered."""
    action = request.control.action
    if request.control.arguments.get("order") is None:
        yield request.noted(action, f"each worker is asked to {orders.WHAT[action]}")
        yield from orders.give(state, action)
    elif action not in state.orders:
        name = action.replace("_", "-")
        text = f"This broker received no {name} since it started; send it again."
        yield request.no(text)
        return
    found = orders.standing(state, action)
    text = "; ".join(f"{what}: {', '.join(found[what])}" for what in _REPLIES if found.get(what))
    yield request.yes(text or "No worker is connected.", **found)


_SAVES_NOTHING = "This broker writes no checkpoints; start it with --save-dir DIR."
_REPLIES = ("saved", "left", "waiting")
REQUESTS = {
    "promote": _promote,
    "manifest": _manifest,
    "save": _save,
    "checkpoint": _checkpoint,
    "piece": _piece,
    "kick": _kick,
    "set": _set,
    "pause": _pause,
    "resume": _resume,
    "shutdown": _shutdown,
    orders.SAVE: _order,
    orders.STOP: _order,
}
ACTIONS = ("status", *REQUESTS)  # the loop answers `status`, since it adds its own figures
