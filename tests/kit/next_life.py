"""A worker that goes on from a checkpoint, message by message, with a scripted broker.

The model has the same value everywhere; each step lowers it by 1, from 100.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from diloco_protocol import Ledger, VersionId
from diloco_protocol.messages import Join, Pull, Released
from diloco_worker import DiLoCoWorker
from kit.reference import State, state_of
from kit.scripted_broker import Descent, ScriptedBroker

H = 4
STRANGER = 0xABC  # a push that no checkpoint knows

Saved = tuple[dict[str, Any], State]


def saved_by(worker: DiLoCoWorker, descent: Descent) -> Saved:
    """What the script's checkpoint has. Then this life is over."""
    state = copy.deepcopy(worker.state_dict()), state_of(descent.model)
    worker.close(failed=True)
    return state


@dataclass
class NextLife:
    """Another life of the worker, about to go on from what was saved."""

    worker: DiLoCoWorker
    descent: Descent
    started: Callable[[], Any]
    join: Join


Resume = Callable[..., NextLife]


def says_current(broker: ScriptedBroker, what: VersionId, fragment: int = 0) -> Pull:
    """Answer the next pull: this version, which the worker has, is the newest."""
    pull = broker.hears_pull(fragment)
    broker.says(Released(fragment, what, Ledger()))
    return pull
