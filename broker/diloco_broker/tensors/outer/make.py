"""Which outer optimizer the configuration asks for, and what it will remember."""

from __future__ import annotations

from collections.abc import Callable

from diloco_broker.config import BrokerConfig
from diloco_broker.core.rounds.modes import mode_of
from diloco_broker.tensors.outer.chunked import Buffered, ChunkOuter, DelayedNesterov, Nesterov, Sgd
from diloco_broker.tensors.outer.torch_fragment import OuterOptimizerFactory
from diloco_broker.tensors.outer.torch_optim import TorchOuter
from diloco_protocol.errors import UsageError

Outer = ChunkOuter | TorchOuter


def _nesterov(config: BrokerConfig) -> Nesterov:
    return Nesterov(config.outer_lr, config.outer_momentum, config.nesterov)


def _delayed(config: BrokerConfig) -> ChunkOuter:
    if config.dn_variant == "direct":
        return Buffered(_nesterov(config), config.dn_size, is_direct=True)
    if not config.nesterov:
        raise UsageError(
            "--no-nesterov does not go with Delayed Nesterov; leave it out, or choose "
            "--outer fedbuff or --dn-variant direct."
        )
    return DelayedNesterov(config.outer_lr, config.outer_momentum, config.dn_size, config.dn_c)


OUTERS: dict[str, Callable[[BrokerConfig], ChunkOuter]] = {
    "nesterov": _nesterov,
    "dn": _delayed,
    "fedbuff": lambda config: Buffered(_nesterov(config), config.dn_size),
    "sgd": lambda config: Sgd(config.outer_lr, share_of(config)),
}
"""What makes each that can be named with `--outer`, but where a factory makes the optimizers."""


def outer_kind(config: BrokerConfig, has_own_optimizer: bool) -> str:
    """Which state the outer optimizer has: that of another kind is of no use to it."""
    kind = config.outer_name
    if kind == "dn":
        kind += f" {config.dn_variant}"
    return f"{config.outer or ''} torch".strip() if has_own_optimizer else kind


def share_of(config: BrokerConfig) -> float:
    """What one gradient is worth: 1 where it is a round's mean, 1/workers where it is one worker's."""
    return 1.0 if mode_of(config).has_rounds else 1 / config.workers


def make_outer(config: BrokerConfig, factory: OuterOptimizerFactory | None = None) -> Outer:
    """The outer optimizer that the configuration asks for.

    `factory` makes a torch optimizer for each fragment. With no `outer` each gradient goes through it;
    with "fedbuff" the mean of each N does. Raises UsageError for options that contradict each other.
    """
    return OUTERS[config.outer_name](config) if factory is None else _by_factory(config, factory)


def _by_factory(config: BrokerConfig, factory: OuterOptimizerFactory) -> TorchOuter:
    if not callable(factory):
        raise UsageError(
            f"outer_optimizer_factory is {factory!r}; it must be a function that takes a fragment's "
            "parameters and returns a torch.optim.Optimizer."
        )
    instead = dict.fromkeys(
        ("outer_lr", "outer_momentum", "nesterov"),
        "set it in the optimizer that is returned",
    )
    if config.outer is None:
        instead |= dict.fromkeys(
            ("dn_buffer", "dn_c", "dn_variant"), "choose --outer fedbuff as well"
        )
    if not config.outer_schedule.warmup.is_constant:
        instead["outer_momentum_warmup"] = "let the optimizer that is returned do it"
    for name, remedy in instead.items():
        value = getattr(config, name)
        if value != getattr(BrokerConfig, name):
            raise UsageError(
                f"{name} is {value}, which outer_optimizer_factory leaves without effect; leave it "
                f"out, or {remedy}."
            )
    match config.outer:
        case None:
            return TorchOuter(factory)
        case "fedbuff":
            return TorchOuter(factory, config.dn_size)
    raise UsageError(
        f"--outer {config.outer} and outer_optimizer_factory exclude each other; leave one out (only "
        "fedbuff can be combined with a factory)."
    )
