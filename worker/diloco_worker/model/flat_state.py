"""The model as flat vectors on the host: capturing it, the delta in wire form, putting values back.

A version is fp32, whatever the model is. A model in bf16 or fp16 holds it rounded (`held`), so that is
what every difference from a version is measured from: else its rounding would be sent as if it had been
trained, and progress of less than half an ulp would be taken back round by round.

Each fragment has up to three vectors (protocol/README.md, section 3): parameters in fp32, float buffers
in fp32, integers in int64. Memory of a worker, in units of the fp32 parameters: the global parameters
it started from (1), the delta in wire dtype (1/2 with bf16), and the version that is arriving (1).

With parameters on a CUDA device the vectors lie in pinned memory: copies are queued on the current
stream of the calling thread, behind the training kernels, and waited for before the host looks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from diloco_protocol import Code, Kind, Manifest, ProtocolError, Segment, TensorEntry, UsageError
from diloco_protocol.chunks import ChunkSpan, FragmentLayout, Place
from diloco_protocol.codecs import (
    as_bytes,
    from_bytes,
    is_finite,
    segment_dtype,
    wire_dtype,
)
from diloco_protocol.dtypes import span_bytes
from diloco_protocol.manifest import summarise
from diloco_protocol.tensor_pool import Buffers, mapped
from diloco_worker.model.merging import Change, wait_for_copies
from diloco_worker.model.model_watch import ModelWatch

# Elements handled at a time: two fp32 pieces of this size stay in a core's second-level cache.
PIECE_ELEMENTS = 1 << 17


@dataclass(frozen=True)
class FlatState:
    """The values of one fragment: a flat vector for each segment that is not empty.

    Attributes:
        layout: where each tensor lies.
        vectors: fp32 for parameters and buffers, int64 for integers; contiguous, on the CPU.
    """

    layout: FragmentLayout
    vectors: Mapping[Segment, Tensor]

    @classmethod
    def empty(cls, layout: FragmentLayout, *, pinned: bool = False) -> FlatState:
        """Room for a fragment, not initialised."""
        vectors = {
            segment: _room(length, segment_dtype(segment, torch.float32), pinned=pinned)
            for segment, length in layout.lengths.items()
            if length
        }
        return cls(layout, vectors)

    def of(self, place: Place) -> Tensor:
        """The values of one tensor, in its shape: a view."""
        return self.vectors[place.segment][place.start : place.stop].view(place.entry.shape)

    def held(self, place: Place) -> Tensor:
        """The same as a model holds them: rounded to its dtype. A view where that changes nothing."""
        return held(self.of(place), place.entry)

    def store(self, index: int, payload: memoryview, wire: str) -> None:
        """Decode one received chunk into its place.

        Args:
            index: number of the chunk.
            payload: its bytes; `require_length` has checked how many.
            wire: the wire dtype that parameters travel in.
        """
        span = self.layout.spans[index]
        values = from_bytes(payload, segment_dtype(span.segment, wire_dtype(wire)))
        self.vectors[span.segment][span.start : span.stop].copy_(values)

    def by_name(self) -> dict[str, Tensor]:
        """The values of each tensor, in its shape: views."""
        return {place.entry.name: self.of(place) for place in self.layout.places}

    def wire(self) -> WireFragment:
        """These values as they are, fp32, for a donation; shares this memory."""
        return WireFragment(self.layout, self.vectors)

    def norm(self) -> float:
        """Euclidean length of the parameters."""
        vector = self.vectors.get(Segment.PARAMETERS)
        return 0.0 if vector is None else float(torch.linalg.vector_norm(vector))


@dataclass(frozen=True)
class WireFragment:
    """What a push sends: one vector for each segment, in the dtype it travels in. Never changed."""

    layout: FragmentLayout
    vectors: Mapping[Segment, Tensor]

    def chunk(self, index: int) -> memoryview:
        """The bytes of one chunk, without a copy."""
        span = self.layout.spans[index]
        return as_bytes(self.vectors[span.segment][span.start : span.stop])

    def taken_from(self, base: FlatState) -> FlatState:
        """Where the model was when this was frozen: what it held of `base` minus this, rounded."""
        state = FlatState.empty(self.layout)
        for place in self.layout.places:
            vector = self.vectors[place.segment][place.start : place.stop].view(place.entry.shape)
            if place.segment is Segment.PARAMETERS:
                torch.sub(base.held(place), vector, out=state.of(place))
            else:
                state.of(place).copy_(vector)
        return state


@dataclass(frozen=True)
class Delta:
    """A frozen pseudo-gradient in wire form.

    Attributes:
        wire: global minus local; of buffers and integers the local values.
        norm: Euclidean length of the parameters' part, before rounding to the wire dtype.
        bad: a tensor that has NaN or infinity after encoding; None when all values are finite.
    """

    wire: WireFragment
    norm: float
    bad: str | None


def require_length(span: ChunkSpan, payload: memoryview, wire: str) -> None:
    """Raise ProtocolError unless a chunk has the bytes that its place in the model needs."""
    wanted = span_bytes(span, wire)
    if payload.nbytes != wanted:
        text = f"chunk {span.index} has {payload.nbytes} bytes instead of {wanted}."
        raise ProtocolError(Code.BAD_CHUNK, text)


class ModelTensors:
    """The tensors of a model, by the manifest's names.

    Args:
        manifest: names, shapes, dtypes.
        lookup: returns the tensors as they are now, by name. It is asked each time, since a module
            may replace a buffer.
        watch: notices that the model is another one than that of the manifest.
    """

    def __init__(
        self,
        manifest: Manifest,
        lookup: Callable[[], Mapping[str, Tensor]],
        watch: ModelWatch | None = None,
    ) -> None:
        self.manifest = manifest
        self.watch = watch
        self._lookup = lookup
        self._buffers = Buffers()

    @classmethod
    def of_module(cls, model: nn.Module) -> ModelTensors:
        """The tensors of a module's `state_dict`; raises UsageError when they cannot be exchanged."""
        module = getattr(model, "_orig_mod", model)  # what torch.compile wraps
        if not isinstance(module, nn.Module):
            raise UsageError(f"The model is a {type(model).__name__}; it must be an nn.Module.")
        return cls(_manifest_of(module), lambda: _live_tensors(module), ModelWatch(module))

    @classmethod
    def of_state(cls, manifest: Manifest, state: Mapping[str, Tensor]) -> ModelTensors:
        """Tensors in a dict, for a model that is no nn.Module."""
        _require_sound(manifest)
        tensors = cls(manifest, lambda: state)
        tensors._checked(tuple(manifest.entries))
        return tensors

    @property
    def is_on_cuda(self) -> bool:
        """Whether any tensor of the model lies on a CUDA device."""
        return _on_cuda(self._lookup().values())

    def live(self) -> Iterator[tuple[TensorEntry, Tensor]]:
        """Each entry of the manifest with its tensor as it is now.

        Raises:
            UsageError: when a tensor is not what the manifest says any more.
        """
        found = self._checked(self.manifest.entries)
        return ((entry, found[entry.name].detach()) for entry in self.manifest.entries)

    def capture(self, layout: FragmentLayout) -> FlatState:
        """Copy a fragment's values to the host.

        Raises:
            UsageError: when a tensor is not what the manifest says any more.
        """
        live = self._live(layout)
        state = FlatState.empty(layout, pinned=_on_cuda(live.values()))
        self._copy_out(live, state)
        return state

    @torch.no_grad()
    def distance(self, base: FlatState) -> float:
        """Euclidean length of what separates the model's parameters from these."""
        live = self._live(base.layout)
        squares = 0.0
        for place in base.layout.places:
            if place.segment is Segment.PARAMETERS:
                apart = live[place.entry.name].detach().to("cpu", torch.float32, copy=True)
                squares += float(torch.linalg.vector_norm(apart.sub_(base.of(place)))) ** 2
        return math.sqrt(squares)

    def delta(self, base: FlatState, dtype_name: str, scratch: FlatState | None = None) -> Delta:
        """Global minus local of a fragment, encoded; the model is only read.

        Args:
            base: the global values that training started from, rounded to the model's dtypes.
            dtype_name: wire dtype of parameters, by name.
            scratch: room that may be overwritten, used when the model is on a CUDA device.

        Raises:
            UsageError: when a tensor is not what the manifest says any more.
        """
        layout = base.layout
        live = self._live(layout)
        if _on_cuda(live.values()):
            # One queue of copies and one wait, instead of a wait for each piece.
            staging = scratch if scratch is not None else FlatState.empty(layout, pinned=True)
            self._copy_out(live, staging)
            live = staging.by_name()
        return self.encode(layout, live, dtype_name, base)

    def encode(
        self,
        layout: FragmentLayout,
        tensors: Mapping[str, Tensor],
        dtype_name: str,
        base: FlatState | None = None,
    ) -> Delta:
        """`encode` into memory that no earlier delta is sent from any more."""
        return encode(layout, tensors, wire_dtype(dtype_name), base, self._buffers.take)

    def bring_in(self, change: Change) -> None:
        """Change the model's own tensors, so that the optimizer's references stay valid.

        When this returns the host memory of the change may be used again. What it raises breaks the
        change off: called again, it goes on with the tensors that are left.
        """
        change.carry_out(self._live(change.new.layout))

    def put(self, state: FlatState) -> None:
        """Copy values into the model."""
        self.bring_in(Change(state))

    def rebase(self, new: FlatState, anchor: FlatState) -> None:
        """local <- new + (local - anchor): keep the steps made since `anchor`, on new ground.

        Integers become the larger of the new value and new + (local - anchor), as a counter would.
        Float buffers stay between the new value and the local one.
        """
        self.bring_in(Change(new, origin=anchor))

    def blend(self, new: FlatState, alpha: float, anchor: FlatState | None = None) -> None:
        """local <- alpha local + (1 - alpha) new: the merge of Streaming DiLoCo (arXiv 2501.18512).

        With an anchor the steps made since then are kept whole, on top of the merge that it would
        have been at the anchor: local <- alpha anchor + (1 - alpha) new + (local - anchor).

        Computed in fp32 (fp64 for fp64 tensors), then rounded to the tensor's dtype. Integers take the
        new value; with an anchor as in `rebase`. Float buffers stay between the new value and the local
        one.
        """
        self.bring_in(Change(new, alpha, anchor))

    def _live(self, layout: FragmentLayout) -> dict[str, Tensor]:
        return self._checked(tuple(place.entry for place in layout.places))

    def _checked(self, entries: tuple[TensorEntry, ...]) -> dict[str, Tensor]:
        tensors = self._lookup()
        found = {}
        for entry in entries:
            tensor = tensors.get(entry.name)
            if tensor is None:
                raise UsageError(f"The model has no tensor {entry.name!r} (any more).")
            if tuple(tensor.shape) != entry.shape or _dtype_name(tensor) != entry.dtype:
                raise UsageError(
                    f"{entry.name} is {_dtype_name(tensor)}{list(tensor.shape)}, the run has {entry}; "
                    "the shapes and dtypes of a model must stay as they were when it joined."
                )
            found[entry.name] = tensor
        return found

    @staticmethod
    def _copy_out(live: Mapping[str, Tensor], state: FlatState) -> None:
        for place in state.layout.places:
            tensor, target = live[place.entry.name].detach(), state.of(place)
            if tensor.is_cuda:
                # Convert on the device, so that the copy to the host can be queued.
                target.copy_(tensor.to(target.dtype), non_blocking=True)
            else:
                target.copy_(tensor)
        wait_for_copies(live)


