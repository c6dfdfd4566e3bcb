"""Whether there is room for what somebody wants to bring: checked before anything is made for it."""

from __future__ import annotations

from diloco_broker.config import BrokerConfig
from diloco_broker.core import effects
from diloco_broker.core.rounds.modes import mode_of
from diloco_broker.core.state import RunState
from diloco_broker.core.versions.reply import LONGEST_CHAIN
from diloco_protocol.dtypes import SIZES, in_few_bits, span_bytes
from diloco_protocol.errors import Code, ProtocolError
from diloco_protocol.manifest import Kind, Manifest
from diloco_protocol.messages import Join

MASTER_BYTES = 4  # of a parameter at the broker, and of whatever is remembered or added up of it
# Values that the outer optimizer remembers of a parameter; two where it is one of torch's, as Adam does.
REMEMBERED = {"sgd": 0, "nesterov": 1, "dn": 2, "fedbuff": 2}


def bytes_per_parameter(config: BrokerConfig, *, has_own_optimizer: bool = False) -> float:
    """What the broker keeps of each parameter, all in all, once rounds go on.

    The value itself, what the outer optimizer remembers, the sum of a round or the submissions that are
    kept whole, and the value in wire form where that is another one.
    """
    pieces, mode = config.num_fragments, mode_of(config)
    remembered = 2 if has_own_optimizer else REMEMBERED[config.outer_name]
    kept = MASTER_BYTES * (1 + remembered) + reply_bytes(config)
    if mode.room_needed is None:
        return kept + MASTER_BYTES / pieces
    # Of 1000 parameters, in fragments of one size: sizes are whole numbers of bytes.
    sizes = [int(1000 * SIZES[config.wire_dtype].element) // pieces] * pieces
    many, _, size = mode.room_needed(config, sizes)
    return kept + many * size / 1000


def reply_bytes(config: BrokerConfig) -> float:
    """Of a parameter in wire form, where that is another one than its own.

    In few bits that is the shadow, in fp32, and the codes of the last versions.
    """
    if in_few_bits(config.reply_dtype):
        return MASTER_BYTES + LONGEST_CHAIN * SIZES[config.reply_dtype].element
    return 0 if config.reply_dtype == "fp32" else SIZES[config.reply_dtype].element


def check_size(state: RunState, manifest: Manifest) -> None:
    """Raises ProtocolError for a model that is larger than the broker may take, or has memory for."""
    config, memory = state.config, state.surroundings.memory_bytes
    size = sum(entry.elements for entry in manifest.entries)
    if config.max_parameters is not None:
        if 0 < config.max_parameters < size:
            raise ProtocolError(
                Code.MODEL_DIFFERS,
                f"The model has {size:,} elements; this broker takes {config.max_parameters:,} at most. "
                "Start it with a larger --max-parameters, if the model is meant.",
            )
        return
    each = bytes_per_parameter(config, has_own_optimizer=state.has_own_optimizer)
    frozen = sum(entry.elements for entry in manifest.entries if entry.kind is Kind.FROZEN)
    needed = (size - frozen) * each + frozen * (MASTER_BYTES + reply_bytes(config))
    if memory is not None and needed > memory:
        raise ProtocolError(
            Code.MODEL_DIFFERS,
            f"The model has {size:,} elements, and the broker keeps {each:.1f} bytes of each that is "
            f"trained: {needed / 1e9:,.1f} GB, where it has {memory / 1e9:,.1f} GB. Start it on a "
            "machine with more memory, or with --max-parameters 0 to try all the same.",
        )


def check_number(state: RunState, join: Join) -> None:
    """Raises ProtocolError where one more worker would be too many."""
    most = state.config.max_workers
    if join.worker_id not in state.members and len(state.members) >= most:
        raise ProtocolError(
            Code.NOT_ALLOWED,
            f"There are {len(state.members)} workers already, and this broker takes {most} at most. "
            "Start it with a larger --max-workers, if more are meant.",
        )


def announce(state: RunState) -> effects.Effects:
    """Log what keeping whole submissions costs."""
    config, layouts = state.config, [each.layout for each in state.versions.trained]
    mode = mode_of(config)
    if mode.room_needed is None:
        return
    sizes = [sum(span_bytes(span, config.wire_dtype) for span in part.spans) for part in layouts]
    many, whose, size = mode.room_needed(config, sizes)
    yield effects.info(
        f"{mode.asked_for_by(config)} needs whole submissions: up to {many} "
        f"{whose}{'s'[: many != 1]} x {_megabytes(size)} of memory beyond parameters and momentum."
    )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"
