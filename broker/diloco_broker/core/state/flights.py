"""At a relay: what has gone up, until the parent has it in a version or refuses it."""

from __future__ import annotations

from dataclasses import dataclass

from diloco_broker.core.state.staged_updates import StagedUpdate
from diloco_protocol.messages import Push


@dataclass(eq=False)
class Flight:
    """One push of the site: the mean of what an update has chosen."""

    update: StagedUpdate
    push: Push
    number: int  # the parent's round that it is in, as far as is known; nothing without rounds
