"""The dict that a script saves of a worker: its counters, and the state to resume from, as plain values.

Texts, numbers, lists, dicts and tensors, so `torch.load(..., weights_only=True)` reads it. Ids of 64
bits are hexadecimal texts. Base tensors are copies; those of an in-flight push are shared, since they
are never written to.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from diloco_protocol import (
    Kind,
    Ledger,
    Manifest,
    RunConfig,
    Segment,
    TensorEntry,
    UsageError,
    VersionId,
)
from diloco_protocol.bitmap import Bitmap
from diloco_protocol.chunks import FragmentLayout
from diloco_protocol.dtypes import is_quantized, least_bytes, span_bytes
from diloco_protocol.manifest import differences, summarise
from diloco_protocol.messages import BUFFERS, Push
from diloco_protocol.ranges import MOST
from diloco_protocol.tensors.codecs import segment_dtype
from diloco_protocol.version import as_hex, from_hex
from diloco_worker.model.checksums import differing
from diloco_worker.model.feedback import InFewBits
from diloco_worker.model.flat_state import FlatState
from diloco_worker.model.model_tensors import ModelTensors
from diloco_worker.model.spread.saved_share import states_in
from diloco_worker.model.spread.shares import overlaps, piece_name, tensor_name
from diloco_worker.session.compatibility import Terms, cut
from diloco_worker.session.downloads import Held
from diloco_worker.session.news import Work
from diloco_worker.sync.fragment import Dropped, InFlight, TrainingBase
from diloco_worker.sync.merge import DeltaValues, SavedFeedback
from diloco_worker.sync.metrics import SyncMetrics
from diloco_worker.sync.schedule import SchedulePlace


@dataclass(frozen=True)
class SavedFragment:
    """The training state of one fragment."""

    base: TrainingBase
    values: FlatState  # of the base
    delta: DeltaValues | None = None  # of the in-flight push, if there is one
    feedback: SavedFeedback | None = None  # where deltas are quantized


@dataclass(frozen=True)
class Resumption:
    """What a worker resumes from."""

    worker_id: str
    terms: Terms
    place: SchedulePlace
    frozen: Held | None  # the version of the frozen parameters, if any
    fragments: tuple[SavedFragment, ...]  # in order
    # By name, of the pieces of the model's tensors (`model.checksums`).
    checksums: Mapping[str, tuple[int, ...]]

    @property
    def held(self) -> dict[int, Held]:
        """By fragment, the held versions."""
        held = {
            part.fragment: Held(each.base.version, each.base.ledger)
            for part, each in zip(self.terms.layout.fragments, self.fragments, strict=True)
        }
        if self.frozen is not None:
            held[self.terms.layout.frozen.fragment] = self.frozen
        return held

    @property
    def states(self) -> dict[int, FlatState]:
        """By fragment, the values of these versions; the model has the frozen ones."""
        return {each.values.layout.fragment: each.values for each in self.fragments}

    @property
    def moment(self) -> list[Any]:
        """Plain values that identify the moment of saving."""
        bases = [each.base for each in self.fragments]
        pushes_in_flight = [base.in_flight and base.in_flight.push.push_id for base in bases]
        versions = [base.version.plain() for base in bases]
        return [self.worker_id, asdict(self.place), versions, pushes_in_flight]


def check_model(tensors: ModelTensors, sums: Mapping[str, tuple[int, ...]]) -> None:
    """Raise UsageError when this is not the model that a checkpoint with these checksums was written
    with. Its distance from the base would be pushed as trained.
    """
    names = differing(tensors, sums)
    if names:
        compared = len({tensor_name(name) for name in sums})
        raise UsageError(
            "The model is not as it was when this worker's state was taken: "
            f"{len(names)} of {compared} tensors differ ({summarise(names)}); load "
            "the model's own checkpoint of that moment before the worker starts."
        )


# The layout below; other numbers are refused.
FORMAT = 2

Plain = dict[str, Any]
Vectors = Mapping[str, Tensor]  # by segment

logger = logging.getLogger("diloco.worker")


@dataclass(frozen=True)
class Saved:
    """A loaded dict."""

    counters: SyncMetrics
    step: int  # optimizer steps so far
    cycle_start: int  # those when the cycle began
    counts: dict[str, int]  # reported tokens and samples
    plain: object  # what the resumption was read from
    resumption: Resumption | None  # None where the dict has only counters

    @classmethod
    def of(
        cls, state: Mapping[str, Any] | Sequence[Mapping[str, Any]], tensors: ModelTensors | None
    ) -> Saved:
        """Read a dict, or those that all processes of a worker saved.

        `tensors`: None for a worker without a server. Raises UsageError for a dict that is not one of
        ours, or of another model.
        """
        states = [state] if isinstance(state, Mapping) else list(state)
        if not states:
            raise UsageError("This is not the state of a DiLoCoWorker: the list is empty.")
        state = states[0]
        try:
            metrics = dict(state["metrics"])
            if "rounds" in metrics:  # the name until `round` meant that of the run alone
                metrics["pushes"] = metrics.pop("rounds")
            counters = SyncMetrics(**metrics)
            step, cycle_start = int(state["local_step"]), int(state.get("cycle_start", 0))
            saved = [each["resume"] for each in states if each.get("resume") is not None]
            plains = [plain for each in saved for plain in states_in(each)]
            counts = _counts(states, plains, tensors)
            _check_range(step, *counts.values(), *counters.values())
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise UsageError(f"This is not the state of a DiLoCoWorker: {error!r}.") from None
        resumption = None
        if plains and tensors is not None:
            resumption = from_saved(plains, tensors)
            if not 0 <= cycle_start <= step:
                raise UsageError(
                    f"This is not the state of a DiLoCoWorker: its cycle began at step {cycle_start}, "
                    f"and it is at step {step}."
                )
        carried = saved[0] if len(saved) == 1 else {n: s for each in saved for n, s in each.items()}
        return cls(counters, step, cycle_start, counts, carried or None, resumption)

    def resumption_of(self, chosen_id: str | None) -> Resumption | None:
        """What a worker resumes from. It needs its former id, by which its pushes are known; an id that
        the script chose stays.
        """
        resumption = self.resumption
        if resumption is None or chosen_id in (None, resumption.worker_id):
            return resumption
        logger.warning(
            "The state is that of worker %r, this one is %r: it takes over the counters, and begins "
            "with the run's parameters. Give it the same worker_id to resume.",
            resumption.worker_id,
            chosen_id,
        )
        return None


def _counts(
    states: Sequence[Mapping[str, Any]], plains: Sequence[Any], tensors: ModelTensors | None
) -> dict[str, int]:
    """The tokens and samples that this process resumes with.

    Those of all processes together are those of the worker. With the states of all, or that of a worker
    of one process, the leader counts them.
    """
    is_shared = bool(plains) and all(
        isinstance(each, Mapping) and "share" in each for each in plains
    )
    given = [each["counts"] for each in plains] if is_shared else states
    counts = {
        "tokens": sum(int(each["tokens"]) for each in given),
        "samples": sum(int(each.get("samples", 0)) for each in given),
    }
    is_own = is_shared and len(plains) == 1
    return counts if is_own or tensors is None or tensors.leads else dict.fromkeys(counts, 0)


def _check_range(*numbers: object) -> None:
    """Raise ValueError for a count that does not fit into a message."""
    for each in numbers:
        if isinstance(each, int) and not 0 <= each <= MOST:
            raise ValueError(f"{each:.6g} is not a count")


# The state as plain values. Versions, ledgers and ids are written as `diloco_protocol.version` does for
# files.

_OF_WORK = ("steps", "tokens", "samples")
_OF_PUSH = ("wire_dtype", *_OF_WORK, "loss", "norm")
_OF_IN_FLIGHT = ("began", "apply_at", "wait_at")


def to_plain(resumption: Resumption, manifest: Manifest) -> Plain:
    """A dict for a checkpoint."""
    frozen = resumption.frozen
    return {
        "format": FORMAT,
        "model": [
            [e.name, list(e.shape), e.dtype, e.kind.value, list(e.aliases)]
            for e in manifest.entries
        ],
        "config": asdict(resumption.terms.config),
        "plan": list(resumption.terms.plan),
        "worker_id": resumption.worker_id,
        "place": asdict(resumption.place),
        "frozen": None if frozen is None else frozen.version.plain(),
        "fragments": [_plain_fragment(each) for each in resumption.fragments],
        "checksums": {name: list(sums) for name, sums in resumption.checksums.items()},
    }


def _plain_fragment(fragment: SavedFragment) -> Plain:
    base, feedback = fragment.base, fragment.feedback
    gains = () if feedback is None else [feedback.dropped[each.push_id] for each in base.dropped]
    return {
        "version": base.version.plain(),
        "ledger": base.ledger.plain(in_hex=True),
        "base": _vectors_of(fragment.values, copy=True),
        **{name: getattr(base.work, name) for name in _OF_WORK},
        "flight": _plain_push(base.in_flight, fragment.delta),
        "dropped": [
            {
                "push_id": as_hex(each.push_id),
                "versions": each.versions,
                "may_count": each.may_count.to_bytes().hex(),
            }
            for each in base.dropped
        ],
        "residual": None if feedback is None else _vectors_of(feedback.residual),
        "gains": [_vectors_of(each) for each in gains],
    }


def _plain_push(in_flight: InFlight | None, delta: DeltaValues | None) -> Plain | None:
    """Its vectors are not copied, since they are never written to."""
    if in_flight is None:
        return None
    assert delta is not None
    push, wire = in_flight.push, delta.wire
    return {
        "push_id": as_hex(push.push_id),
        "base": in_flight.base.plain(),
        **{name: getattr(push, name) for name in _OF_PUSH},
        **{name: getattr(in_flight, name) for name in _OF_IN_FLIGHT},
        "let_go": in_flight.is_detached,
        "wire": _vectors_of(wire),
        "frozen": None if delta.frozen is None else _vectors_of(delta.frozen),
        "anchor": None if delta.anchor is None else _vectors_of(delta.anchor),
        # By chunk, the bytes of those that are quantized: another machine may round a scale otherwise.
        "codes": _codes_of(wire) if isinstance(wire, InFewBits) else None,
        "buffers": push.buffers,
    }


def _codes_of(wire: InFewBits) -> Vectors:
    return {
        str(span.index): torch.frombuffer(bytearray(wire.chunk(span.index)), dtype=torch.uint8)
        for span in wire.layout.spans
        if span.segment is Segment.PARAMETERS
    }


def _vectors_of(state: FlatState, *, copy: bool = False) -> Vectors:
    """The flat vectors of a state on the host."""
    return {s.value: vector.to("cpu", copy=copy) for s, vector in state.vectors.items()}


def from_saved(plains: Sequence[Any], tensors: ModelTensors) -> Resumption:
    """Read what `to_plain` wrote, in each process of a worker, for this model. Copies base tensors.

    Raises:
        UsageError: it belongs to another model or release, or is incomplete.
    """
    try:
        return _resumption(plains, tensors)
    except KeyError as error:
        raise UsageError(f"This is not the state of a DiLoCoWorker: it lacks {error}.") from None
    except UsageError:
        raise
    except Exception as error:  # noqa: BLE001  malformed values raise all kinds of errors
        text = f"{error!s:.300}".removesuffix(".")
        raise UsageError(f"This is not the state of a DiLoCoWorker: {text}.") from None


def _resumption(plains: Sequence[Any], tensors: ModelTensors) -> Resumption:
    first = plains[0]
    if first["format"] != FORMAT:
        raise UsageError(
            f"The worker's state has format {first['format']!r}, this release reads {FORMAT}; resume "
            "with the release that wrote it."
        )
    entries = (
        TensorEntry(name, tuple(shape), dtype, Kind(kind), tuple(aliases))
        for name, shape, dtype, kind, aliases in first["model"]
    )
    clauses = differences(tensors.manifest, Manifest(tuple(entries)))
    if clauses:
        raise UsageError(
            f"The worker's state is of another model than this one: {summarise(clauses)}."
        )
    config, plan = RunConfig(**first["config"]), tuple(first["plan"])
    layout = cut(tensors.manifest, config, plan)
    tensors.set_layout(layout)
    state = tensors.part_of(plains, layout)
    place = SchedulePlace(**{name: int(value) for name, value in state["place"].items()})
    if not 0 <= place.slot < config.num_fragments <= place.sync_every:
        raise ValueError(f"slot {place.slot} of {config.num_fragments} in {place.sync_every} steps")
    fragments = tuple(
        _fragment(part, tensors.share_of(part), each, pinned=tensors.pins)
        for part, each in zip(layout.fragments, state["fragments"], strict=True)
    )
    frozen = Held(VersionId.from_plain(state["frozen"]), Ledger()) if layout.frozen.chunks else None
    names: Iterable[str] = state["checksums"]  # without those that another process saved
    if "share" not in state:
        names = [
            piece_name(place.entry.name, low, high)
            for part in layout.fragments
            for _, place, low, high in overlaps(part)
        ]
    return Resumption(
        str(state["worker_id"]),
        Terms(config, plan, layout),
        place,
        frozen,
        fragments,
        checksums={name: tuple(map(int, state["checksums"][name])) for name in names},
    )


def _fragment(
    part: FragmentLayout, share: FragmentLayout, saved: Plain, *, pinned: bool
) -> SavedFragment:
    """`share`: this process's share of it."""
    values = FlatState.empty(share, pinned=pinned)
    for segment, vector in _vectors(share, saved["base"], "fp32").items():
        values.vectors[segment].copy_(vector)
    in_flight = delta = None
    if saved["flight"] is not None:
        in_flight, delta = _in_flight(part, saved["flight"]), _delta(share, saved["flight"])
    dropped = tuple(
        Dropped(
            from_hex(each["push_id"]),
            Bitmap.from_bytes(bytes.fromhex(each["may_count"]), part.chunks),
            int(each["versions"]),
        )
        for each in saved["dropped"]
    )
    version, ledger = VersionId.from_plain(saved["version"]), Ledger.from_plain(saved["ledger"])
    work = Work(*(int(saved[name]) for name in _OF_WORK))
    base = TrainingBase(version, ledger, work, in_flight, dropped)
    return SavedFragment(base, values, delta, _feedback(share, saved, dropped))


