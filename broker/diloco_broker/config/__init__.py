"""The configuration of a broker: each option declared once, checked together, handed to workers."""

from diloco_broker.config.broker_config import BrokerConfig

__all__ = ["BrokerConfig"]
