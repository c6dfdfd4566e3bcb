"""The DiLoCo broker: averages pseudo-gradients, takes the outer step, hands parameters back."""

from diloco_broker.config import BrokerConfig
from diloco_broker.loop import Broker

__all__ = ["Broker", "BrokerConfig"]
