"""Limits on the model and on the number of workers, checked before anything is allocated."""

from __future__ import annotations

from diloco_broker.config import BrokerConfig
from diloco_broker.core import effects
from diloco_broker.core.rounds.modes import mode_of
from diloco_broker.core.state import RunState
from diloco_broker.core.versions.reply import LONGEST_CHAIN
from diloco_protocol.dtypes import SIZES, is_quantized, span_bytes
from diloco_protocol.errors import Code, ProtocolError
from diloco_protocol.manifest import Kind, Manifest
from diloco_protocol.messages import Join

MASTER_BYTES = 4  # per parameter at the broker, and per value of optimizer state or sums: fp32
# Values of state per parameter, by outer optimizer; a torch optimizer counts two, as Adam has.
REMEMBERED = {"sgd": 0, "nesterov": 1, "dn": 2, "fedbuff": 2, "cgad": 2}


def bytes_per_parameter(config: BrokerConfig, *, has_own_optimizer: bool = False) -> float:
    """Bytes of memory that the broker needs per parameter while rounds run.

    They are the value, the outer optimizer's state, the sum of a round or its staged pushes, and the
    value in wire form if that is not fp32.
    """
    pieces, mode = config.num_fragments, mode_of(config)
    remembered = 2 if has_own_optimizer else REMEMBERED[config.outer_name]
    kept = MASTER_BYTES * (1 + remembered) + reply_bytes(config)
    if mode.room_needed is None:
        return kept + MASTER_BYTES / pieces
    # For 1000 parameters, in fragments of equal size, since sizes are integers.
    sizes = [int(1000 * SIZES[config.wire_dtype].element) // pieces] * pieces
    many, _, size = mode.room_needed(config, sizes)
    return kept + many * size / 1000


def reply_bytes(config: BrokerConfig) -> float:
    """Bytes per parameter of the wire form, 0 for fp32, which shares the memory of the parameters.

    For quantized replies: the values that workers hold, in fp32, and the codes of the last versions.
    """
    if is_quantized(config.reply_dtype):
        return MASTER_BYTES + LONGEST_CHAIN * SIZES[config.reply_dtype].element
    return 0 if config.reply_dtype == "fp32" else SIZES[config.reply_dtype].element


def check_size(state: RunState, manifest: Manifest) -> None:
    """Raise ProtocolError for a model that exceeds the broker's limit or memory."""
    config, memory = state.config, state.surroundings.memory_bytes
    size = sum(entry.elements for entry in manifest.entries)
    if config.max_parameters is not None:
        if 0 < config.max_parameters < size:
            raise ProtocolError(
                Code.MODEL_DIFFERS,
                f"The model has {size:,} elements; this broker accepts at most "
                f"{config.max_parameters:,}. If it is the right model, restart the broker with a larger "
                "--max-parameters.",
            )
        return
    each = bytes_per_parameter(config, has_own_optimizer=state.has_own_optimizer)
    frozen = sum(entry.elements for entry in manifest.entries if entry.kind is Kind.FROZEN)
    needed = (size - frozen) * each + frozen * (MASTER_BYTES + reply_bytes(config))
    if memory is not None and needed > memory:
        raise ProtocolError(
            Code.MODEL_DIFFERS,
            f"The model has {size:,} elements, and the broker needs {each:.1f} bytes for each that is "
            f"trained: {needed / 1e9:,.1f} GB, but has {memory / 1e9:,.1f} GB. Start it on a machine "
            "with more memory, or with --max-parameters 0 to try anyway.",
        )


def check_number(state: RunState, join: Join) -> None:
    """Raise ProtocolError if one more worker would exceed `max_workers`."""
    most = state.config.max_workers
    if join.worker_id not in state.members and len(state.members) >= most:
        raise ProtocolError(
            Code.NOT_ALLOWED,
            f"This broker has {len(state.members)} workers and accepts at most {most}. To admit more, "
            "restart it with a larger --max-workers.",
        )


def announce(state: RunState) -> effects.Effects:
    """Log the memory that complete submissions need, if the mode keeps them."""
    config, layouts = state.config, [each.layout for each in state.versions.trained]
    mode = mode_of(config)
    if mode.room_needed is None:
        return
    sizes = [sum(span_bytes(span, config.wire_dtype) for span in part.spans) for part in layouts]
    many, whose, size = mode.room_needed(config, sizes)
    yield effects.info(
        f"{mode.asked_for_by(config)} needs complete submissions: up to {many} "
        f"{whose}{'s'[: many != 1]} x {_megabytes(size)} of memory beyond parameters and momentum."
    )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"
