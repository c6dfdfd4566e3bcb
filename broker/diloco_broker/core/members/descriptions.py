"""Descriptions of models: manifests that are too long for a header and that the broker does not know.

The broker requests only a few at a time, which bounds the memory of abandoned ones.
"""

from __future__ import annotations

from diloco_broker.core import effects, events
from diloco_broker.core.members import admission
from diloco_broker.core.operations import refusals
from diloco_broker.core.state import Described, RunState
from diloco_protocol import messages
from diloco_protocol.description import DescriptionInProgress, seconds_for
from diloco_protocol.errors import Code, ProtocolError

# Descriptions in progress at a time; each takes up to 8 MiB.
AT_A_TIME = 4
# Seconds without a message after which a description is dropped.
GOES_ON_WITHIN_S = 10.0
# Seconds for a complete description, in addition to the time that a slow link takes.
WHOLE_WITHIN_S = 60.0
# Bytes of a description that is read only to list the differences from the run's model. Parsing a longer
# one would block the loop for too long, so the refusal lists no differences.
LONGEST_TO_COMPARE = 128 << 10


def join(state: RunState, route: effects.Route, join: messages.Join) -> effects.Effects:
    """Admit a worker, after requesting its manifest if that is necessary."""
    if join.manifest is not None:
        return admission.join(state, route, join, join.manifest)
    if join.digest is None:
        raise ProtocolError(Code.BAD_HEADER, "A join needs a manifest or the digest of one.")
    if (known := state.model.described_by(join.digest)) is not None:
        return admission.join(state, route, join, known)
    if state.model.manifest is not None and join.size > LONGEST_TO_COMPARE:
        raise ProtocolError(
            Code.MODEL_DIFFERS,
            "The model differs from the run's: its tensors differ in names, shapes, dtypes or order. "
            "Compare the output of diloco-broker plan for both.",
        )
    given_up = _given_up(state)
    if len(state.descriptions.keys() - {route, *given_up}) >= AT_A_TIME:
        text = "Too many workers are sending descriptions of their models; try again in a moment."
        raise ProtocolError(Code.NO_MODEL, text)
    progress = DescriptionInProgress(join.digest, join.size)
    give_up(state)
    ends_at = state.now + WHOLE_WITHIN_S + seconds_for(join.size)
    state.descriptions[route] = Described(join, progress, state.now, ends_at)
    return iter([effects.Send(route, messages.Notice("describe"))])


def give_up(state: RunState) -> None:
    """Drop descriptions that timed out."""
    for route in _given_up(state):
        del state.descriptions[route]


def _given_up(state: RunState) -> list[effects.Route]:
    """The connections of descriptions that timed out."""
    return [
        route
        for route, each in state.descriptions.items()
        if state.now > min(each.heard_at + GOES_ON_WITHIN_S, each.ends_at)
    ]


def describe_on(
    state: RunState, route: effects.Route, message: messages.Describe
) -> effects.Effects:
    """Add a slice of a requested description; the last one admits the worker."""
    described = state.descriptions.get(route)
    if described is None:
        # Most likely it timed out; its worker retries.
        raise ProtocolError(
            Code.NO_MODEL,
            f"This description was not requested, paused for {GOES_ON_WITHIN_S:g} s, or took too long; "
            "join again.",
        )
    progress = described.progress
    try:
        if not progress.add(message.piece):
            described.heard_at = state.now
            return
        # If several workers describe the same model, it is parsed once.
        manifest = state.model.described_by(progress.digest) or progress.manifest()
    except ProtocolError as error:  # the description is invalid
        del state.descriptions[route]
        yield from refusals.refuse(state, route, message, error)
        return
    del state.descriptions[route]
    try:
        yield from admission.join(state, route, described.join, manifest)
    except ProtocolError as error:  # refuse the join, not this message
        yield from refusals.refuse(state, route, described.join, error)


def split(state: RunState, event: events.Split) -> effects.Effects:
    """The user's function has split the model of a joining worker: admit it."""
    asked = event.asked
    try:
        if event.error:
            raise ProtocolError(Code.MODEL_DIFFERS, event.error)
        yield from admission.join(state, asked.route, asked.join, asked.manifest, event.plan)
    except ProtocolError as error:
        yield from refusals.refuse(state, asked.route, asked.join, error)
