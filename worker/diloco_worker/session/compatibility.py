"""Whether a worker can train in a run as the broker describes it, and how the model is cut. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diloco_protocol import Code, Manifest, ModelLayout, ProtocolError, RunConfig, Segment
from diloco_protocol.chunks import CHUNK_ELEMENTS, MOST_CHUNKS, lay_out_plan
from diloco_protocol.dtypes import REPLY_DTYPES, WIRE_DTYPES
from diloco_protocol.fragments import FragmentPlan
from diloco_protocol.messages import BUFFERS, MERGES, MODES, WEIGHTS, Welcome

# Seconds between heartbeats by default.
HEARTBEAT_S = 30.0
# A lower bound, since a broker may ask for too many.
LEAST_HEARTBEAT_S = 0.005
# Must be the same after a restart of the broker: chunks in flight are numbered, and deltas merged, by
# it.
FIXED = (
    "mode",
    "num_fragments",
    "fragment_sync_delay",
    "fragment_update_alpha",
    "fragment_merge",
    "fragment_max_delay",
    "chunk_elements",
)
OTHER_PLAN = (
    "The broker came back with another plan of fragments than this worker trains with; restart the "
    "worker, or the broker with its old options."
)


@dataclass(frozen=True)
class Terms:
    """The terms on which a worker trains."""

    config: RunConfig
    # The fragment of each manifest entry, as the broker told it; () if P is 1.
    plan: tuple[int, ...]
    layout: ModelLayout


class OnTerms:
    """Something that knows the terms once the worker has joined."""

    terms: Terms | None = None

    @property
    def config(self) -> RunConfig | None:
        return self.terms.config if self.terms else None

    @property
    def layout(self) -> ModelLayout | None:
        return self.terms.layout if self.terms else None


def check_welcome(
    manifest: Manifest,
    welcome: Welcome,
    earlier: Terms | None,
    *,
    asked_interval: float | None,
    asked_sync_every: int | None,
) -> Terms:
    """The terms of a welcome; raises ProtocolError where this worker cannot train on them.

    `earlier`: the terms so far. The asked values are None where the user did not set them.
    """
    config, plan = welcome.config, welcome.plan
    problem = (
        _why_silence_fails(config, asked_interval)
        or why_unsound(config, manifest)
        or _why_incompatible(config, earlier, asked_sync_every)
        or (OTHER_PLAN if earlier is not None and plan != earlier.plan else None)
    )
    if problem is not None:
        raise ProtocolError(Code.CONFIG_DIFFERS, problem)
    layout = cut(manifest, config, plan) if earlier is None else earlier.layout
    has_buffers = any(part.lengths[Segment.BUFFERS] for part in layout.fragments)
    if has_buffers and config.buffers != BUFFERS:
        raise ProtocolError(
            Code.CONFIG_DIFFERS,
            f"This worker sends float buffers as {BUFFERS}, the broker takes them as "
            f"{config.buffers:.20}; install the same release at both ends.",
        )
    return Terms(config, plan, layout)


def _why_silence_fails(config: RunConfig, asked_interval: float | None) -> str | None:
    """Why the broker would drop this worker for the user's heartbeat interval."""
    tolerated = config.heartbeat_timeout
    if asked_interval == 0 and tolerated > 0:
        return (
            f"The broker drops workers that are silent for {tolerated:g} s, and this one has "
            "heartbeat_interval 0; leave it out, or start the broker with --heartbeat-timeout 0."
        )
    if asked_interval is not None and 0 < tolerated <= asked_interval:
        return (
            f"heartbeat_interval is {asked_interval:g} s, but the broker drops workers that are "
            f"silent for {tolerated:g} s; choose at most a third of that."
        )
    return None


