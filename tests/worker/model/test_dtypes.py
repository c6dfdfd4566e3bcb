"""Models in bf16, fp16, fp32 and fp64: only changes made by training are sent, and all of them.

A version is fp32. A model in a narrower dtype has it rounded, and training begins there.
"""

from typing import Any

import pytest
import torch
from torch import nn

from diloco_protocol.messages import Push
from diloco_worker.model.flat_state import FlatState
from kit.process_kit import wait_for
from kit.scripted_broker import ScriptedBroker, changed, run_config, version
from kit.scripted_training import ScriptedTraining

pytest_plugins = ("kit.worker_fixtures",)

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
MERGES: list[dict[str, Any]] = [
    {},
    {"fragment_sync_delay": 1},
    {"fragment_sync_delay": 1, "fragment_merge": "rebase"},
    {"fragment_update_alpha": 0.5},
    {"fragment_sync_delay": 1, "fragment_update_alpha": 0.6},
]


def odd(state: FlatState, seed: int) -> FlatState:
    """Values of every size, none of them exact in a narrow dtype."""
    generator = torch.Generator().manual_seed(seed)
    return changed(state, lambda vector: 3 * torch.randn(vector.shape, generator=generator))


def begins(training: ScriptedTraining, dtype: torch.dtype, **config: Any) -> None:
    """Join a run with odd parameters; optimizer steps change nothing."""
    training.broker.config = run_config(**config)
    training.makes(nn.Sequential(*(nn.Linear(4, 4, dtype=dtype) for _ in range(2))))
    training.descent.optimizer.param_groups[0]["lr"] = 0.0
    training.joins(version(0))
    for fragment in range(training.broker.config.num_fragments):
        training.broker.serves(odd(training.filled(0, fragment), fragment), version(0))
    training.done()


# Each merge with a narrow and a wide dtype, in one or two fragments.
@pytest.mark.parametrize(
    ("merge", "pieces", "dtype"),
    [
        (merge, (number + of) % 2 + 1, DTYPES[(number + 2 * of) % 4])
        for number, merge in enumerate(MERGES)
        for of in range(2)
    ],
    ids=str,
)
def test_learning_rate_0_sends_exactly_0(
    training: ScriptedTraining, merge: dict[str, Any], pieces: int, dtype: torch.dtype
) -> None:
    """Each round brings new parameters; with alpha, which keeps a part of the old ones, the same."""
    begins(training, dtype, num_fragments=pieces, **merge)
    is_mixed = "fragment_update_alpha" in merge
    for round_ in range(5 * pieces):
        fragment, number = round_ % pieces, round_ // pieces + 1
        training.trains(4 // pieces)
        push, delta = training.takes(round_)
        assert (push.norm, delta) == (0, 0)
        new = odd(training.filled(0, fragment), fragment if is_mixed else 10 + round_)
        training.broker.serves(new, version(number), push.push_id)
        if merge.get("fragment_sync_delay"):
            training.hears_news()
        training.done()
    assert "all zeros" in str(training.metrics.last_error)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("code", ["late", "bad_push"])
def test_dropped_push_leaves_no_rounding_behind(
    training: ScriptedTraining, broker: ScriptedBroker, dtype: torch.dtype, code: str
) -> None:
    """The model moves to the newest parameters, or back to its base, with a step made since."""
    begins(training, dtype, fragment_sync_delay=2)
    training.steps(4)
    training.refuses(broker.hears(Push), code)
    wait_for(lambda: bool(training.link.rejections))
    training.steps(1)
    if code == "late":
        broker.hears_pull()
        broker.serves(odd(training.filled(0), 10), version(1))
        wait_for(lambda: bool(training.link.arrivals))
    training.trains(3)
    assert training.takes()[1] == 0
    training.done()
