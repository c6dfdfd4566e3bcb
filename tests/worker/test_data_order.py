"""Workers of one script read the data in different orders, and each has its share."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from diloco_protocol import UsageError
from diloco_worker import DiLoCoWorker
from diloco_worker.frameworks import give_own_order
from diloco_worker.settings import chosen_shard
from kit.scripted_broker import Descent
from kit.scripted_training import ScriptedTraining

pytest_plugins = ("kit.worker_fixtures",)

NUMBERS = list(range(64))


def seeded(**options: Any) -> RandomSampler:
    return RandomSampler(NUMBERS, generator=torch.Generator().manual_seed(42), **options)


def loader(kind: str) -> DataLoader[int]:
    """A loader that has the same order in each process of a script."""
    torch.manual_seed(42)
    sampler: Any = {
        "shuffle": None,
        "own generator": seeded(),
        "weighted": WeightedRandomSampler([1.0] * 64, 64),
        "distributed": DistributedSampler(NUMBERS, num_replicas=1, rank=0),  # type: ignore[arg-type]
    }[kind]
    return DataLoader(NUMBERS, 8, shuffle=sampler is None, sampler=sampler)  # type: ignore[arg-type]


def order(kind: str, index: int, epochs: int = 2) -> list[list[int]]:
    """The data that a worker with this share reads, by epoch."""
    made = loader(kind)
    assert give_own_order([made], lambda: (index, 2))
    return [[int(each) for batch in made for each in batch] for _ in range(epochs)]


@pytest.mark.parametrize("kind", ["shuffle", "own generator", "weighted", "distributed"])
def test_each_worker_has_its_own_order_and_keeps_it_after_restarts(kind: str) -> None:
    first, second = order(kind, 0), order(kind, 1)
    assert first[0] != second[0] and first[1] != second[1]
    assert order(kind, 1) == second
    if kind not in {"weighted"}:
        assert sorted(second[0]) == NUMBERS
    if kind != "distributed":  # the loop sets its epoch
        assert second[0] != second[1]


def test_a_loader_that_is_used_again_keeps_its_order() -> None:
    made, again = loader("distributed"), loader("distributed")
    give_own_order([made], lambda: (1, 2))
    give_own_order([again], lambda: (1, 2))
    assert give_own_order([again], lambda: (1, 2))
    assert [list(map(int, each)) for each in made] == [list(map(int, each)) for each in again]


def test_workers_that_read_in_order_are_warned(caplog: pytest.LogCaptureFixture) -> None:
    in_order: DataLoader[int] = DataLoader(NUMBERS, 8)  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO, "diloco.worker"):
        assert not give_own_order([in_order], lambda: (0, 1))
        assert not caplog.records
        assert not give_own_order([in_order], lambda: (1, 2))
    assert "own part of the data" in caplog.text


@dataclass(frozen=True)
class Frozen(Sampler[int]):
    generator: Any = field(default_factory=lambda: torch.Generator().manual_seed(42))

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(64, generator=self.generator).tolist()


class FromNumpy(Sampler[int]):
    def __init__(self) -> None:
        self.generator = np.random.default_rng(42)

    def __iter__(self) -> Iterator[int]:
        yield from self.generator.permutation(64).tolist()


def read(sampler: Sampler[int], shards: int | None = None) -> list[int]:
    """The data that a worker with the last of these shares reads; None: without a run."""
    made: DataLoader[int] = DataLoader(NUMBERS, 8, sampler=sampler)  # type: ignore[arg-type]
    if shards is not None:
        give_own_order([made], lambda: (shards - 1, shards))
    return [int(each) for batch in made for each in batch]


@pytest.mark.parametrize("kind", [FromNumpy, Frozen])
def test_odd_sampler_is_left_alone(
    kind: type[Sampler[int]], caplog: pytest.LogCaptureFixture
) -> None:
    assert read(kind(), 2) == read(kind())
    assert "own part of the data" in caplog.text


def test_broker_without_shares_does_not_end_training(caplog: pytest.LogCaptureFixture) -> None:
    def shard() -> tuple[int, int]:
        raise UsageError("no shares here")

    assert not give_own_order([loader("shuffle")], shard)
    assert "no shares here" in caplog.text


def test_shard_is_that_of_the_environment_else_of_the_broker(
    training: ScriptedTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    descent = Descent()
    assert DiLoCoWorker(descent.model, descent.optimizer).shard == (0, 1), "alone"
    worker = training.begins()
    with pytest.raises(UsageError, match="set DILOCO_SHARD_INDEX and DILOCO_NUM_SHARDS"):
        assert worker.shard, "this broker assigns none"
    training.link.shard = (1, 4)
    assert worker.shard == (1, 4)
    monkeypatch.setenv("DILOCO_SHARD_INDEX", "2")
    monkeypatch.setenv("DILOCO_NUM_SHARDS", "8")
    assert worker.shard == (2, 8)


@pytest.mark.parametrize("told", [("2", ""), ("", "2"), ("2", "2"), ("-1", "2"), ("a", "2")])
def test_invalid_share_variables_are_refused(told: tuple[str, str]) -> None:
    environ = dict(zip(("DILOCO_SHARD_INDEX", "DILOCO_NUM_SHARDS"), told, strict=True))
    with pytest.raises(UsageError, match="index from 0"):
        chosen_shard(environ)
