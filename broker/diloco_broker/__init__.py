"""The DiLoCo broker: averages pseudo-gradients, takes the outer step, hands parameters back."""

from diloco_broker.config import BrokerConfig
from diloco_broker.loop import Broker
from diloco_broker.torch_outer import FragmentParameters, OuterOptimizerFactory

__all__ = ["Broker", "BrokerConfig", "FragmentParameters", "OuterOptimizerFactory"]
