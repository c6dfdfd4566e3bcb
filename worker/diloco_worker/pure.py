"""The pure parts of a worker, for programs with a network, a model and a clock of their own.

Its conversation with the broker (`Session`, which takes `events` and asks for `effects`), what it keeps
for training (`Inbox`), what happens after each optimizer step (`after_step`, over a `SyncState` and its
`Ports`), and the `Executor` of effects, whose ports are handed in. A simulation in which these decide
waits, overlaps and merges when a real worker does. Nothing here reaches torch, a socket or the clock.
"""

from diloco_worker.session import effects, events
from diloco_worker.session.downloads import DOWNLOAD_WINDOW
from diloco_worker.session.news import LinkState, Poll, Work
from diloco_worker.session.session import Session
from diloco_worker.sync.boundary import after_step, poll
from diloco_worker.sync.fragment import InFlight, Merge, TrainingBase
from diloco_worker.sync.metrics import SyncMetrics
from diloco_worker.sync.ports import NonFinite, Ports
from diloco_worker.sync.state import Options, SyncState
from diloco_worker.transport.executor import Executor
from diloco_worker.transport.inbox import Inbox

__all__ = [
    "DOWNLOAD_WINDOW",
    "Executor",
    "InFlight",
    "Inbox",
    "LinkState",
    "Merge",
    "NonFinite",
    "Options",
    "Poll",
    "Ports",
    "Session",
    "SyncMetrics",
    "SyncState",
    "TrainingBase",
    "Work",
    "after_step",
    "effects",
    "events",
    "poll",
]
