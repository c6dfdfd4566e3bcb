"""What the broker and the workers of a simulated run have in common."""

from __future__ import annotations

from dataclasses import dataclass

from diloco_tools.plan.question import Question
from diloco_tools.plan.simulated.costs import GIGA, Costs
from diloco_tools.plan.simulated.fair_share import Hub, World
from diloco_tools.plan.simulated.pieces import Pieces


@dataclass(frozen=True, eq=False)
class Scene:
    """The world, what is asked, how the model is cut, what work costs, and the cores that do it."""

    world: World
    question: Question
    pieces: Pieces
    costs: Costs
    cores: Hub

    def clock(self) -> float:
        """The seconds that the core and the sessions are shown; see `pieces`."""
        return self.world.now / self.pieces.chunks

    def wire_seconds(self, size: float) -> float:
        """CPU of ZeroMQ's thread for so many bytes of chunks, at either end."""
        costs = self.costs
        return size / GIGA * (costs.wire + (costs.keys if self.question.has_keys else 0.0))

    @property
    def message_seconds(self) -> float:
        """CPU for the messages that one piece stands for."""
        return self.costs.message * self.pieces.chunks

    @property
    def billions(self) -> float:
        """Elements of a piece."""
        return self.pieces.elements / GIGA
