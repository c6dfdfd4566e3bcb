"""The dict that a script keeps of a worker: its counters, and what it resumes from as plain values.

Only texts, numbers, lists, dicts and tensors: `torch.load(..., weights_only=True)` reads it. Ids of 64
bits are hexadecimal texts. Base tensors are copies; those of an in-flight push are shared,
since they are never written to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from diloco_protocol.chunks import FragmentLayout, ModelLayout
from diloco_protocol.dtypes import in_few_bits, least_bytes, span_bytes
from diloco_protocol.manifest import differences, summarise
from diloco_protocol.messages import BUFFERS, Push
from diloco_protocol.ranges import MOST
from diloco_protocol.records import from_plain as record_of
from diloco_protocol.tensors.codecs import segment_dtype
from diloco_protocol.version import as_hex, from_hex
from diloco_worker.model.checksums import differing
from diloco_worker.model.feedback import InFewBits
from diloco_worker.model.flat_state import FlatState
from diloco_worker.model.model_tensors import ModelTensors
from diloco_worker.model.spread.saved_share import states_in
from diloco_worker.model.spread.shares import overlaps, piece_name, tensor_name
from diloco_worker.session.compatibility import Terms, cut, why_unsound
from diloco_worker.session.downloads import Held
from diloco_worker.session.news import Work
from diloco_worker.sync.fragment import Dropped, InFlight, TrainingBase
from diloco_worker.sync.merge import DeltaValues, SavedFeedback
from diloco_worker.sync.metrics import SyncMetrics
from diloco_worker.sync.schedule import SchedulePlace


@dataclass(frozen=True)
class SavedFragment:
    """One fragment as training stands on it."""

    base: TrainingBase
    values: FlatState  # of the base
    delta: DeltaValues | None = None  # of the in-flight push, if there is one
    feedback: SavedFeedback | None = None  # where deltas travel in few bits


@dataclass(frozen=True)
class Resumption:
    """What a worker goes on from."""

    worker_id: str
    terms: Terms  # how the run was trained and the model cut
    place: SchedulePlace  # in the cycle of slots and the sequence of rounds
    frozen: Held | None  # the version of the frozen parameters, where there are any
    fragments: tuple[SavedFragment, ...]  # in order
    # Of the pieces of the model's tensors, by name (`model.checksums`).
    checksums: Mapping[str, tuple[int, ...]]

    @property
    def held(self) -> dict[int, Held]:
        """By fragment, the versions that are held."""
        held = {
            part.fragment: Held(each.base.version, each.base.ledger)
            for part, each in zip(self.terms.layout.fragments, self.fragments, strict=True)
        }
        if self.frozen is not None:
            held[self.terms.layout.frozen.fragment] = self.frozen
        return held

    @property
    def states(self) -> dict[int, FlatState]:
        """By fragment, the values of these versions; frozen ones are in the model."""
        return {each.values.layout.fragment: each.values for each in self.fragments}

    @property
    def moment(self) -> list[Any]:
        """Plain values that no other moment of any worker has."""
        bases = [each.base for each in self.fragments]
        pushes_in_flight = [base.in_flight and base.in_flight.push.push_id for base in bases]
        versions = [base.version.plain() for base in bases]
        return [self.worker_id, asdict(self.place), versions, pushes_in_flight]

    def check_model(self, tensors: ModelTensors) -> None:
        """Raise UsageError when this is not the model that the checkpoint was written with.

        Its distance from the base would be pushed as if it had been trained.
        """
        names = differing(tensors, self.checksums)
        if names:
            compared = len({tensor_name(name) for name in self.checksums})
            raise UsageError(
                "The model is not as it was when this worker's state was taken: "
                f"{len(names)} of {compared} tensors differ ({summarise(names)}); load "
                "the model's own checkpoint of that moment before the worker starts."
            )


# Of this layout; another number is refused with a sentence.
FORMAT = 2

Plain = dict[str, Any]

logger = logging.getLogger("diloco.worker")


@dataclass(frozen=True)
class Saved:
    """A dict that was loaded."""

    counters: SyncMetrics
    step: int  # optimizer steps so far
    cycle_start: int  # those when the cycle began
    counts: dict[str, int]  # what was reported: tokens, samples
    plain: object  # what the resumption was made of
    resumption: Resumption | None  # what to go on from; None where the dict has only counters

    @classmethod
    def of(
        cls, state: Mapping[str, Any] | Sequence[Mapping[str, Any]], tensors: ModelTensors | None
    ) -> Saved:
        """Read a dict, or those that all processes of a worker have saved.

        A worker without a server has no tensors of a model that is to go on.

        Raises:
            UsageError: it is not one of ours, or of another model.
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
            resumption = from_plain(plains, tensors)
            if not 0 <= cycle_start <= step:
                raise UsageError(
                    f"This is not the state of a DiLoCoWorker: its cycle began at step {cycle_start}, "
                    f"and it is at step {step}."
                )
        carried = saved[0] if len(saved) == 1 else {n: s for each in saved for n, s in each.items()}
        return cls(counters, step, cycle_start, counts, carried or None, resumption)

    def resumption_of(self, chosen_id: str | None) -> Resumption | None:
        """What a worker goes on from. It needs the id that it had: its pushes are known by it.

        Where the script has chosen an id for it, it keeps that.
        """
        resumption = self.resumption
        if resumption is None or chosen_id in (None, resumption.worker_id):
            return resumption
        logger.warning(
            "The state is that of worker %r, this one is %r: it takes over the counters, and begins "
            "with the run's parameters. Give it the same worker_id to go on.",
            resumption.worker_id,
            chosen_id,
        )
        return None


