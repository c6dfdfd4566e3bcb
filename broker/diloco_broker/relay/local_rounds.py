"""Several rounds of a site to one push: it steps by itself in between (experimental).

A site averages K times. After each mean it takes an outer step of its own, so its workers go on from
what they have come to; after the last one the way that it has come since the parent's version goes up as
one push, and the version that contains it is what the site goes on from. The line to the parent carries
one push and one version in K rounds. (HALoS, Kim et al. 2025, arXiv 2506.04531, has such local servers
with a momentum of their own; theirs wait for nobody.)

The site is a run of its own to its workers: versions in between are the site's, nobody else has them,
and they must never be taken for the parent's. So what a site has not sent up dies with its relay, up to
K - 1 rounds, and no worker of it can turn to another broker without beginning anew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor

from diloco_broker.relay.means import room_for
from diloco_broker.tensors.outer.chunked import Nesterov, State
from diloco_protocol.chunks import ChunkSpan, FragmentLayout, Segment
from diloco_protocol.errors import UsageError
from diloco_protocol.messages import Push
from diloco_protocol.tensors.codecs import segment_dtype
from diloco_protocol.version import VersionId
from diloco_worker.model.flat_state import FlatState


@dataclass(frozen=True)
class LocalOuter:
    """How a site steps by itself: after `rounds` of its rounds a push goes up.

    The step is theta <- theta - lr (g + momentum m), m <- momentum m + g, with g the mean of the
    round: with the defaults the site goes to where its workers are on the mean.
    """

    rounds: int
    lr: float = 1.0
    momentum: float = 0.0

    def check(self) -> None:
        """Raise UsageError for what cannot be."""
        if self.rounds < 1:
            raise UsageError(f"--local-rounds is {self.rounds}; it must be at least 1.")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise UsageError(f"--local-outer-lr is {self.lr:g}; it must be above 0.")
        if not 0 <= self.momentum < 1:
            raise UsageError(
                f"--local-outer-momentum is {self.momentum:g}; it must be from 0 to below 1."
            )


class Account:
    """Which pushes the way of a site consists of, since the parent's version. Pure."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._rounds: list[Push] = []  # what each would have been as the push of a site
        self._base: VersionId | None = None  # the parent's version that the site has come from

    def begins(self, base: VersionId) -> None:
        """The site has this version of the parent's."""
        self._base = base
        self._rounds.clear()

    def takes(self, push: Push) -> None:
        """A round of the site has averaged what this would be the push of."""
        self._rounds.append(push)

    @property
    def is_due(self) -> bool:
        """Does the way go up? Where it was refused, after as many rounds again."""
        return len(self._rounds) % self._every == 0

    def push(self, weight_by: str) -> Push:
        """What goes up: of each worker its last push, tokens and samples of all rounds.

        Where contributions weigh alike it weighs what a round weighs on the mean.
        """
        last, count = self._rounds[-1], len(self._rounds)
        contents: dict[str, int] = {}
        for each in self._rounds:
            contents |= each.contents or {}
        names = {name for each in self._rounds for name in each.bases or {}}
        tokens = sum(each.tokens for each in self._rounds)
        samples = sum(each.samples for each in self._rounds)
        by = {"equal": count, "tokens": tokens, "samples": samples}[weight_by]
        weights = (
            each.weight * {"equal": 1, "tokens": each.tokens, "samples": each.samples}[weight_by]
            for each in self._rounds
        )
        return replace(
            last,
            base=self._base,
            bases=dict.fromkeys(names, self._base.counter) if self._base else None,
            contents=contents,
            tokens=tokens,
            samples=samples,
            weight=sum(weights) / by,
            steps=sum(each.steps for each in self._rounds),
        )


class Way:
    """Where a site is between two versions of its parent's, one fragment of it.

    Parameters take outer steps, float buffers go to the mean of their values, integers to the largest.

    Args:
        layout: of the fragment.
        start: the parent's version; it does not change.
        outer: how the site steps.
        reply_dtype: what its versions go to its workers in: fp32, bf16 or fp16.
    """

    def __init__(
        self, layout: FragmentLayout, start: FlatState, outer: LocalOuter, reply_dtype: str
    ) -> None:
        self._layout, self._reply_dtype = layout, reply_dtype
        self._nesterov = Nesterov(outer.lr, outer.momentum)
        self._momentum: dict[int, State] = {}  # by chunk of parameters; it outlives versions
        self.begins(start)

    def begins(self, start: FlatState) -> None:
        """The site goes on from this version of the parent's."""
        self._start = start
        # fp32 and int64; what has been handed out is never written again.
        self._here = {segment: vector.clone() for segment, vector in _whole(start).items()}

    def step(self, span: ChunkSpan, mean: Tensor) -> None:
        """Take the step of one chunk; `mean` is what a round came to, 1-D, and may be used up."""
        here = self._here[span.segment][span.start : span.stop]
        match span.segment:
            case Segment.PARAMETERS:
                state = self._momentum.get(span.index, {})
                stepped, self._momentum[span.index] = self._nesterov.step(here, mean, state, 0)
                here.copy_(stepped)
            case Segment.BUFFERS | Segment.INTEGERS:  # pushes have values of these
                here.copy_(mean)

    def version(self) -> FlatState:
        """Where the site is now, as its workers are sent it, in memory of its own."""
        made = room_for(self._layout, self._reply_dtype)
        for segment, vector in self._here.items():
            made.vectors[segment].copy_(vector)
        return made

    def delta(self, wire_dtype: str) -> FlatState:
        """The way since the parent's version, as a push: of parameters the start minus here."""
        made = room_for(self._layout, wire_dtype)
        for segment, start in _whole(self._start).items():
            here = self._here[segment]
            is_trained = segment is Segment.PARAMETERS
            made.vectors[segment].copy_(start - here if is_trained else here)
        return made


def _whole(state: FlatState) -> dict[Segment, Tensor]:
    """Its vectors in fp32 and int64."""
    return {segment: each.to(segment_dtype(segment)) for segment, each in state.vectors.items()}
