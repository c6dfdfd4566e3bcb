"""Which outer optimizer the configuration asks for, and what it will remember."""

from __future__ import annotations

from dataclasses import fields

from diloco_broker.config import BrokerConfig
from diloco_broker.tensors.outer.chunked import (
    ChunkOuter,
    DelayedNesterov,
    DirectDelayed,
    FedBuff,
    Nesterov,
    Sgd,
)
from diloco_broker.tensors.outer.torch_fragment import OuterOptimizerFactory
from diloco_broker.tensors.outer.torch_optim import TorchOuter
from diloco_protocol.errors import UsageError

Outer = ChunkOuter | TorchOuter

# Tensors of the size of a chunk that an outer optimizer remembers of it; others: one.
REMEMBERED = {"sgd": 0, "nesterov": 1, "fedbuff": 2, "dn": 2}


def remembered(config: BrokerConfig, outer: Outer) -> int:
    """How many tensors of the size of a chunk there will be for each chunk besides its value."""
    return 0 if isinstance(outer, TorchOuter) else REMEMBERED.get(config.outer_name, 1)


def outer_kind(config: BrokerConfig, has_own_optimizer: bool) -> str:
    """Which state the outer optimizer has: that of another kind is of no use to it."""
    kind = config.outer_name
    if kind == "dn":
        kind += f" {config.dn_variant}"
    return f"{config.outer or ''} torch".strip() if has_own_optimizer else kind


def share_of(config: BrokerConfig) -> float:
    """What one gradient is worth: 1 where it is a round's mean, 1/workers where it is one worker's."""
    return 1 / config.workers if config.is_async else 1.0


def make_outer(config: BrokerConfig, factory: OuterOptimizerFactory | None = None) -> Outer:
    """The outer optimizer that the configuration asks for.

    Args:
        config: `outer` and what belongs to it.
        factory: makes a torch optimizer for each fragment. With no `outer` each gradient goes through
            it; with "fedbuff" and "dn" see `TorchOuter`.

    Raises:
        UsageError: for options that contradict each other.
    """
    if factory is not None:
        return _by_factory(config, factory)
    inner = Nesterov(config.outer_lr, config.outer_momentum, config.nesterov)
    match config.outer_name:
        case "dn" if config.dn_variant == "paper":
            if not config.nesterov:
                raise UsageError(
                    "--no-nesterov does not go with Delayed Nesterov; leave it out, or choose "
                    "--outer fedbuff or --dn-variant direct."
                )
            return DelayedNesterov(
                config.outer_lr, config.outer_momentum, config.dn_size, config.dn_c
            )
        case "dn":
            return DirectDelayed(inner, config.dn_size)
        case "fedbuff":
            return FedBuff(inner, config.dn_size)
        case "sgd":
            return Sgd(config.outer_lr, share_of(config))
    return inner


def _by_factory(config: BrokerConfig, factory: OuterOptimizerFactory) -> TorchOuter:
    if not callable(factory):
        raise UsageError(
            f"outer_optimizer_factory is {factory!r}; it must be a function that takes a fragment's "
            "parameters and returns a torch.optim.Optimizer."
        )
    defaults = {field.name: field.default for field in fields(BrokerConfig)}
    instead = dict.fromkeys(
        ("outer_lr", "outer_momentum", "nesterov"), "set it in the optimizer that is returned"
    )
    if config.outer is None:
        instead |= dict.fromkeys(
            ("dn_buffer", "dn_c", "dn_variant"), "choose --outer dn or fedbuff as well"
        )
    for name, remedy in instead.items():
        value = getattr(config, name)
        if value != defaults[name]:
            raise UsageError(
                f"{name} is {value}, which outer_optimizer_factory leaves without effect; leave it "
                f"out, or {remedy}."
            )
    match config.outer:
        case None:
            return TorchOuter(factory)
        case "fedbuff":
            return TorchOuter(factory, "fedbuff", config.dn_size)
        case "dn" if config.dn_variant == "paper":
            return TorchOuter(factory, "paper", config.dn_size, config.dn_c)
        case "dn":
            return TorchOuter(factory, "direct", config.dn_size)
    raise UsageError(
        f"--outer {config.outer} and outer_optimizer_factory exclude each other; leave one out (dn and "
        "fedbuff can be combined with a factory)."
    )