@torch.no_grad()
def encode(
    layout: FragmentLayout,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
    base: FlatState | None = None,
    room: Callable[[int, torch.dtype], Tensor] = mapped,
) -> Delta:
    """Lay tensors out in wire form: what a model holds of `base` minus them, or they themselves.

    Buffers and integers are always taken as they are. `room` returns an uninitialised vector.
    """
    wire = {
        segment: room(length, segment_dtype(segment, dtype))
        for segment, length in layout.lengths.items()
        if length
    }
    squares = 0.0
    bad = None
    piece = torch.empty(PIECE_ELEMENTS, dtype=torch.float32)
    for place in layout.places:
        given = tensors[place.entry.name].detach().reshape(-1)
        if place.segment is not Segment.PARAMETERS:
            values = wire[place.segment][place.start : place.stop].copy_(given)
            if not is_finite(values):
                bad = bad or place.entry.name
            continue
        for start, stop in _pieces(place):
            values, local = piece[: stop - start], given[start - place.start : stop - place.start]
            if local.dtype is not torch.float32 or base is None:
                local = values.copy_(local)
            if base is not None:
                begun = held(base.vectors[place.segment][start:stop], place.entry)
                torch.sub(begun, local, out=values)
            encoded = wire[place.segment][start:stop]
            encoded.copy_(values)
            # Finite squares have finite roots, far below what bf16 can hold: no second look at them.
            square = float(torch.dot(values, values))
            is_fine = math.isfinite(square) and dtype in _WIDE
            if not is_fine and not is_finite(encoded):
                bad = bad or place.entry.name
                continue
            if not math.isfinite(square):  # large elements: fp64 has room for their squares
                square = float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
            squares += square
    return Delta(WireFragment(layout, wire), math.sqrt(squares), bad)


