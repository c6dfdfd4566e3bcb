"""What means in few bits leave out is neither lost nor sent twice, whatever becomes of a push."""

from __future__ import annotations

import random
from collections.abc import Collection

import pytest
import torch
from torch import Tensor

from diloco_broker.relay.means import Mean, Residuals
from diloco_broker.relay.unsettled import MOST_ABANDONED, VERSIONS_LOOKED_AT, Unsettled
from diloco_protocol import Ledger, ModelLayout, Segment, VersionId
from diloco_protocol.bitmap import Bitmap
from diloco_protocol.chunks import ChunkSpan
from diloco_protocol.messages import Push, Released
from diloco_protocol.tensors.codecs import decode_chunk
from diloco_worker.model.flat_state import FlatState
from diloco_worker.model.model_tensors import ModelTensors
from diloco_worker.session.compatibility import cut
from kit.scripted_broker import run_config

RUN = "0123456789abcdef"


def a_layout(chunk: int = 300) -> ModelLayout:
    model = torch.nn.Sequential(torch.nn.Linear(700, 1, bias=False), torch.nn.BatchNorm1d(1))
    manifest = ModelTensors.of_module(model).manifest
    return cut(manifest, run_config(chunk_elements=chunk), ())


class Site:
    """A relay's pushes of one fragment and their verdicts, as its core and its loop go about them."""

    def __init__(self, wire: str, seed: int = 0) -> None:
        self.layout, self.wire = a_layout(), wire
        self.residuals, self.unsettled = Residuals(), Unsettled("north")
        self.residuals.lay_out(self.layout)
        self._dice = torch.Generator().manual_seed(seed)
        self._numbers = iter(range(1, 1 << 20))
        self.meant, self.counted = self.zeros(), self.zeros()

    @property
    def spans(self) -> list[ChunkSpan]:
        part = self.layout.fragments[0]
        return [span for span in part.spans if span.segment is Segment.PARAMETERS]

    def zeros(self) -> dict[int, Tensor]:
        return {span.index: torch.zeros(span.elements) for span in self.spans}

    def sends(self) -> tuple[Push, FlatState, FlatState]:
        """A mean of few significant bits, so that each sum is exact; returns what is sent as well."""
        part = self.layout.fragments[0]
        mean = Mean(part, self.wire)
        for span in part.spans:
            values = torch.randint(-64, 65, (span.elements,), generator=self._dice) / 16
            mean.put(span, values)
        assert mean.is_whole
        push = Push(b"", next(self._numbers), 0, part.chunks, self.wire)
        sent = self.residuals.joined(push.push_id, mean.state)
        self.unsettled.sent(push)
        for index in range(part.chunks):
            sent.chunk(index)
        return push, mean.state, sent

    def is_counted(
        self, mean: FlatState, sent: FlatState, *, chunks: Collection[int] | None = None
    ) -> None:
        """A version counts these chunks of what was sent; without `chunks`, all of them."""
        for span in self.spans:
            if chunks is not None and span.index not in chunks:
                continue
            self.meant[span.index] += mean.vectors[span.segment][span.start : span.stop]
            self.counted[span.index] += decode_chunk(span, sent.chunk(span.index), self.wire)

    def is_refused(self, push: Push) -> None:
        self.unsettled.refused(push)
        self.residuals.forget(push.push_id)

    def abandons(self, push: Push) -> None:
        self.residuals.abandoned(push.push_id)
        for each in self.unsettled.abandoned(push):
            self.residuals.forget(each)

    def hears(self, *pushes: Push) -> None:
        """A version that names these."""
        ledger = Ledger()
        for push in pushes:
            ledger = ledger.with_contents({"north": push.push_id})
        self.hears_ledger(ledger)

    def hears_ledger(self, ledger: Ledger) -> None:
        version = VersionId(RUN, next(self._numbers), 7)
        released = Released(0, version, ledger)
        size = self.layout.fragments[0].chunks
        self.residuals.settle(version, 0, self.unsettled.found(released, size))
        for each in self.unsettled.missed(released):
            self.residuals.forget(each)

    @property
    def is_kept(self) -> bool:
        """Whether what was meant is what was counted and what is left, to the bit."""
        left = self.zeros() | self.residuals.of(0)
        return all(torch.equal(self.meant[at], self.counted[at] + left[at]) for at in self.meant)


