"""What a site takes over from its parent's run, and how its own work is called there."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import median_low
from typing import Any

from diloco_broker.config import BrokerConfig
from diloco_broker.config.declaration import AUTO
from diloco_broker.core.rounds.submissions import Submission
from diloco_broker.core.versions.record import FragmentRecord, Resumption, RunRecord
from diloco_protocol import messages
from diloco_protocol.dtypes import in_few_bits, whole_dtype
from diloco_protocol.manifest import Manifest
from diloco_protocol.messages import Released, RunConfig
from diloco_worker.session.compatibility import Terms


def push_of(
    chosen: list[Submission], config: RunConfig, wire_dtype: str, push_id: int
) -> messages.Push:
    """The push of a site: the mean of these, with the sum of their weights, and each of them by name."""
    pushes = [each.push for each in chosen]
    contents: dict[str, int] = {}
    for each in chosen:
        contents |= each.push.contents or {}
    contents |= {each.worker_id: each.push.push_id for each in chosen}
    tokens, samples = sum(p.tokens for p in pushes), sum(p.samples for p in pushes)
    by = {"equal": 1, "tokens": tokens, "samples": samples}[config.weight_by]
    losses = [p.loss for p in pushes if p.loss is not None and math.isfinite(p.loss)]
    bases = [p.base for p in pushes if p.base is not None]
    oldest = min(bases, key=lambda base: base.counter)
    made_from: dict[str, int] = {}
    for each in chosen:
        base = oldest if each.push.base is None else each.push.base
        own = {each.worker_id: base.counter}
        made_from |= own if each.push.contents is None else each.push.bases or {}
    return messages.Push(
        session=b"",
        push_id=push_id,
        fragment=pushes[0].fragment,
        chunks=pushes[0].chunks,
        wire_dtype=wire_dtype,
        base=oldest,
        weight=sum(each.weight for each in chosen) / by,
        steps=median_low(p.steps for p in pushes),
        tokens=tokens,
        samples=samples,
        loss=sum(losses) / len(losses) if losses else None,
        buffers=messages.BUFFERS,
        contents=contents,
        workers=sum(p.workers for p in pushes),
        bases=made_from,
    )


def why_not_here(config: RunConfig) -> str | None:
    """Why a relay cannot be in a run, as a sentence; None where it can."""
    if not config.relays:
        return "This broker takes no relays; start it with --relays (an older release has none)."
    return None


def config_of(config: BrokerConfig, told: RunConfig) -> BrokerConfig:
    """The options of the site, with what its parent says of the run; raises UsageError."""
    return replace(
        config,
        mode=told.mode,
        sync_every=told.sync_every,
        dylu=told.dylu,
        num_fragments=told.num_fragments,
        fragment_sync_delay=AUTO if told.fragment_delay_auto else told.fragment_sync_delay,
        fragment_update_alpha=told.fragment_update_alpha,
        fragment_merge=told.fragment_merge,
        fragment_max_delay=told.fragment_max_delay,
        weight_by=told.weight_by,
        reply_dtype=whole_dtype(told.reply_dtype)
        if in_few_bits(told.reply_dtype)
        else told.reply_dtype,
        chunk_elements=told.chunk_elements,
        relays=True,
        recover="rewind",
    )


def resumption(
    manifest: Manifest,
    terms: Terms,
    versions: dict[int, tuple[Released, tuple[Any, ...]]],
    parent: str,
    first_round: int,
) -> Resumption:
    """What the site begins with: the parent's versions in the place of a checkpoint's."""
    last = terms.layout.frozen.fragment
    records, wires, newest, number = {}, {}, None, first_round
    for fragment, (released, chunks) in versions.items():
        version = released.version
        records[fragment] = FragmentRecord(
            version, released.ledger, version.counter, released.round, released.averaged
        )
        wires[fragment] = chunks
        if fragment == last:
            continue
        newest = released if newest is None or released.round > newest.round else newest
        if released.averaged:  # else no round has made it
            number = max(number, released.round + 1)
    assert newest is not None, "no fragment is trained"
    record = RunRecord(
        run=newest.version.run,
        number=number,
        epoch="",
        manifest=manifest,
        plan=terms.plan,
        fragments=records,
        workers={},
        totals={},
    )
    source = f"version {newest.version} of {parent}"
    return Resumption(source, record, terms.layout, wires, newest)
