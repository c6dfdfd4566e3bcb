"""Which parameters are in which fragment, and what is due at a step."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_protocol import Code, FragmentPlan, ProtocolError, Segment, UsageError, lay_out
from diloco_protocol.fragments import PATTERNS, slots
from diloco_protocol.manifest import Kind, Manifest
from kit.manifests import MODELS, gpt2, llama, model, of_sizes, t5, tensor


def elements(manifest: Manifest, names: Sequence[str]) -> int:
    return sum(e.elements for e in manifest.entries if e.name in set(names))


def loads(manifest: Manifest, plan: FragmentPlan) -> list[int]:
    return [elements(manifest, names) for names in plan.fragments]


def modules(plan: FragmentPlan, depth: int) -> list[str]:
    """The beginnings of the names in each fragment, each once, with spaces between them."""
    return [
        " ".join(dict.fromkeys(".".join(name.split(".")[:depth]) for name in names))
        for names in plan.fragments
    ]


@pytest.mark.parametrize("num_fragments", range(1, 13))
def test_every_window_of_h_steps_has_each_fragment_once(num_fragments: int) -> None:
    """Wherever it begins, with H up to 60; slots are as far apart as can be."""
    plan = FragmentPlan.of(of_sizes([1] * num_fragments), num_fragments)
    for sync_every in range(num_fragments, 61):
        cycle = slots(sync_every, num_fragments)
        assert cycle[-1] == sync_every
        steps = [sync_every * begun + slot for begun in range(3) for slot in cycle]
        for begin in range(2 * sync_every):
            window = range(begin + 1, begin + 1 + sync_every)
            fragments = [k % num_fragments for k, step in enumerate(steps) if step in window]
            assert sorted(fragments) == list(range(num_fragments))
        first_round = sync_every * 7 % 5
        due = (plan.due(step, sync_every, first_round) for step in range(1, 3 * sync_every + 1))
        visited = [(step, fragment) for step, fragment in enumerate(due, 1) if fragment is not None]
        assert visited == [(s, (first_round + k) % num_fragments) for k, s in enumerate(steps)]
        least, most = sync_every // num_fragments, -(-sync_every // num_fragments)
        assert {b - a for a, b in pairwise(steps)} <= {least, most}


# torchvision's ViT numbers attributes; a weight that ends in a number is not a block.
VIT = Manifest(
    (
        tensor("conv_proj.weight", 4),
        *(
            tensor(f"encoder.layers.encoder_layer_{i}.{part}", 4)
            for i in range(4)
            for part in ("ln_1.weight", "mlp.0.weight", "mlp.3.weight")
        ),
        tensor("heads.head.weight_1", 4),
    )
)
HALF_FROZEN = Manifest(
    tuple(
        tensor(f"h.{i}.weight", 4, kind=Kind.FROZEN if i < 3 else Kind.TRAINABLE) for i in range(6)
    )
)
WITH_EMPTY = model(
    h__0__none=0, h__1__w=4, h__1__none=0, h__2__none=0, h__2__w=4, z__none=0, z__w=1
)
MLP = MODELS["mlp"]
# The model, how deep names are looked at, and the modules of each fragment.
SPLITS: dict[str, tuple[Manifest, str, int, str]] = {
    "blocks are dealt out, the rest is with its neighbour": (
        *(gpt2(5), "strided", 3),
        "transformer.wte.weight transformer.wpe.weight transformer.h.0 transformer.h.2 transformer.h.4 "
        "transformer.ln_f.weight transformer.ln_f.bias | transformer.h.1 transformer.h.3",
    ),
    "blocks of all lists are numbered through": (
        *(t5(3), "strided", 3),
        "shared.weight encoder.block.0 encoder.block.2 encoder.final_layer_norm.weight decoder.block.1 "
        "| encoder.block.1 decoder.block.0 decoder.block.2 decoder.final_layer_norm.weight",
    ),
    "numbered attributes are blocks": (
        *(VIT, "strided", 3),
        "conv_proj.weight encoder.layers.encoder_layer_0 encoder.layers.encoder_layer_2 | "
        "encoder.layers.encoder_layer_1 encoder.layers.encoder_layer_3 heads.head.weight_1",
    ),
    "blocks are counted, not their numbers": (
        *(MODELS["sequential"], "strided", 1),
        "0 6 | 2 8 | 4 10",
    ),
    "only blocks that are trained": (HALF_FROZEN, "strided", 2, "h.3 h.5 | h.4"),
    "modules where there are not enough blocks": (MLP, "strided", 1, "a d | b | c"),
    "and tensors where modules are too few": (
        *(MLP, "strided", 2),
        "a.weight d.weight | a.bias d.bias | b.weight | b.bias | c.weight | c.bias",
    ),
    "a list shorter than the fragments is modules": (
        *(llama(2), "strided", 3),
        "model.embed_tokens.weight model.norm.weight | model.layers.0 lm_head.weight | model.layers.1",
    ),
    "a parameter without elements goes with its neighbour": (
        *(WITH_EMPTY, "strided", 3),
        "h.0.none h.1.w h.1.none h.2.none | h.2.w z.none z.w",
    ),
    "contiguous keeps blocks whole and in order": (
        *(llama(8, vocabulary=50), "contiguous", 3),
        "model.embed_tokens.weight model.layers.0 model.layers.1 model.layers.2 | "
        "model.layers.3 model.layers.4 model.layers.5 | "
        "model.layers.6 model.layers.7 model.norm.weight lm_head.weight",
    ),
    "contiguous modules": (MLP, "contiguous", 1, "a b | c d"),
    "contiguous tensors": (MLP, "contiguous", 2, " | ".join(entry.name for entry in MLP.entries)),
}


@pytest.mark.parametrize(("manifest", "pattern", "depth", "parts"), SPLITS.values(), ids=SPLITS)
def test_pattern_splits_a_model(manifest: Manifest, pattern: str, depth: int, parts: str) -> None:
    plan = FragmentPlan.of(manifest, parts.count("|") + 1, pattern)
    assert " | ".join(modules(plan, depth)) == parts


def check_plan(manifest: Manifest, plan: FragmentPlan, num_fragments: int) -> None:
    trainable = [e.name for e in manifest.entries if e.kind is Kind.TRAINABLE]
    assert plan.num_fragments == len(plan.fragments) == num_fragments
    assert Counter(n for names in plan.fragments for n in names) == Counter(trainable)
    for number, names in enumerate(plan.fragments):
        assert names == plan.parameters(number) == tuple(n for n in trainable if n in set(names))
        assert {plan.fragment_of[name] for name in names} == {number}
    layout = lay_out(manifest, plan.fragment_of, num_fragments=num_fragments)
    assert [part.lengths[Segment.PARAMETERS] for part in layout.fragments] == loads(manifest, plan)
    assert all(part.lengths[Segment.PARAMETERS] > 0 for part in layout.fragments)
    placed = {place.entry.name: part.fragment for part in layout.all for place in part.places}
    numbers = plan.numbers(manifest)
    assert numbers == tuple(placed[e.name] for e in manifest.entries)
    assert FragmentPlan.from_numbers(manifest, numbers, num_fragments) == plan


components = st.sampled_from(["a", "b", "layers", "0", "1", "12", "x1", "weight"])
names = st.lists(components, min_size=1, max_size=4).map(".".join)
kinds = st.sampled_from([Kind.TRAINABLE, Kind.TRAINABLE, Kind.TRAINABLE, Kind.FROZEN, Kind.BUFFER])
shapes = st.lists(st.integers(0, 9), max_size=2)


@given(st.lists(names, min_size=1, max_size=25, unique=True), st.data())
def test_each_parameter_is_in_one_fragment(names: list[str], data: st.DataObject) -> None:
    drawn = (tensor(name, *data.draw(shapes), kind=data.draw(kinds)) for name in names)
    manifest = Manifest(tuple(drawn))
    deciding = sum(e.kind is Kind.TRAINABLE and e.elements > 0 for e in manifest.entries)
    num_fragments = data.draw(st.integers(1, deciding + 1))
    pattern = data.draw(st.sampled_from(list(PATTERNS)))
    if num_fragments > deciding:
        with pytest.raises(UsageError, match=f"num_fragments {num_fragments}[;, ]"):
            FragmentPlan.of(manifest, num_fragments, pattern)
    else:
        plan = FragmentPlan.of(manifest, num_fragments, pattern)
        check_plan(manifest, plan, num_fragments)
        assert plan == FragmentPlan.of(manifest, num_fragments, pattern)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.timeout(20)
def test_models_of_thousands_of_tensors_are_split_at_once(pattern: str) -> None:
    draw = random.Random(4)
    manifest = of_sizes([draw.randint(1, 10**8) for _ in range(2000)])
    sizes = loads(manifest, FragmentPlan.of(manifest, 32, pattern))
    assert max(sizes) * 32 <= 1.2 * sum(sizes)


def best_cut(sizes: Sequence[int], runs: int) -> int:
    return min(
        max(sum(sizes[a:b]) for a, b in zip((0, *ends), (*ends, len(sizes)), strict=True))
        for ends in combinations(range(1, len(sizes)), runs - 1)
    )


def test_contiguous_has_the_smallest_largest_run_of_all_cuts() -> None:
    draw = random.Random(1)
    for _ in range(2000):
        sizes = [draw.randint(1, draw.choice([2, 9, 1000])) for _ in range(draw.randint(1, 9))]
        runs = draw.randint(1, len(sizes))
        manifest = of_sizes(sizes)
        plan = FragmentPlan.of(manifest, runs, "contiguous")
        assert [n for names in plan.fragments for n in names] == [e.name for e in manifest.entries]
        assert max(loads(manifest, plan)) == best_cut(sizes, runs), (sizes, runs)


def best_partition(sizes: Sequence[int], groups: int) -> int:
    """The smallest possible largest group of all partitions into groups that are not empty."""
    best = sum(sizes)
    sums = [0] * groups

    def place(index: int) -> None:
        nonlocal best
        if index == len(sizes):
            best = min(best, max(sums) if all(sums) else best)
            return
        for group in range(groups):
            # Empty groups are all alike: only the first is tried.
            if sums[group] + sizes[index] < best and (group == 0 or sums[group - 1]):
                sums[group] += sizes[index]
                place(index + 1)
                sums[group] -= sizes[index]

    place(0)
    return best


def test_largest_balanced_fragment_is_within_a_third_of_the_best_partition() -> None:
    draw = random.Random(2)
    uneven = 0
    for _ in range(2000):
        groups, top = draw.randint(1, 5), draw.choice([8, 20, 1000])
        low = max(1, draw.choice([1, top // 3, top // 2]))
        sizes = [draw.randint(low, top) for _ in range(draw.randint(groups, 9))]
        manifest = of_sizes(sizes)
        found = loads(manifest, FragmentPlan.of(manifest, groups, "balanced"))
        largest, best = max(found), best_partition(sorted(sizes, reverse=True), groups)
        assert all(found) and largest <= (4 / 3 - 1 / (3 * groups)) * best + 1e-9, (sizes, groups)
        uneven += largest > best
    assert uneven > 100, "the bound is put to the test"


def test_balanced_breaks_ties_by_name_in_any_order_of_the_manifest() -> None:
    draw = random.Random(5)
    entries = [tensor(f"t{i:02}", 1 + i % 3) for i in range(14)]
    seen = set()
    for _ in range(20):
        draw.shuffle(entries)
        plan = FragmentPlan.of(Manifest(tuple(entries)), 4, "balanced")
        seen.add(frozenset(frozenset(names) for names in plan.fragments))
        assert plan.fragments[0][0] == entries[0].name
    assert len(seen) == 1


TWO = model(a__weight=3, b__weight=3)
HALVES = FragmentPlan.of(TWO, 2)
UNTRAINED = Manifest((tensor("w", 3, kind=Kind.FROZEN), tensor("v", 0)))


@pytest.mark.parametrize(
    ("impossible", "words"),
    [
        (lambda: slots(3, 4), "sync_every 3"),
        (lambda: slots(3, 0), "num_fragments is 0"),
        (lambda: HALVES.due(1, 1), "sync_every 1"),
        (lambda: HALVES.due(0, 8), "step is 0"),
        (lambda: FragmentPlan.of(TWO, 3), "num_fragments 2 or less"),
        (lambda: FragmentPlan.of(TWO, 0), "num_fragments is 0"),
        (lambda: FragmentPlan.of(TWO, 2, "random"), "'random'"),
        (lambda: FragmentPlan.of(UNTRAINED), "no trainable parameters"),
        (lambda: FragmentPlan.of(WITH_EMPTY, 4), "num_fragments 4"),
        (lambda: HALVES.numbers(model(a__weight=3, c__weight=3)), r"'b\.weight'"),
        (lambda: HALVES.parameters(-1), "Invalid fragment -1"),
        (lambda: HALVES.parameters(2), "Invalid fragment 2"),
    ],
)
def test_impossible_plan_names_the_values(impossible: Callable[[], object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        impossible()


@pytest.mark.parametrize(
    ("numbers", "num_fragments", "words"),
    [
        ((0, 2, 3, 0, 1), 2, "w2 "),
        ((0, 1, 1, 2), 2, "4 numbers for 5 tensors"),
        ((0, 1, 1, 2, 0, 0), 2, "6 numbers for 5 tensors"),
        ((0, 2, 1, 2, 0), 2, "w2 has the number 2"),
        ((0, -1, 1, 2, 0), 2, "w2 has the number -1"),
        ((0, 1, 0, 2, 0), 2, "mean \\(buffer\\) has the number 0"),
        ((0, 1, 1, 1, 0), 2, "ice \\(frozen\\) has the number 1"),
        ((0, 0, 1, 2, 1), 2, "fragment 1 has no trainable elements"),
        ((0, 1, 2, 3, 2), 3, "2 trainable tensor\\(s\\) cannot fill 3 fragments"),
        ((0, 0, 10**12, 0, 0), 10**12, "cannot fill 1000000000000 fragments"),
        ((0, 0, -1, 0, 0), 0, "cannot fill 0 fragments"),
    ],
)
def test_numbers_must_fit(numbers: tuple[int, ...], num_fragments: int, words: str) -> None:
    manifest = Manifest(
        (
            tensor("w1", 2),
            tensor("w2", 2),
            tensor("mean", 2, kind=Kind.BUFFER),
            tensor("ice", 2, kind=Kind.FROZEN),
            tensor("nothing", 0),
        )
    )
    with pytest.raises(ProtocolError, match=words) as refusal:
        FragmentPlan.from_numbers(manifest, numbers, num_fragments)
    assert refusal.value.code is Code.BAD_HEADER
    fitting = FragmentPlan.from_numbers(manifest, (0, 1, 1, 2, 0), 2)
    assert fitting.fragments == (("w1", "nothing"), ("w2",))
