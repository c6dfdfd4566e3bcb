"""The benchmark's limit of a round, and its rounds with each pair of dtypes: arithmetic, tiny runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from diloco_lab.bench.parts import codecs, round_limit, rounds, tensor_threads
from diloco_lab.bench.parts.rounds import Round
from diloco_lab.bench.process_pool import Ends, ProcessPool
from diloco_lab.bench.report.figures import Figure
from diloco_lab.bench.roles.trainer import NOISE_SCALE, Trainer

MIB = 1 << 20


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[ProcessPool]:
    with ProcessPool(tmp_path, bytes_raw=8 * MIB) as it:
        yield it


def by_row(figures: list[Figure], part: str) -> dict[tuple[str, str], Figure]:
    """By the end of the row, which names dtypes, and the column."""
    return {(each.of.split(", ")[1], each.name): each for each in figures if each.part == part}


def test_least_cpu_of_a_round_counts_one_step_and_the_rest_for_each_worker() -> None:
    work = {"delta": 1.0, "fold": 2.0, "apply": 4.0, "outer_step": 100.0}
    assert round_limit.least_cpu(1, 1.0, work) == 7 + 100
    assert round_limit.least_cpu(3, 0.5, work) == 0.5 * (21 + 100)


@pytest.mark.parametrize(
    ("up", "down", "broker", "worker", "seconds"),
    [
        (5.0, 1.0, 0.1, 0.1, 4.0),  # bytes in
        (1.0, 10.0, 0.1, 0.1, 8.0),  # bytes out
        (1.0, 1.0, 3.0, 0.1, 3.0),
        (1.0, 1.0, 0.1, 2.0, 2.0),
    ],
)
def test_computed_round_takes_as_long_as_what_takes_longest(
    up: float, down: float, broker: float, worker: float, seconds: float
) -> None:
    assert codecs.computed(Round(9.0, up, down, broker, (worker, 0.1))) == seconds


def test_pseudo_gradients_for_codecs_are_normal_and_differ_everywhere() -> None:
    trainer = Trainer(lambda: False)
    trainer.build("0.4M")
    weights = [each.detach().clone() for each in trainer._model.parameters()]
    moved = []
    for _ in range(2):
        trainer.drift(normal=True)
        after = [each.detach().clone() for each in trainer._model.parameters()]
        moved.append(torch.cat([(b - a).flatten() for a, b in zip(weights, after, strict=True)]))
        weights = after
    for each in moved:
        assert each.std().item() == pytest.approx(NOISE_SCALE, rel=0.05)
        assert each.mean().abs().item() < 0.05 * NOISE_SCALE
        kurtosis = (each / each.std()).pow(4).mean().item()
        assert kurtosis == pytest.approx(3, rel=0.1)
    assert torch.corrcoef(torch.stack(moved))[0, 1].abs().item() < 0.05


def test_raw_tcp_goes_round_through_the_memory_that_it_holds(pool: ProcessPool) -> None:
    ends = Ends(pool.role("raw", "sender"), pool.role("raw", "receiver"))
    ends.connect()
    assert [each.ask("hold", calls=3)["bytes"] for each in ends] == [3 * MIB] * 2
    found = ends.move(8 * MIB)
    assert min(found.speed, found.send_cpu, found.receive_cpu) > 0


@pytest.mark.timeout(100)
def test_round_is_measured_against_its_limit(pool: ProcessPool) -> None:
    found = round_limit.round_limit(pool, size="0.4M", workers=1, repeats=1)
    limit = {each.name: each.median for each in found if each.part == round_limit.ROUND_LIMIT}
    ours = {each.name: each.median for each in found if each.part == round_limit.OURS}
    assert min(*limit.values(), *ours.values()) > 0
    assert limit["all CPU"] == pytest.approx(limit["raw TCP CPU"] + limit["tensor CPU"], rel=1e-6)
    cores = len(os.sched_getaffinity(0))
    assert limit["over the cores"] == pytest.approx(limit["all CPU"] / cores)
    assert ours["CPU / limit"] == pytest.approx(ours["CPU"] / limit["all CPU"])


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_threads_are_compared_with_one_and_with_processes(pool: ProcessPool) -> None:
    found = tensor_threads.tensor_threads(pool, repeats=1)
    rows = by_row(found, tensor_threads.TENSOR_THREADS)
    assert {row for row, _ in rows} == {"/".join(pair) for pair in tensor_threads.PAIRS}
    assert all(each.median > 0 for each in rows.values())
    assert {each.target for each in found} == {None, "tensor threads"}


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_rounds_through_the_socket_file_are_compared_with_tcp(pool: ProcessPool) -> None:
    found = rounds.same_host(pool, size="0.4M", workers=1, repeats=1)
    assert all(each.median > 0 for each in found)
    assert [each.name for each in found][:3] == ["TCP", "socket file", "times as fast"]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_each_pair_of_dtypes_sends_the_bits_that_it_says(pool: ProcessPool) -> None:
    found = codecs.codecs(pool, size="0.4M", repeats=1)
    rows = by_row(found, codecs.CODECS)
    bits = {"fp32": 32, "bf16": 16, "int8": 8.06, "int4": 4.06, "int4z": 2.2}
    for wire, reply in [codecs.USUAL, *codecs.PAIRS]:
        # Headers weigh more here than with a model of a usual size.
        name = f"{wire}/{reply}"
        assert rows[name, "up"].median == pytest.approx(bits[wire], rel=0.1)
        assert rows[name, "down"].median == pytest.approx(bits[reply], rel=0.1)
        assert rows[name, "round"].median > 0
        assert ((name, codecs.RATIO) in rows) == ((wire, reply) != codecs.USUAL)
    assert all(each.median > 0 for each in by_row(found, codecs.CODECS_CPU).values())
    computed = by_row(found, codecs.CODECS_COMPUTED)
    assert computed["bf16/fp32", "out"].median == pytest.approx(
        2 * computed["bf16/fp32", "in"].median, rel=0.05
    )
    targets = {each.target for each in found} - {None}
    assert targets == {"int4z loopback", "int4z 10 Gb/s"}


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_pairs_of_dtypes_go_through_a_link(pool: ProcessPool) -> None:
    found = codecs.codecs_wan(pool, size="0.4M", repeats=1)
    rows = by_row(found, codecs.CODECS_WAN)
    assert all(each.median > 0 for each in rows.values())
    assert {each.target for each in found} == {None, "int4z 1 Gb/s"}
    for name, column in rows:
        if column == "round":  # there and back at least once
            assert rows[name, column].median > codecs.ROUND_TRIP_S


def test_limited_network_is_left_out_with_its_reason(
    pool: ProcessPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco_lab.network.namespaces.why_not", lambda: "it takes root")
    assert codecs.codecs_limited(pool, size="0.4M", repeats=1) == []
    (sentence,) = pool.skipped
    assert sentence == "codecs over a limited network: left out, it takes root"


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_pairs_of_dtypes_go_over_a_limited_network(pool: ProcessPool) -> None:
    found = codecs.codecs_limited(pool, size="0.4M", repeats=1)
    if not found:
        pytest.skip(pool.skipped[0])
    assert all(each.median > 0 for each in found)
