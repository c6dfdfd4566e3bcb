"""Frozen parameters travel only to those who lack them: fine-tuning of adapters moves adapters."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from diloco_broker import Broker
from diloco_worker import DiLoCoWorker
from kit.whole_run import PATIENCE_S, make_config

FROZEN = 2_500_000
TRAINED = FROZEN // 100


class Adapted(nn.Module):
    """A hundred times as much is frozen as is trained."""

    def __init__(self, seed: int = 0, elements: int = FROZEN, *, half: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        base = torch.rand(elements, generator=generator)
        self.base = nn.Parameter(base.bfloat16() if half else base, requires_grad=False)
        self.steps = nn.Parameter(torch.arange(3), requires_grad=False)
        self.adapter = nn.Parameter(torch.rand(elements // 100, generator=generator))


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker(make_config(workers=1, chunk_elements=1 << 19)) as made:
        yield made


def joins(broker: Broker, model: nn.Module, worker_id: str) -> tuple[int, int]:
    """Bytes that it has sent and received until it can train."""
    adapter = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(adapter, lr=0.1)
    with DiLoCoWorker(
        model, optimizer, server=broker.address, worker_id=worker_id, timeout=PATIENCE_S
    ) as diloco:
        metrics = diloco.sync_metrics
        return metrics.bytes_up, metrics.bytes_down


@pytest.mark.parametrize("half", [False, True])
def test_who_has_the_frozen_parameters_fetches_the_others_alone(broker: Broker, half: bool) -> None:
    first, second = Adapted(half=half), Adapted(half=half)
    with torch.no_grad():
        second.adapter.zero_()
    up, down = joins(broker, first, "first")
    assert up > 4 * (FROZEN + TRAINED)  # the broker has to have them once
    assert down < 4 * TRAINED + 100_000
    up, down = joins(broker, second, "second")
    assert up < 10_000
    assert down < 4 * TRAINED + 100_000
    assert torch.equal(second.adapter, first.adapter)


def test_who_has_other_frozen_parameters_fetches_them(broker: Broker) -> None:
    first, second = Adapted(0, 100_000), Adapted(0, 100_000)
    with torch.no_grad():
        second.base[77] += 1e-3
    joins(broker, first, "first")
    _, down = joins(broker, second, "second")
    assert down > 4 * 100_000
    assert torch.equal(second.base, first.base)