@pytest.mark.parametrize("wire", ["int8", "int4", "int4z", "top64"])
def test_what_was_meant_is_what_was_counted_and_what_is_left(wire: str) -> None:
    site, dice = Site(wire), random.Random(wire)
    fates = ["counts", "counts", "is refused", "is abandoned", "counts later", "counts meanwhile"]
    for _ in range(60):
        push, mean, sent = site.sends()
        match dice.choice(fates):
            case "counts":
                site.is_counted(mean, sent)
                site.hears(push)
            case "is refused":
                site.is_refused(push)
            case "is abandoned":
                site.abandons(push)
                site.hears()
            case "counts meanwhile":
                site.abandons(push)
                after, mean_after, sent_after = site.sends()
                site.is_counted(mean, sent)
                site.hears(push)
                assert site.is_kept
                site.is_counted(mean_after, sent_after)
                site.hears(push, after)
            case "counts later":
                site.abandons(push)
                after, mean_after, sent_after = site.sends()
                site.is_counted(mean, sent)
                site.is_counted(mean_after, sent_after)
                site.hears(push, after)
        if dice.random() < 0.2:
            site.residuals.lay_out(a_layout())  # another life of the site
        assert site.is_kept


@pytest.mark.parametrize("is_abandoned", [False, True])
def test_chunk_to_which_an_earlier_push_contributed_keeps_its_residual(is_abandoned: bool) -> None:
    site = Site("int4")
    first, *told = site.sends()
    site.is_counted(*told)
    site.hears(first)
    push, mean, sent = site.sends()
    if is_abandoned:
        site.abandons(push)
    every, earlier = Bitmap.full(push.chunks), Bitmap(push.chunks)
    earlier.add(0)
    added = every - earlier
    site.is_counted(mean, sent, chunks=frozenset(added))
    site.hears_ledger(Ledger().with_push("north", push.push_id, every, added))
    assert site.is_kept


def test_push_that_is_not_named_leaves_the_residual() -> None:
    site = Site("int4")
    first, *told = site.sends()
    site.is_counted(*told)
    site.hears(first)
    before = {at: values.clone() for at, values in site.residuals.of(0).items()}
    site.sends()
    site.hears()
    assert all(torch.equal(values, before[at]) for at, values in site.residuals.of(0).items())


def test_abandoned_pushes_are_looked_for_in_a_few_versions_and_no_more_of_them_kept() -> None:
    site = Site("int4")
    pushes = [site.sends()[0] for _ in range(MOST_ABANDONED + 3)]
    for push in pushes:
        site.abandons(push)
    dropped = site.residuals._by_fragment[0].dropped
    assert list(dropped) == [push.push_id for push in pushes[-MOST_ABANDONED:]]
    for _ in range(VERSIONS_LOOKED_AT):
        assert dropped
        site.hears()
    assert not dropped
    assert not site.residuals._sent


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_nothing_is_left_out_of_what_travels_in_more_bits(wire: str) -> None:
    site = Site(wire)
    push, mean, sent = site.sends()
    assert sent is mean
    site.hears(push)
    assert not site.residuals.of(0)


def test_what_few_bits_left_out_is_given_up_where_more_take_their_place() -> None:
    site = Site("int4")
    push, *_ = site.sends()
    site.hears(push)
    assert site.residuals.of(0)
    site.wire = "bf16"
    push, *_ = site.sends()
    site.hears(push)
    assert not site.residuals.of(0)