def _counts(
    states: Sequence[Mapping[str, Any]], plains: Sequence[Any], tensors: ModelTensors | None
) -> dict[str, int]:
    """The tokens and samples that this process goes on with.

    Those of all processes together are those of the worker. So where it is given the states of all, or
    that of a worker of one, the process that leads counts them.
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
    """Raise ValueError for a count that no message has room for."""
    for each in numbers:
        if isinstance(each, int) and not 0 <= each <= MOST:
            raise ValueError(f"{each:.6g} is not a count")


# To plain values.


def to_plain(resumption: Resumption, manifest: Manifest) -> Plain:
    """A dict for a checkpoint."""
    fragments = [
        {
            "version": each.base.version.plain(),
            "ledger": each.base.ledger.plain(in_hex=True),
            "base": vectors_of(each.values, copy=True),
            "steps": each.base.work.steps,
            "tokens": each.base.work.tokens,
            "samples": each.base.work.samples,
            "flight": _plain_in_flight(each.base.in_flight, each.delta),
            "dropped": [
                {
                    "push_id": as_hex(of.push_id),
                    "may_count": of.may_count.to_bytes().hex(),
                    "versions": of.versions,
                }
                for of in each.base.dropped
            ],
            **vectors_of_feedback(each.feedback, [of.push_id for of in each.base.dropped]),
        }
        for each in resumption.fragments
    ]
    checksums = resumption.checksums
    assert checksums is not None
    frozen = resumption.frozen
    return {
        "format": FORMAT,
        "worker_id": resumption.worker_id,
        "model": [
            [e.name, list(e.shape), e.dtype, e.kind.value, list(e.aliases)]
            for e in manifest.entries
        ],
        "config": asdict(resumption.terms.config),
        "plan": list(resumption.terms.plan),
        "place": asdict(resumption.place),
        "frozen": None if frozen is None else frozen.version.plain(),
        "fragments": fragments,
        "checksums": {name: list(sums) for name, sums in checksums.items()},
    }


def _plain_in_flight(in_flight: InFlight | None, delta: DeltaValues | None) -> Plain | None:
    if in_flight is None:
        return None
    assert delta is not None
    push = in_flight.push
    return {
        "push_id": as_hex(push.push_id),
        "base": in_flight.base.plain(),
        **{name: getattr(push, name) for name in _OF_PUSH},
        **{name: getattr(in_flight, name) for name in _OF_IN_FLIGHT},
        "let_go": in_flight.is_detached,
        "buffers": push.buffers,
        **vectors_of_delta(delta),
    }


_OF_PUSH = ("wire_dtype", "steps", "tokens", "samples", "loss", "norm")
_OF_IN_FLIGHT = ("began", "apply_at", "wait_at")


def vectors_of_delta(delta: DeltaValues) -> dict[str, dict[str, Tensor] | None]:
    """Those of an in-flight push, which nobody ever writes to; of chunks in few bits the bytes."""
    found = {"wire": delta.wire, "frozen": delta.frozen, "anchor": delta.anchor}
    made = {name: None if s is None else vectors_of(s) for name, s in found.items()}
    wire = delta.wire
    made["codes"] = _codes_of(wire) if isinstance(wire, InFewBits) else None
    return made


def _codes_of(wire: InFewBits) -> dict[str, Tensor]:
    """By chunk. They are kept, since another machine may round a scale otherwise."""
    indexes = [span.index for span in wire.layout.spans if span.segment is Segment.PARAMETERS]
    return {
        str(index): torch.frombuffer(bytearray(wire.chunk(index)), dtype=torch.uint8)
        for index in indexes
    }


def vectors_of_feedback(feedback: SavedFeedback | None, dropped: Sequence[int]) -> dict[str, Any]:
    """The residual, and what it gains by chunks of these dropped pushes (ids), in this order."""
    if feedback is None:
        return {"residual": None, "gains": []}
    gains = [vectors_of(feedback.dropped[push_id]) for push_id in dropped]
    return {"residual": vectors_of(feedback.residual), "gains": gains}


def vectors_of(state: FlatState, *, copy: bool = False) -> dict[str, Tensor]:
    """The flat vectors of a state, by segment, on the host."""
    return {s.value: vector.to("cpu", copy=copy) for s, vector in state.vectors.items()}


# From plain values.


def from_plain(plains: Sequence[object], tensors: ModelTensors) -> Resumption:
    """Read what `to_plain` has written, in each process of a worker, for this model.

    Base tensors are copied.

    Raises:
        UsageError: it is of another model or release, or not whole.
    """
    try:
        return _resumption([_dict(each) for each in plains], tensors)
    except KeyError as error:
        raise UsageError(f"This is not the state of a DiLoCoWorker: it lacks {error}.") from None
    except UsageError:
        raise
    except Exception as error:  # noqa: BLE001  tensors of all kinds raise all kinds of errors
        raise UsageError(f"This is not the state of a DiLoCoWorker: {error!s:.300}.") from None


def _resumption(plains: list[Plain], tensors: ModelTensors) -> Resumption:
    plain = plains[0]
    if plain["format"] != FORMAT:
        raise UsageError(
            f"The worker's state has format {plain['format']!r}, this release reads {FORMAT}; go on "
            "with the release that wrote it."
        )
    clauses = differences(tensors.manifest, _manifest(plain["model"]))
    if clauses:
        raise UsageError(
            f"The worker's state is of another model than this one: {summarise(clauses)}."
        )
    told = asdict(RunConfig(**_dict(plain["config"])))  # what a newer release has told is unknown
    config = record_of(RunConfig, told, "config")
    unsound = why_unsound(config, tensors.manifest)
    if unsound is not None:
        raise ValueError(unsound.removesuffix("."))
    plan = tuple(_whole(number) for number in plain["plan"])
    layout = cut(tensors.manifest, config, plan)
    tensors.set_layout(layout)
    plain = tensors.part_of(plains, layout)
    place = SchedulePlace(**{name: _whole(value) for name, value in _dict(plain["place"]).items()})
    if not 0 <= place.slot < config.num_fragments <= place.sync_every:
        raise ValueError(f"slot {place.slot} of {config.num_fragments} in {place.sync_every} steps")
    pinned = tensors.pins
    parts = [_dict(each) for each in plain["fragments"]]
    if len(parts) != len(layout.fragments):
        raise ValueError(f"{len(parts)} fragments instead of {len(layout.fragments)}")
    fragments = tuple(
        _fragment(part, tensors.share_of(part), each, pinned=pinned)
        for part, each in zip(layout.fragments, parts, strict=True)
    )
    frozen = Held(VersionId.from_plain(plain["frozen"]), Ledger()) if layout.frozen.chunks else None
    runs = {each.base.version.run for each in fragments}
    if len(runs | ({frozen.version.run} if frozen else set())) > 1:
        raise ValueError(f"fragments of several runs, {', '.join(sorted(runs))}")
    return Resumption(
        worker_id=_text(plain["worker_id"]),
        terms=Terms(config, plan, layout),
        place=place,
        frozen=frozen,
        fragments=fragments,
        checksums=_checksums(plain, layout),
    )


def _checksums(plain: Plain, layout: ModelLayout) -> dict[str, tuple[int, ...]]:
    given = _dict(plain["checksums"])
    names: Iterable[str] = given  # of what another process has saved there are none here
    if "share" not in plain:
        names = [
            piece_name(place.entry.name, low, high)
            for part in layout.fragments
            for _, place, low, high in overlaps(part)
        ]
    return {name: tuple(_whole(each) for each in given[name]) for name in names}


def _fragment(
    part: FragmentLayout, share: FragmentLayout, plain: Plain, *, pinned: bool
) -> SavedFragment:
    """`share` is what this process has of it."""
    values = FlatState.empty(share, pinned=pinned)
    for segment, vector in _vectors(share, plain["base"], "fp32").items():
        values.vectors[segment].copy_(vector)
    work = Work(*(_whole(plain[name]) for name in ("steps", "tokens", "samples")))
    in_flight = delta = None
    if plain["flight"] is not None:
        in_flight = _in_flight(part, _dict(plain["flight"]))
        delta = _delta(values, _dict(plain["flight"]), in_flight.push.wire_dtype)
    version, ledger = VersionId.from_plain(plain["version"]), Ledger.from_plain(plain["ledger"])
    dropped = tuple(
        Dropped(
            from_hex(each["push_id"]),
            _may_count(each.get("may_count"), part.chunks),
            _whole(each["versions"]),
        )
        for each in plain["dropped"]
    )
    base = TrainingBase(version, ledger, work, in_flight, dropped)
    return SavedFragment(base, values, delta, _feedback(share, plain, dropped))


def _may_count(plain: object, size: int) -> Bitmap:
    """The chunks of a dropped push that may count; every one where a state does not say."""
    return (
        Bitmap.full(size) if plain is None else Bitmap.from_bytes(bytes.fromhex(_text(plain)), size)
    )


def _feedback(
    share: FragmentLayout, plain: Plain, dropped: Sequence[Dropped]
) -> SavedFeedback | None:
    if plain.get("residual") is None:
        return None

    def read(given: object) -> FlatState:
        of = replace(share, lengths={Segment.PARAMETERS: share.lengths[Segment.PARAMETERS]})
        return FlatState(share, _vectors(of, given, "fp32"))

    gains = zip(dropped, plain["gains"], strict=True)
    return SavedFeedback(
        read(plain["residual"]), {each.push_id: read(given) for each, given in gains}
    )


def _in_flight(part: FragmentLayout, plain: Plain) -> InFlight:
    counts: Plain = {name: _whole(plain[name]) for name in ("steps", "tokens", "samples")}
    told = [(name, plain[name]) for name in ("loss", "norm")]
    figures: Plain = {name: None if value is None else float(value) for name, value in told}
    push = Push(
        session=b"",
        push_id=from_hex(plain["push_id"]),
        fragment=part.fragment,
        chunks=part.chunks,
        wire_dtype=_text(plain["wire_dtype"]),
        base=VersionId.from_plain(plain["base"]),
        **counts,
        **figures,
        buffers=BUFFERS,
    )
    moments = {name: _whole(plain[name]) for name in ("began", "apply_at", "wait_at")}
    return InFlight(push, **moments, is_detached=bool(plain["let_go"]))


def _delta(base: FlatState, plain: Plain, dtype: str) -> DeltaValues:
    part = base.layout
    wire = _vectors(part, plain["wire"], dtype)

    def copy_of(name: str) -> FlatState | None:
        given = plain[name]
        return None if given is None else FlatState(part, _vectors(part, given, "fp32"))

    state = FlatState(part, wire, dtype)
    if in_few_bits(dtype):
        state = InFewBits(part, wire, dtype, {}, _codes(part, plain.get("codes") or {}, dtype))
    return DeltaValues(state, copy_of("frozen"), copy_of("anchor"))


def _codes(part: FragmentLayout, given: Mapping[str, Any], dtype: str) -> dict[int, memoryview]:
    """The bytes of each chunk; those that a state of an older release lacks are encoded anew."""
    found = {}
    for name, code in given.items():
        span = part.spans[int(name)]
        payload = code.detach().cpu().contiguous().numpy().data
        if not least_bytes(span, dtype) <= payload.nbytes <= span_bytes(span, dtype):
            raise ValueError(f"chunk {name} has {payload.nbytes} bytes")
        found[span.index] = payload
    return found


def _vectors(part: FragmentLayout, plain: object, dtype: str) -> dict[Segment, Tensor]:
    """Flat tensors on the host by segment, of the right length and dtype."""
    given, found = _dict(plain), {}
    for segment, length in part.lengths.items():
        if not length:
            continue
        vector, wanted = given[segment.value], segment_dtype(segment, dtype)
        if not isinstance(vector, Tensor):
            raise TypeError(f"{segment.value} is a {type(vector).__name__}, not a tensor")
        if tuple(vector.shape) != (length,) or vector.dtype != wanted:
            raise ValueError(
                f"{segment.value} is {vector.dtype}{list(vector.shape)}, not {wanted}[{length}]"
            )
        found[segment] = vector.detach().cpu().contiguous()
    return found


def _manifest(plain: Sequence[Any]) -> Manifest:
    return Manifest(
        tuple(
            TensorEntry(name, tuple(shape), dtype, Kind(kind), tuple(aliases))
            for name, shape, dtype, kind, aliases in plain
        )
    )


def _of(kind: type, what: str) -> Callable[[object], Any]:
    def check(value: object) -> Any:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TypeError(f"{value!r:.60} is not {what}")
        return value

    return check


_whole = _of(int, "a whole number")
_text = _of(str, "a text")
_dict = _of(Mapping, "a dict")