# Wire dtypes that reach as far as fp32.
_WIDE = (torch.float32, torch.bfloat16)


def held(values: Tensor, entry: TensorEntry) -> Tensor:
    """Values of a version (fp32) as a tensor of the model holds them, in fp32 again."""
    if entry.dtype not in _NARROW:
        return values
    return values.to(_NARROW[entry.dtype]).to(values.dtype)


# Dtypes of a model that round what is fp32.
_NARROW = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def _room(elements: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
    return (
        torch.empty(elements, dtype=dtype, pin_memory=True) if pinned else mapped(elements, dtype)
    )


def _on_cuda(tensors: Iterable[Tensor]) -> bool:
    return any(tensor.is_cuda for tensor in tensors)


def _pieces(place: Place) -> Iterator[tuple[int, int]]:
    for start in range(place.start, place.stop, PIECE_ELEMENTS):
        yield start, min(start + PIECE_ELEMENTS, place.stop)


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _live_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, tied ones under each of their names."""
    tensors: dict[str, Tensor] = dict(module.named_buffers(remove_duplicate=False))
    tensors.update(module.named_parameters(remove_duplicate=False))
    return tensors


def manifest_of(model: nn.Module) -> Manifest:
    """What a model consists of, as a run will know it: `FragmentPlan.of(manifest_of(model), 4)`.

    Raises:
        UsageError: it cannot be exchanged.
    """
    return ModelTensors.of_module(model).manifest


def _manifest_of(module: nn.Module) -> Manifest:
    live = _live_tensors(module)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    listed = {
        name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)
    }
    foreign = [name for name in listed if name not in live]
    if foreign:
        raise UsageError(
            f"The model's state_dict has {foreign[0]!r}, which is neither a parameter nor a buffer, "
            "so it could not be kept in step; remove the hook that adds it."
        )
    hidden = [n for n, p in parameters.items() if p.requires_grad and n not in listed]
    if hidden:
        raise UsageError(
            f"The parameter {hidden[0]!r} is trained but is not in the model's state_dict, so it "
            "would not be exchanged; remove the hook that hides it."
        )
    first: dict[object, str] = {}
    aliases: dict[str, list[str]] = {}
    for name in listed:
        tensor = live[name]
        _require_values_of_its_own(name, tensor)
        original = first.setdefault(_identity(tensor), name)
        if original == name:
            aliases[name] = []
        else:
            aliases[original].append(name)
    entries = []
    for name, others in aliases.items():
        tensor = live[name]
        names = (name, *others)
        tied = [parameters[each] for each in names if each in parameters]
        if any(parameter.requires_grad for parameter in tied):
            kind = Kind.TRAINABLE
        else:
            kind = Kind.FROZEN if tied else Kind.BUFFER
        entry = TensorEntry(name, tuple(tensor.shape), _dtype_name(tensor), kind, tuple(others))
        if kind is Kind.BUFFER and entry.is_floating_point and bool(torch.isinf(tensor).any()):
            entry = replace(entry, kind=Kind.FROZEN)  # a constant; see `values`
        entries.append(entry)
    manifest = Manifest(tuple(entries))
    _require_sound(manifest)
    return manifest


def _require_values_of_its_own(name: str, tensor: Tensor) -> None:
    """Raise UsageError for a tensor that values cannot be copied out of and into."""
    if is_lazy(tensor):
        raise UsageError(
            f"{name} belongs to a Lazy module and has no shape yet; run one batch through the model "
            "(and make the optimizer) before the DiLoCoWorker."
        )
    if tensor.layout is not torch.strided or tensor.is_meta:
        what = "on the meta device" if tensor.is_meta else f"in layout {tensor.layout}"
        raise UsageError(f"{name} is {what}; only dense tensors with values can be exchanged.")
    if any(size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
        raise UsageError(
            f"{name} was made by expand: several of its elements are one and the same memory, so no "
            "values can be copied into it; register its .clone(), or persistent=False if it is constant."
        )


def _identity(tensor: Tensor) -> object:
    """Equal for two names of the very same data."""
    if tensor.numel() == 0:
        return id(tensor)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def _require_sound(manifest: Manifest) -> None:
    problems = manifest.problems()
    if problems:
        raise UsageError(f"The model cannot be exchanged: {summarise(problems)}.")
