"""What operators ask for: each request is answered by a `result` with a sentence."""

from __future__ import annotations

from collections.abc import Iterator

from diloco_broker import joining, sequence
from diloco_broker.events import Effect, Log, Route, Send
from diloco_broker.state import State
from diloco_protocol.messages import Control, Notice, Result, to_plain

# `status` is answered by the loop, which has figures of its own.
ACTIONS = ("status", "manifest", "save", "kick")


def control(state: State, route: Route, control: Control) -> Iterator[Effect]:
    """Carry out a request, or say why not."""
    match control.action:
        case "manifest":
            yield _manifest(state, route, control)
        case "save":
            yield from _save(state, route, control)
        case "kick":
            yield from _kick(state, route, control)
        case _:
            known = f"{', '.join(ACTIONS[:-1])} and {ACTIONS[-1]}"
            yield _no(
                route,
                control,
                f"This broker knows no control action {control.action!r:.60}; it knows {known}.",
            )


def _yes(route: Route, control: Control, text: str) -> Send:
    return Send(route, Result(control.request, True, text))


def _no(route: Route, control: Control, text: str) -> Send:
    return Send(route, Result(control.request, False, text))


def _manifest(state: State, route: Route, control: Control) -> Send:
    manifest = state.bootstrap.manifest
    if manifest is None:
        return _no(
            route, control, "The broker has no model yet; the first worker that joins brings it."
        )
    data = {
        "manifest": to_plain(manifest),
        "config": to_plain(state.run_config),
        "plan": list(state.bootstrap.plan if state.config.num_fragments > 1 else ()),
    }
    text = f"The model has {manifest.trainable_elements} trainable parameters."
    return Send(route, Result(control.request, True, text, data))


def _save(state: State, route: Route, control: Control) -> Iterator[Effect]:
    if state.config.save_dir is None:
        yield _no(route, control, "This broker saves nothing; start it with --save-dir DIR.")
    elif state.round is None:
        yield _no(route, control, "There is nothing to save yet: the run has no parameters.")
    else:
        yield from sequence.save_soon(state)
        text = (
            f"A checkpoint is being written to {state.config.save_dir}; see the log and the feed."
        )
        yield _yes(route, control, text)


def _kick(state: State, route: Route, control: Control) -> Iterator[Effect]:
    name = control.arguments.get("worker")
    member = state.members.named(name) if isinstance(name, str) else None
    if member is None:
        here = ", ".join(m.worker_id for m in state.members)[:300] or "nobody"
        yield _no(route, control, f"No worker named {name!r:.80} is here; here: {here}.")
        return
    text = f"{member.worker_id} was removed from the run by an operator."
    yield Send(member.control, Notice("kicked", text))
    yield Log("warning", text)
    yield from joining.remove(state, member)
    yield _yes(route, control, text)
