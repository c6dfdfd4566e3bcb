"""Makes the outer optimizer of a configuration."""

from __future__ import annotations

from collections.abc import Callable

from diloco_broker.config import BrokerConfig
from diloco_broker.core.rounds.modes import mode_of
from diloco_broker.tensors.outer.chunked import (
    Adam,
    Buffered,
    ChunkOuter,
    DelayedNesterov,
    Nesterov,
)
from diloco_broker.tensors.outer.torch_fragment import OuterOptimizerFactory
from diloco_broker.tensors.outer.torch_optim import TorchOuter
from diloco_protocol.errors import UsageError

Outer = ChunkOuter | TorchOuter


def _nesterov(config: BrokerConfig) -> Nesterov:
    return Nesterov(config.outer_lr, config.outer_momentum, config.nesterov)


def _adam(config: BrokerConfig) -> Adam:
    return Adam(config.outer_lr, config.outer_momentum, config.cgad_epsilon, share_of(config))


def _delayed(config: BrokerConfig) -> ChunkOuter:
    if config.dn_variant == "direct":
        return Buffered(_nesterov(config), config.dn_size, is_direct=True)
    if not config.nesterov:
        raise UsageError(
            "--no-nesterov and Delayed Nesterov exclude each other; omit it, or choose --outer fedbuff "
            "or --dn-variant direct."
        )
    return DelayedNesterov(config.outer_lr, config.outer_momentum, config.dn_size, config.dn_c)


OUTERS: dict[str, Callable[[BrokerConfig], ChunkOuter]] = {
    "nesterov": _nesterov,
    "dn": _delayed,
    "fedbuff": lambda config: Buffered(_nesterov(config), config.dn_size),
    "sgd": lambda config: Nesterov(config.outer_lr * share_of(config), momentum=0.0),
    "cgad": _adam,
}
"""By name in `--outer`: functions that make the optimizer, unless a factory does."""


def outer_kind(config: BrokerConfig, has_own_optimizer: bool) -> str:
    """The kind of the outer optimizer, which can use only state of the same kind."""
    kind = config.outer_name
    if kind == "dn":
        kind += f" {config.dn_variant}"
    return f"{config.outer or ''} torch".strip() if has_own_optimizer else kind


def share_of(config: BrokerConfig) -> float:
    """The weight of one gradient: 1 for the mean of a round, 1/workers for a single push."""
    return 1.0 if mode_of(config).has_rounds else 1 / config.workers


def make_outer(config: BrokerConfig, factory: OuterOptimizerFactory | None = None) -> Outer:
    """Make the outer optimizer of a configuration.

    `factory` makes a torch optimizer for each fragment. Without `outer` it steps with each gradient;
    with "fedbuff" it steps with the mean of every N. Raises UsageError for contradictory options.
    """
    return OUTERS[config.outer_name](config) if factory is None else _by_factory(config, factory)


def _by_factory(config: BrokerConfig, factory: OuterOptimizerFactory) -> TorchOuter:
    if not callable(factory):
        raise UsageError(
            f"outer_optimizer_factory is {factory!r}; it must be a function that takes a fragment's "
            "parameters and returns a torch.optim.Optimizer."
        )
    instead = dict.fromkeys(
        ("outer_lr", "outer_momentum", "nesterov"), "set it in the returned optimizer"
    )
    if config.outer is None:
        instead |= dict.fromkeys(("dn_buffer", "dn_c", "dn_variant"), "also give --outer fedbuff")
    if not config.outer_schedule.warmup.is_constant:
        instead["outer_momentum_warmup"] = "implement it in the returned optimizer"
    instead["outer_momentum_restart"] = "implement it in the returned optimizer"
    for name, remedy in instead.items():
        value = getattr(config, name)
        if value != getattr(BrokerConfig, name):
            raise UsageError(
                f"{name} is {value}, which has no effect with outer_optimizer_factory; omit it, or "
                f"{remedy}."
            )
    match config.outer:
        case None:
            return TorchOuter(factory)
        case "fedbuff":
            return TorchOuter(factory, config.dn_size)
    raise UsageError(
        f"--outer {config.outer} and outer_optimizer_factory exclude each other; omit one of them (only "
        "fedbuff can be combined with a factory)."
    )
