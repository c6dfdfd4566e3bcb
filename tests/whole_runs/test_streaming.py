"""Synchronous runs over real sockets equal the single-process loop: with fragments, delays and merges.

In deterministic mode with an fp32 wire every bit agrees; the mean that takes chunks as they come agrees
within fp32 rounding. Runs quantized equal the loop with the codecs in plain Python. See `reference.py`
for the loop and `whole_run.py` for the run.
"""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch

from diloco_broker import Broker
from diloco_protocol.fragments import slots
from diloco_worker import DiLoCoWorker
from kit.process_kit import wait_for
from kit.raw_codecs import decode, encode
from kit.reference import Outer, Plan, State, Trainee, streaming
from kit.whole_run import (
    adamw,
    an_mlp,
    assert_same,
    check,
    make_config,
    options_of,
    run,
    strided,
    trainees,
)

# H for each P: not divisible by P, and floor(H / P) > tau for every tau tried.
STEPS = {1: 4, 2: 7, 3: 10}


def with_adamw(worker: int) -> Trainee:
    return an_mlp(worker, adamw)


# Each pair of number of fragments, delay and merge; and local values that are all kept.
GRID = [
    ((delay + kind) % 3 + 1, delay, alpha)
    for delay in range(3)
    for kind, alpha in enumerate((0.0, 0.25, None))
] + [(2, 1, 1.0)]


@pytest.mark.parametrize(("pieces", "delay", "alpha"), GRID)
def test_deterministic_run_equals_the_loop(pieces: int, delay: int, alpha: float | None) -> None:
    check(Plan(STEPS[pieces], strided(pieces), delay, alpha), with_adamw)


@pytest.mark.parametrize(
    ("h", "pieces", "delay", "alpha", "is_exact"), [(3, 3, 0, 0.5, True), (10, 3, 2, None, False)]
)
def test_run_of_three_workers_equals_the_loop(
    h: int, pieces: int, delay: int, alpha: float | None, is_exact: bool
) -> None:
    """Bit for bit, and within rounding where chunks are added up as they come."""
    check(Plan(h, strided(pieces), delay, alpha), workers=3, exact=is_exact)


@pytest.mark.parametrize("weight_by", ["tokens", "samples", "tokens2-per-step"])
def test_contributions_weigh_by_reports_since_the_fragment_was_last_sent(
    weight_by: str,
) -> None:
    def amount(worker: int, step: int) -> int:
        return (7 * step + 5 * worker) % 11 + 1 + 20 * worker

    def report(hook: DiLoCoWorker, worker: int, step: int) -> None:
        hook.report(**{reported: amount(worker, step)})

    reported = weight_by.removesuffix("2-per-step")
    is_squared = reported != weight_by
    plan = Plan(5, strided(2), delay=1)
    config = make_config(workers=3, deterministic=True, weight_by=weight_by, **options_of(plan))
    with Broker(config) as broker:
        got = run(broker, trainees(3), 17, before=report)
    expected = streaming(
        *(trainees(3), 17, plan),
        report=amount,
        weigh=lambda tokens, steps: tokens**2 / steps if is_squared else float(tokens),
    )
    assert_same(got, expected, exact=True)
    with pytest.raises(AssertionError):  # the weights do make a difference
        assert_same(got, streaming(trainees(3), 17, plan))


def test_on_a_fast_network_fragments_are_merged_one_step_after_their_slot() -> None:
    """By default a reply is merged when it is here: before the next step, that is tau = 1."""
    pieces = 3
    plan = Plan(STEPS[pieces], strided(pieces), delay=1, alpha=None)
    options = options_of(plan)
    del options["fragment_sync_delay"]
    sent_at = slots(plan.sync_every, pieces)

    def reply_is_here(hook: DiLoCoWorker, _: int, step: int) -> None:
        cycle, position = divmod(step, plan.sync_every)
        sent = cycle * pieces + sum(slot <= position for slot in sent_at)
        wait_for(
            lambda: hook.sync_count == sent or (hook._link is not None and hook._link.has_news)
        )

    steps = 3 * plan.sync_every + 2
    with Broker(make_config(workers=2, **options)) as broker:
        got = run(broker, trainees(2), steps, before=reply_is_here, done=merged_after_one_step)
    assert_same(got, streaming(trainees(2), steps, plan))


def merged_after_one_step(hook: DiLoCoWorker, _: int, __: int) -> None:
    metrics = hook.sync_metrics
    assert (metrics.merge_delay, metrics.late_merges) == (1, 0)


CHUNK = 300  # a block and a part of one
QUANTIZED = ["int8", "int4", "int4z"]


Read = Callable[[torch.Tensor], torch.Tensor]


