"""The broker without its world: for programs with their own network, tensors and clock.

What the real broker decides with, and nothing that it acts with: the state machine, its options, what
goes in (`events`) and what it asks for (`effects`), and the one place where effects are carried out,
whose ports are handed in. A simulation in which these decide has the rules of a real run: who is waited
for, which chunk goes when, what a worker may have under way. Nothing here reaches torch, a socket or
the clock.
"""

from diloco_broker.config import BrokerConfig
from diloco_broker.core import effects, events
from diloco_broker.core.machine import Core
from diloco_broker.core.rounds.uploads import upload_window
from diloco_broker.core.versions.record import InitialModel
from diloco_broker.core.versions.reply import Coded
from diloco_broker.shell.effects import Executor

__all__ = [
    "BrokerConfig",
    "Coded",
    "Core",
    "Executor",
    "InitialModel",
    "effects",
    "events",
    "upload_window",
]