def why_unsound(config: RunConfig, manifest: Manifest) -> str | None:
    """Which value this release cannot follow, as a sentence; None where there is none."""
    known = {
        "wire_dtype": config.wire_dtype in WIRE_DTYPES,
        "reply_dtype": config.reply_dtype in REPLY_DTYPES,
        "weight_by": config.weight_by in WEIGHTS,
        "feedback_decay": 0 <= config.feedback_decay <= 1,
        "fragment_update_alpha": 0 <= config.fragment_update_alpha <= 1,
        "chunk_elements": 0 < config.chunk_elements <= CHUNK_ELEMENTS
        and sum(entry.elements for entry in manifest.entries)
        <= MOST_CHUNKS * config.chunk_elements,
    }
    for name, is_known in known.items():
        if not is_known:
            return (
                f"The run has {name} {getattr(config, name)!r:.40}, which this release of the worker "
                "cannot follow; install the release that the broker has."
            )
    return None


def _why_incompatible(
    config: RunConfig, earlier: Terms | None, asked_sync_every: int | None
) -> str | None:
    """Why this worker cannot train in the run, as a sentence; None when it can."""
    if config.mode not in MODES or config.fragment_merge not in MERGES:
        return (
            f"The run has mode {config.mode!r} and merges by {config.fragment_merge!r}, this release "
            f"of the worker knows the modes {', '.join(MODES)} and the merges {', '.join(MERGES)}; "
            "install the release that the broker has."
        )
    steps = sync_every(config, asked_sync_every, None)
    if not 0 < config.num_fragments <= steps:
        return (
            f"sync_every is {steps} and the run has {config.num_fragments} fragments, which "
            "need a step each; use a larger sync_every, or fewer fragments at the broker."
        )
    difference = None if earlier is None else changed(earlier, config)
    if difference is None:
        return None
    name, ours, theirs = difference
    return (
        f"The broker came back with {name} {theirs}, this worker trains with {ours}; "
        "restart the worker, or the broker with its old options."
    )


def changed(
    earlier: Terms, config: RunConfig, plan: tuple[int, ...] | None = None
) -> tuple[str, object, object] | None:
    """The first thing that must not change and did: its name, the old and the new value."""
    for name in FIXED:
        ours, theirs = _told(earlier.config, name), _told(config, name)
        if ours != theirs:
            return name, ours, theirs
    if plan is None or plan == earlier.plan:
        return None
    return "the plan of fragments", list(earlier.plan), list(plan)


def _told(config: RunConfig, name: str) -> object:
    """A field of the run's configuration as the options name it."""
    if name == "fragment_sync_delay" and config.fragment_delay_auto:
        return "auto"
    return getattr(config, name)


def cut(manifest: Manifest, config: RunConfig, plan: Sequence[int]) -> ModelLayout:
    """Cut a model as the broker does; raises ProtocolError for a plan that does not fit it.

    `plan` is the fragment of each manifest entry, in order; empty where P is 1.
    """
    is_split = config.num_fragments > 1
    if is_split:
        FragmentPlan.from_numbers(manifest, plan, config.num_fragments)  # raises
    return lay_out_plan(
        manifest,
        plan if is_split else (),
        num_fragments=config.num_fragments,
        chunk_elements=config.chunk_elements,
    )


def sync_every(config: RunConfig, own: int | None, worked_out: int | None) -> int:
    """H in use: the worker's own, the broker's for this worker, or the run's.

    In a run with rounds an own H is never above the run's, which an operator may lower: the others
    would wait.
    """
    if own is not None:
        return own if config.mode == "async" else min(own, config.sync_every)
    return config.sync_every if worked_out is None or not config.dylu else worked_out


def gives_way(config: RunConfig, own: int | None) -> str | None:
    """A sentence where the run's H replaces the worker's own; else None."""
    runs = config.sync_every
    if own is None or own == sync_every(config, own, None):
        return None
    return f"This worker asks for sync_every={own}, the run has {runs} now; {runs} is used."


def heartbeat_interval(config: RunConfig, asked: float | None) -> float:
    """Seconds between heartbeats; 0 = none."""
    if asked is not None:
        return asked
    if config.heartbeat_timeout > 0:
        return max(LEAST_HEARTBEAT_S, min(HEARTBEAT_S, config.heartbeat_timeout / 3))
    return HEARTBEAT_S
