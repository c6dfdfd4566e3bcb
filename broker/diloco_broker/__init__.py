"""The DiLoCo broker: averages pseudo-gradients, takes the outer step, returns parameters."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diloco_broker.config import BrokerConfig
    from diloco_broker.shell.broker import Broker
    from diloco_broker.tensors.outer.torch_fragment import FragmentParameters, OuterOptimizerFactory

__all__ = ["Broker", "BrokerConfig", "FragmentParameters", "OuterOptimizerFactory"]

_HOMES = {
    "Broker": "diloco_broker.shell.broker",
    "BrokerConfig": "diloco_broker.config",
    "FragmentParameters": "diloco_broker.tensors.outer.torch_fragment",
    "OuterOptimizerFactory": "diloco_broker.tensors.outer.torch_fragment",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: torch takes seconds to import, and `diloco-broker status` does not need it.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
