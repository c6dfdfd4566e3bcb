"""How the broker stops: workers are told, a closing round is finished, what is unsaved is saved."""

from __future__ import annotations

from diloco_broker.core import effects
from diloco_broker.core.effects import Effects
from diloco_broker.core.events import Stop
from diloco_broker.core.state import RunState, Stopping
from diloco_broker.core.versions import checkpoints
from diloco_protocol.messages import Notice


def stop(state: RunState, event: Stop) -> Effects:
    """From now on no round closes any more; one that is closing has until the deadline."""
    reason = event.reason.rstrip(".")  # it may be a sentence of the parent's
    state.stopping = Stopping(reason, event.restarting, state.now + event.within_s)
    is_over = "The run is over, and workers are told so."
    then = "Workers train on until a broker is back." if event.restarting else is_over
    yield effects.info(f"Stopping: {reason}. {then}")
    if event.restarting and state.paused_at is not None:
        yield effects.warning(
            "The pause ends with this broker: the run goes on when it is restarted."
        )
    for member in state.members:
        yield member.tell(farewell(state.stopping))


def farewell(stopping: Stopping) -> Notice:
    if stopping.restarting:
        return Notice("restarting", f"The broker restarts: {stopping.reason}.")
    return Notice("shutdown", f"The run is over: {stopping.reason}.")


def finish_if_due(state: RunState, stopping: Stopping) -> Effects:
    """Once no round is closing, or time is up: save what the last checkpoint lacks, and end."""
    if stopping.is_finished:
        return
    save, round_ = None, state.round
    if state.closing:
        if state.now < stopping.until:
            return
        text = "The closing round could not be finished in time."
        yield effects.warning(text, is_listed=False)
    elif round_ is not None and state.config.save_dir and state.saving.number != round_.number:
        save = checkpoints.save(state, round_.number)
    stopping.is_finished = True
    yield effects.Finish(save)
