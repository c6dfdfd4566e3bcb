"""The pure broker, for programs that bring their own network, tensors and clock.

These are the decisions of the real broker without its I/O: the state machine, its options, its inputs
(`events`) and outputs (`effects`), and the executor that runs effects on the ports given to it. A
simulation that uses them follows the rules of a real run: which workers a round waits for, the order of
chunks, the upload window of a worker. Nothing here uses torch, a socket or the clock.
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
