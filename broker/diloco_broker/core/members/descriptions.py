"""Workers whose manifest is too long for a header: the broker asks for it, if it does not know it.

A few at a time, so that those who do not go on cost no more than that.
"""

from __future__ import annotations

from diloco_broker.core import effects, events
from diloco_broker.core.members import admission
from diloco_broker.core.operations import refusals
from diloco_broker.core.state import Described, RunState
from diloco_protocol import messages
from diloco_protocol.description import DescriptionInProgress, seconds_for
from diloco_protocol.errors import Code, ProtocolError

# Descriptions that may be on their way at a time; each takes 8 MiB at most.
AT_A_TIME = 4
# Seconds after which one that does not go on is given up.
GOES_ON_WITHIN_S = 10.0
# And within which all of it is here, besides what a slow link takes.
WHOLE_WITHIN_S = 60.0
# A model that differs from the run's is described for the sake of a sentence that names the differences.
# To read a larger one takes the broker longer than it may be away, so that sentence names none.
LONGEST_TO_COMPARE = 128 << 10


def join(state: RunState, route: effects.Route, join: messages.Join) -> effects.Effects:
    """A worker asks to take part; its manifest may have to be asked for first."""
    if join.manifest is not None:
        return admission.join(state, route, join, join.manifest)
    if join.digest is None:
        raise ProtocolError(Code.BAD_HEADER, "A join has a manifest, or the digest of one.")
    if (known := state.model.described_by(join.digest)) is not None:
        return admission.join(state, route, join, known)
    if state.model.manifest is not None and join.size > LONGEST_TO_COMPARE:
        raise ProtocolError(
            Code.MODEL_DIFFERS,
            "The model is not that of the run: its tensors differ in names, shapes, dtypes or order. "
            "Compare what diloco-broker plan shows of both.",
        )
    given_up = _given_up(state)
    if len(state.descriptions.keys() - {route, *given_up}) >= AT_A_TIME:
        text = "Other workers are describing their models; the next ones can in a moment."
        raise ProtocolError(Code.NO_MODEL, text)
    progress = DescriptionInProgress(join.digest, join.size)
    give_up(state)
    ends_at = state.now + WHOLE_WITHIN_S + seconds_for(join.size)
    state.descriptions[route] = Described(join, progress, state.now, ends_at)
    return iter([effects.Send(route, messages.Notice("describe"))])


def give_up(state: RunState) -> None:
    """Forget what came of descriptions that do not go on."""
    for route in _given_up(state):
        del state.descriptions[route]


def _given_up(state: RunState) -> list[effects.Route]:
    """The connections of descriptions that do not go on."""
    return [
        route
        for route, each in state.descriptions.items()
        if state.now > min(each.heard_at + GOES_ON_WITHIN_S, each.ends_at)
    ]


def describe_on(
    state: RunState, route: effects.Route, message: messages.Describe
) -> effects.Effects:
    """A piece of what was asked for."""
    described = state.descriptions.get(route)
    if described is None:
        # It was asked for and stood still too long; nothing is lost but the time.
        raise ProtocolError(
            Code.NO_MODEL,
            f"This description was not asked for, stood still for {GOES_ON_WITHIN_S:g} s, or took "
            "too long; join again.",
        )
    progress = described.progress
    try:
        if not progress.add(message.piece):
            described.heard_at = state.now
            return
        # Where several describe the same model, it is read once.
        manifest = state.model.described_by(progress.digest) or progress.manifest()
    except ProtocolError as error:  # it cannot go on from here
        del state.descriptions[route]
        yield from refusals.refuse(state, route, message, error)
        return
    del state.descriptions[route]
    try:
        yield from admission.join(state, route, described.join, manifest)
    except ProtocolError as error:  # it is the join that is refused
        yield from refusals.refuse(state, route, described.join, error)


def split(state: RunState, event: events.Split) -> effects.Effects:
    """The user's function has split the model of a worker that joins."""
    asked = event.asked
    try:
        if event.error:
            raise ProtocolError(Code.MODEL_DIFFERS, event.error)
        yield from admission.join(state, asked.route, asked.join, asked.manifest, event.plan)
    except ProtocolError as error:
        yield from refusals.refuse(state, asked.route, asked.join, error)