def _feedback(
    share: FragmentLayout, saved: Plain, dropped: Sequence[Dropped]
) -> SavedFeedback | None:
    if saved["residual"] is None:
        return None
    of = replace(share, lengths={Segment.PARAMETERS: share.lengths[Segment.PARAMETERS]})
    residual, *gains = (
        FlatState(share, _vectors(of, given, "fp32"))
        for given in (saved["residual"], *saved["gains"])
    )
    pushes = [each.push_id for each in dropped]
    return SavedFeedback(residual, dict(zip(pushes, gains, strict=True)))


def _in_flight(part: FragmentLayout, saved: Plain) -> InFlight:
    push = Push(
        session=b"",
        push_id=from_hex(saved["push_id"]),
        fragment=part.fragment,
        chunks=part.chunks,
        base=VersionId.from_plain(saved["base"]),
        buffers=BUFFERS,
        **{name: saved[name] for name in _OF_PUSH},
    )
    moments: Plain = {name: int(saved[name]) for name in _OF_IN_FLIGHT}
    return InFlight(push, **moments, is_detached=bool(saved["let_go"]))


def _delta(share: FragmentLayout, saved: Plain) -> DeltaValues:
    dtype = saved["wire_dtype"]
    wire = _vectors(share, saved["wire"], dtype)

    def copy_of(given: Vectors | None) -> FlatState | None:
        return None if given is None else FlatState(share, _vectors(share, given, "fp32"))

    state = FlatState(share, wire, dtype)
    if is_quantized(dtype):
        state = InFewBits(share, wire, dtype, {}, _codes(share, saved["codes"] or {}, dtype))
    return DeltaValues(state, copy_of(saved["frozen"]), copy_of(saved["anchor"]))


def _codes(share: FragmentLayout, given: Vectors, dtype: str) -> dict[int, memoryview]:
    """The bytes of each chunk."""
    found = {}
    for name, code in given.items():
        span = share.spans[int(name)]
        payload = code.detach().cpu().contiguous().numpy().data
        if not least_bytes(span, dtype) <= payload.nbytes <= span_bytes(span, dtype):
            raise ValueError(f"chunk {name} has {payload.nbytes} bytes")
        found[span.index] = payload
    return found


def _vectors(share: FragmentLayout, given: Vectors, dtype: str) -> dict[Segment, Tensor]:
    """Flat tensors on the host by segment, of the right length and dtype."""
    found = {}
    for segment, length in share.lengths.items():
        if not length:
            continue
        vector, wanted = given[segment.value], segment_dtype(segment, dtype)
        if tuple(vector.shape) != (length,) or vector.dtype != wanted:
            raise ValueError(
                f"{segment.value} is {vector.dtype}{list(vector.shape)}, not {wanted}[{length}]"
            )
        found[segment] = vector.detach().cpu().contiguous()
    return found
