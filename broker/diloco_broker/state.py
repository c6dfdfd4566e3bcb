"""The whole state of a broker, as one record that the functions of the core work on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from diloco_broker.bootstrap import Bootstrap
from diloco_broker.config import BrokerConfig
from diloco_broker.membership import Membership
from diloco_broker.rounds import Round
from diloco_broker.transfer import Shelf
from diloco_protocol.messages import RunConfig


@dataclass
class Totals:
    """Counters since the broker started."""

    rounds: int = 0
    pushes: int = 0
    rejected: int = 0
    malformed: int = 0
    bytes_up: int = 0
    deaths: int = 0


@dataclass(frozen=True)
class RoundReport:
    """What is known of a round that has ended.

    Attributes:
        seconds: from its opening to its release.
        averaged: contributions counted whole.
        weight: sum of their weights.
        loss: mean of the losses they reported, None without any.
        delta_norm: mean Euclidean norm of their pseudo-gradients, None without any.
    """

    number: int
    seconds: float
    averaged: int
    weight: float
    loss: float | None
    delta_norm: float | None


@dataclass
class State:
    """Everything the broker knows, except tensors.

    Attributes:
        draw: returns an unpredictable number below 2**64 (tokens, tags, the run's name).
        epoch: this life of the broker, 16 hexadecimal digits.
        round: the round going on; None until there are parameters.
        stopping: why the broker is about to stop; None while it is not.
        first_round_pending: no round has closed in this life, so `workers` is the floor.
    """

    config: BrokerConfig
    draw: Callable[[], int]
    started_at: float
    epoch: str
    bootstrap: Bootstrap
    members: Membership = field(default_factory=Membership)
    shelf: Shelf = field(default_factory=Shelf)
    round: Round | None = None
    totals: Totals = field(default_factory=Totals)
    last_report: RoundReport | None = None
    stopping: str | None = None
    first_round_pending: bool = True
    feed_address: str | None = None

    @property
    def run_config(self) -> RunConfig:
        return self.config.run_config
