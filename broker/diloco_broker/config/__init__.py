"""The configuration of a broker: the declaration of its options, and their validation."""

from diloco_broker.config.broker_config import BrokerConfig

__all__ = ["BrokerConfig"]
