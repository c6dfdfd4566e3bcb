"""The terms of the run that a relay needs."""

from __future__ import annotations

from diloco_broker.config import BrokerConfig
from diloco_broker.core import effects
from diloco_broker.core.state import RunState
from diloco_protocol.dtypes import SPARSE_KEPT
from diloco_protocol.messages import Attached


def combines(config: BrokerConfig) -> bool:
    """Whether relays hold chunks and send means of them.

    Asynchronous mode, and aggregates other than the mean, need each push separately. The mean of sparse
    pushes is not sparse.
    """
    is_sparse = config.wire_dtype in SPARSE_KEPT
    return not (config.is_async or is_sparse) and config.aggregate == "mean"


def of(state: RunState, token: bytes) -> Attached:
    config, layout = state.config, state.model.layout
    return Attached(
        token,
        combines=combines(config),
        wire_dtype=config.wire_dtype,
        chunk_elements=config.chunk_elements,
        fragments=tuple(tuple(each.lengths.values()) for each in layout.all) if layout else (),
        feed=state.surroundings.feed_address,
    )


def tell_all(state: RunState) -> effects.Effects:
    """Send relays the chunk sizes of a model that is now known, or has changed."""
    for relay in state.relays:
        yield effects.Send(relay.control, of(state, relay.token))