class WithFeedback:
    """The deltas of all workers as the broker reads them.

    What the codec leaves out, times `decay`, goes with the next delta of the same fragment.
    """

    def __init__(self, read: Read, decay: float = 1.0) -> None:
        self.read, self.decay = read, decay
        self.residuals: dict[tuple[int, frozenset[str]], torch.Tensor] = {}

    def __call__(self, worker: int, delta: State) -> State:
        key = worker, frozenset(delta)
        flat = torch.cat([value.reshape(-1) for value in delta.values()])
        sent = self.decay * self.residuals.get(key, torch.zeros_like(flat)) + flat
        read = self.read(sent)
        self.residuals[key] = sent - read
        return cut_like(delta, read)


def cut_like(delta: State, flat: torch.Tensor) -> State:
    parts = torch.split(flat, [value.numel() for value in delta.values()])
    return {
        name: part.view_as(value) for (name, value), part in zip(delta.items(), parts, strict=True)
    }


def as_read(flat: torch.Tensor, wire: str) -> torch.Tensor:
    """A fragment's values in order, encoded in chunks and decoded."""
    read: list[float] = []
    for part in torch.split(flat, CHUNK):
        read += decode(encode(part.tolist(), wire), wire, len(part))
    return torch.tensor(read)


FRAGMENTS, REBASE = Plan(7, strided(2), 1, 0.25), Plan(7, strided(2), 2, None)


@pytest.mark.parametrize(
    ("codec", "plan"),
    [
        pytest.param("int8", Plan(3, strided(1)), id="int8-whole"),
        *(pytest.param(codec, FRAGMENTS, id=f"{codec}-fragments") for codec in QUANTIZED),
        pytest.param("int4z", REBASE, id="int4z-rebase"),
    ],
)
def test_run_quantized_both_ways_equals_the_loop_bit_for_bit(codec: str, plan: Plan) -> None:
    """All workers hold the same bits behind each version: those of the loop's one copy."""
    read = partial(as_read, wire=codec)
    check(
        plan,
        with_adamw,
        config={"wire_dtype": codec, "reply_dtype": codec, "chunk_elements": CHUNK},
        travels=WithFeedback(read),
        replies=lambda delta: WithFeedback(read)(0, delta),
    )


# SparseLoCo (Sarfi et al. 2025, arXiv 2508.15706) in plain torch, for deltas of at most 4096 elements.

KEPT, BETA, ALPHA, LAST_ALPHA, ROUNDS = 32, 0.95, 1.0, 0.65, 4


def by_halves(values: torch.Tensor) -> torch.Tensor:
    """The order of the sums that docs/codecs.md specifies."""
    return values[0] if len(values) == 1 else by_halves(torch.add(*values.chunk(2)))


def q2_of_top_k(e: torch.Tensor) -> torch.Tensor:
    """The largest elements, each replaced by its sign and one of two magnitudes."""
    at = e.abs().sort(descending=True, stable=True).indices[:KEPT].sort().values
    m = e[at].abs()
    is_larger = m >= by_halves(m / KEPT)
    s = torch.zeros_like(e)
    for group in (is_larger, ~is_larger):
        mean = by_halves(torch.where(group, m / group.sum(), 0)).bfloat16().float()
        s[at[group]] = mean * e[at[group]].sign()
    return s


def falling(_: int) -> Outer:
    """theta <- theta - alpha mean(s); alpha falls by half a cosine."""
    rounds = 0

    def step(values: State, gradient: State) -> State:
        nonlocal rounds
        along = (1 - math.cos(math.pi * min(1.0, rounds / ROUNDS))) / 2
        alpha = ALPHA * (1 + along * (LAST_ALPHA - 1))
        rounds += 1
        return {name: torch.add(values[name], g, alpha=-alpha) for name, g in gradient.items()}

    return step


@pytest.mark.parametrize("plan", [Plan(3, strided(1)), FRAGMENTS], ids=["whole", "fragments"])
def test_run_of_sparseloco_equals_the_plain_loop_bit_for_bit(plan: Plan) -> None:
    options = {
        "wire_dtype": f"sparse:{KEPT}",
        "feedback_decay": BETA,
        "outer": "sgd",
        "outer_lr": ALPHA,
        "outer_lr_schedule": f"cosine:{ROUNDS}:{LAST_ALPHA}",
        "chunk_elements": 4096,
    }
    steps = (ROUNDS + 2) * plan.sync_every
    base = {"workers": 2, "deterministic": True, **options_of(plan)}
    with Broker(make_config(**base, **options)) as broker:
        got = run(broker, trainees(2, adamw), steps)
    travels = WithFeedback(q2_of_top_k, BETA)
    assert_same(got, streaming(trainees(2, adamw), steps, plan, falling, travels=travels))
    assert all(bool(e.any()) for e in travels.residuals.values()), "something was left out"
