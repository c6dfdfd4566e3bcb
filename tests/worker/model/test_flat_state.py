"""The model as flat vectors: the manifest, the delta in wire form, putting values back, rebasing."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from diloco_protocol import Kind, Manifest, Segment, TensorEntry, UsageError, lay_out
from diloco_protocol.chunks import FragmentLayout
from diloco_protocol.dtypes import span_bytes
from diloco_protocol.tensors.codecs import segment_dtype
from diloco_worker.model import encoding
from diloco_worker.model.encoding import Delta
from diloco_worker.model.flat_state import FlatState
from diloco_worker.model.merging import Change
from diloco_worker.model.model_tensors import ModelTensors

# From one element a chunk to more than the model has; 7 divides nothing.
CHUNK_SIZES = [1, 7, 64, 524_288]


class Tied(nn.Module):
    """Tied weights, BatchNorm (float and integer buffers), a bool buffer, a frozen layer, fp64."""

    mask: Tensor

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6, dtype=dtype)
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.wide = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.scalar = nn.Parameter(torch.randn(()))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("scratch", torch.zeros(5), persistent=False)
        self.head = nn.Linear(6, 11, bias=False, dtype=dtype)
        self.head.weight = self.embedding.weight


def model(dtype: torch.dtype = torch.float32, seed: int = 0) -> Tied:
    torch.manual_seed(seed)
    return Tied(dtype)


def moved(base: nn.Module, by: float = 0.1, seed: int = 1) -> nn.Module:
    """A copy with other floats and larger integers."""
    other = copy.deepcopy(base)
    torch.manual_seed(seed)
    with torch.no_grad():
        for tensor in other.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(by * torch.randn_like(tensor))
            elif tensor.dtype is not torch.bool:
                tensor.add_(3)
    return other


def layouts(
    tensors: ModelTensors, chunk_elements: int = 64
) -> tuple[FragmentLayout, FragmentLayout]:
    layout = lay_out(tensors.manifest, chunk_elements=chunk_elements)
    return layout.fragments[0], layout.frozen


def opened(made: nn.Module, chunk_elements: int = 64) -> tuple[ModelTensors, FragmentLayout]:
    """The tensors of a model, and the layout of its trained part."""
    tensors = ModelTensors.of_module(made)
    return tensors, layouts(tensors, chunk_elements)[0]


def captured(made: nn.Module, chunk_elements: int = 64) -> FlatState:
    tensors, part = opened(made, chunk_elements)
    return tensors.capture(part)


def delta_of(started: nn.Module, reached: nn.Module, wire: str, chunk_elements: int = 64) -> Delta:
    return ModelTensors.of_module(reached).delta(captured(started, chunk_elements), wire)


def received(wire: FlatState, dtype: str) -> FlatState:
    """The fp32 and int64 vectors that a peer decodes from a push."""
    state = FlatState.empty(wire.layout)
    for vector in state.vectors.values():
        vector.fill_(-99)
    for span in reversed(wire.layout.spans):
        payload = bytearray(wire.chunk(span.index))
        assert len(payload) == span_bytes(span, dtype)
        state.store(span.index, memoryview(payload), dtype)
    return state


def test_manifest_follows_state_dict_and_lists_tied_weights_once() -> None:
    entries = ModelTensors.of_module(model()).manifest.entries
    assert [entry.name for entry in entries] == [
        name for name in model().state_dict() if name != "head.weight"
    ]
    by_name = {entry.name: entry for entry in entries}
    assert by_name["embedding.weight"].aliases == ("head.weight",)
    assert by_name["scalar"].shape == ()
    assert by_name["wide"].dtype == "float64"
    assert "scratch" not in by_name
    assert by_name["embedding.weight"].kind is Kind.TRAINABLE
    assert by_name["frozen.weight"].kind is Kind.FROZEN
    assert by_name["norm.running_mean"].kind is Kind.BUFFER
    assert by_name["norm.num_batches_tracked"].kind is Kind.BUFFER
    twins = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    twins["b"].load_state_dict(twins["a"].state_dict())
    manifest = ModelTensors.of_module(twins).manifest
    assert [entry.aliases for entry in manifest.entries] == [()] * 4


def with_odd(tensor: Tensor) -> nn.Module:
    made = nn.Linear(2, 2)
    made.register_buffer("odd", tensor)
    return made


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: nn.Linear(2, 2).requires_grad_(False), "no trainable parameters"),
        (lambda: with_odd(torch.zeros(2, dtype=torch.complex64)), "odd"),
        (lambda: nn.Linear(2, 2, device="meta"), r"weight is on the meta device.*to_empty"),
        (lambda: nn.Sequential(nn.LazyLinear(2)), r"0\.weight belongs to a Lazy module"),
        (lambda: with_odd(torch.ones(1).expand(3)), "odd was made by expand"),
    ],
)
def test_unusable_model_is_refused_by_name(make: Callable[[], nn.Module], names: str) -> None:
    with pytest.raises(UsageError, match=names):
        ModelTensors.of_module(make())


@pytest.mark.parametrize("chunk_elements", CHUNK_SIZES)
@pytest.mark.parametrize("wire", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_delta_is_global_minus_local(dtype: torch.dtype, wire: str, chunk_elements: int) -> None:
    started = model(dtype)
    reached = moved(started)
    delta = delta_of(started, reached, wire, chunk_elements)
    assert delta.bad is None
    peer = received(delta.wire, wire)
    before, after = started.state_dict(), reached.state_dict()
    squares = 0.0
    for place in delta.wire.layout.places:
        name = place.entry.name
        if place.segment is not Segment.PARAMETERS:
            assert torch.equal(peer.of(place), after[name].to(peer.of(place).dtype)), "a value"
            continue
        difference = before[name].float() - after[name].float()
        squares += float((difference.double() ** 2).sum())
        travelled = difference.to(segment_dtype(place.segment, wire)).float()
        assert torch.equal(peer.of(place), travelled), name
    assert delta.norm == pytest.approx(squares**0.5, rel=1e-5)


def test_delta_of_a_transposed_parameter_is_laid_out_row_by_row() -> None:
    plain = nn.Linear(3, 4, bias=False)
    plain.weight = nn.Parameter(torch.arange(12.0).reshape(3, 4).T)
    assert not plain.weight.is_contiguous()
    tensors, part = opened(plain)
    zeros = FlatState(part, {Segment.PARAMETERS: torch.zeros(12)})
    peer = received(tensors.delta(zeros, "fp32").wire, "fp32")
    assert torch.equal(peer.of(part.places[0]), -plain.weight.detach())
    target = copy.deepcopy(plain)
    nn.init.zeros_(target.weight)
    ModelTensors.of_module(target).put(tensors.capture(part))
    assert torch.equal(target.weight, plain.weight)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["scalar", "embedding.weight", "norm.running_var"])
def test_non_finite_value_is_found_and_named(name: str, value: float) -> None:
    started = model()
    reached = moved(started)
    with torch.no_grad():
        reached.state_dict()[name].view(-1)[-1] = value
    assert delta_of(started, reached, "bf16").bad == name


def test_overflow_in_the_wire_dtype_is_found_too() -> None:
    started = model()
    reached = copy.deepcopy(started)
    with torch.no_grad():
        reached.scalar.add_(1e5)  # finite in fp32, above the largest fp16
    assert [delta_of(started, reached, wire).bad for wire in ("fp16", "bf16")] == ["scalar", None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_captured_values_put_into_another_model_make_it_equal(dtype: torch.dtype) -> None:
    source, target = model(dtype, seed=1), model(dtype, seed=2)
    optimizer = torch.optim.SGD([p for p in target.parameters() if p.requires_grad], lr=0.1)
    held = [p.data_ptr() for group in optimizer.param_groups for p in group["params"]]
    source.state_dict()["norm.num_batches_tracked"].fill_(7)
    source.mask.logical_not_()
    tensors = ModelTensors.of_module(source)
    for part in layouts(tensors):
        ModelTensors.of_module(target).put(tensors.capture(part))
    for name, value in source.state_dict().items():
        got = target.state_dict()[name]
        # fp64 travels as fp32.
        assert torch.equal(got, value.float().to(value.dtype)), name
        assert got.dtype == value.dtype
    assert target.head.weight is target.embedding.weight
    assert held == [p.data_ptr() for p in target.parameters() if p.requires_grad]


def test_putting_values_works_under_autograd_and_keeps_gradients() -> None:
    made = model()
    torch.autograd.backward(made.scalar * 2)
    grad = made.scalar.grad
    ModelTensors.of_module(made).put(captured(model(seed=5)))
    assert made.scalar.grad is grad
    assert made.scalar.requires_grad


def test_replaced_buffer_is_found_and_named_if_its_shape_changed() -> None:
    made = model()
    tensors, part = opened(made)
    made.norm.running_mean = torch.full((6,), 4.0)
    place = next(p for p in part.places if p.entry.name == "norm.running_mean")
    assert torch.equal(tensors.capture(part).of(place), torch.full((6,), 4.0))
    made.norm.running_mean = torch.zeros(7)
    with pytest.raises(UsageError, match=r"norm\.running_mean is float32\[7\]"):
        tensors.capture(part)


def test_dict_of_tensors_serves_as_a_model() -> None:
    manifest = Manifest((TensorEntry("w", (3,), "float32", Kind.TRAINABLE),))
    state = {"w": torch.arange(3.0)}
    tensors = ModelTensors.of_state(manifest, state)
    part, _ = layouts(tensors)
    assert torch.equal(tensors.capture(part).vectors[Segment.PARAMETERS], torch.arange(3.0))
    with pytest.raises(UsageError, match="'w'"):
        ModelTensors.of_state(manifest, {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rebase_keeps_the_steps_made_since_the_anchor(dtype: torch.dtype) -> None:
    anchor_model = model(dtype)
    local = moved(anchor_model, by=0.01, seed=3)
    new_model = moved(anchor_model, by=1.0, seed=4)
    tensors, part = opened(local)
    expected: dict[str, Tensor] = {}
    for place in part.places:
        name = place.entry.name
        at_freeze, now, fresh = (
            made.state_dict()[name].to(torch.float64) for made in (anchor_model, local, new_model)
        )
        expected[name] = fresh + (now - at_freeze)
        if place.segment is Segment.BUFFERS:  # between local and new
            ends = torch.minimum(now, fresh), torch.maximum(now, fresh)
            expected[name] = expected[name].clamp(*ends)
    tensors.bring_in(Change(captured(new_model), origin=captured(anchor_model)))
    for name, value in expected.items():
        got = local.state_dict()[name]
        tolerance = 1e-6 if got.dtype is not torch.bfloat16 else 2e-2
        torch.testing.assert_close(got.double(), value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.5, 1.0])
def test_blend_weighs_local_and_new_values_in_fp32(dtype: torch.dtype, alpha: float) -> None:
    local = torch.tensor([1.0, -3.0, 1000.0], dtype=dtype)
    fresh = torch.tensor([2.0, 0.1, 1001.0])
    tensors, part = single(local)
    tensors.bring_in(Change(FlatState(part, {Segment.PARAMETERS: fresh}), alpha))
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    before = torch.tensor([1.0, -3.0, 1000.0], dtype=wide)
    assert torch.equal(local, torch.lerp(before, fresh.to(wide), 1 - alpha).to(dtype))


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_blend_takes_new_integers_and_mixes_float_buffers(alpha: float) -> None:
    made = nn.BatchNorm1d(2)
    tensors, part = opened(made)
    made.get_buffer("num_batches_tracked").fill_(7)
    held = tensors.capture(part).vectors
    new = FlatState(part, {segment: torch.full_like(v, 5) for segment, v in held.items()})
    tensors.bring_in(Change(new, alpha))
    assert made.get_buffer("num_batches_tracked") == 5
    assert made.get_buffer("running_mean").tolist() == [5 * (1 - alpha)] * 2


def test_blend_with_an_anchor_never_lowers_a_counter_below_the_new_value() -> None:
    made = nn.BatchNorm1d(2)
    tensors, part = opened(made)
    counter = made.get_buffer("num_batches_tracked")
    counter.fill_(7)
    anchor = tensors.capture(part)
    new = FlatState(part, {s: torch.full_like(v, 20) for s, v in anchor.vectors.items()})
    counter.fill_(9)
    tensors.bring_in(Change(new, 0.5, anchor))
    assert counter == 22
    counter.fill_(3)
    tensors.bring_in(Change(new, 0.5, anchor))
    assert counter == 20


def single(tensor: Tensor) -> tuple[ModelTensors, FragmentLayout]:
    """A model of one tensor."""
    name = str(tensor.dtype).removeprefix("torch.")
    manifest = Manifest((TensorEntry("w", tuple(tensor.shape), name, Kind.TRAINABLE),))
    tensors = ModelTensors.of_state(manifest, {"w": tensor})
    return tensors, layouts(tensors)[0]


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e25], ids=str)
def test_norm_of_a_delta_is_right_also_where_squares_do_not_fit_in_fp32(size: float) -> None:
    values = size * torch.randn(1000, generator=torch.Generator().manual_seed(3))
    manifest = Manifest((TensorEntry("w", (1000,), "float32", Kind.TRAINABLE),))
    layout = lay_out(manifest).fragments[0]
    delta = encoding.encode(layout, {"w": values}, "bf16")
    assert delta.bad is None
    assert delta.norm == pytest.approx(float(values.double().norm()), rel=1e-4)
