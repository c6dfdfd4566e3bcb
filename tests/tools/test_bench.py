"""The benchmark: its arithmetic, what it prints and writes, and one tiny run with real processes."""

from __future__ import annotations

import io
import json
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from diloco_broker import Broker, BrokerConfig
from diloco_tools.bench import machine
from diloco_tools.bench.cli import app, write
from diloco_tools.bench.parts import rounds, wire
from diloco_tools.bench.process_pool import ProcessPool
from diloco_tools.bench.report.arithmetic import (
    CHUNK_IS_MORE_THAN,
    Moments,
    against,
    around,
    in_turn,
    moments,
    percentile,
    phases,
    slope,
)
from diloco_tools.bench.report.figures import (
    PHASES_OF_ROUNDS,
    TARGETS,
    TRANSPORT,
    WHOLE_ROUND,
    figure,
    number,
    show,
    worst,
)
from diloco_tools.bench.report.plot import draw
from diloco_tools.bench.report.table import sentences, tables, targets_table
from diloco_tools.bench.roles import link
from diloco_tools.bench.roles.fake_worker import (
    ELEMENT_BYTES,
    VALUE,
    VALUE_BYTES,
    OneWorker,
    flat_manifest,
)
from diloco_tools.bench.roles.link import Lane
from diloco_tools.bench.roles.trainer import StillGPT, shape_of
from diloco_tools.bench.sizes import SIZES, parameters_of
from diloco_tools.bench.suite import COMMANDS, all_parts
from diloco_tools.demo.model import GPT
from diloco_tools.processes import ChildFailed
from diloco_worker import DiLoCoClient
from kit.tool_results import report

MIB = 1 << 20
CHUNK = 1000  # elements, where the broker is the test's own


def printed(*things: object, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width)
    for each in things:
        console.print(each)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# Arithmetic.


def test_percentile_is_the_nearest_rank() -> None:
    values = [float(i) for i in range(1, 101)]
    assert percentile(values, 0.99) == 99
    assert percentile(values, 1) == 100
    assert percentile(values, 0) == 1
    assert percentile([5.0], 0.99) == 5
    assert percentile([3.0, 1.0, 2.0, 4.0], 0.99) == 4
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)
    with pytest.raises(ValueError, match=r"1\.5"):
        percentile(values, 1.5)


def test_limit_and_product_are_measured_in_turn() -> None:
    order: list[str] = []
    limits, products = in_turn(
        lambda: order.append("limit") or len(order),  # type: ignore[func-returns-value]
        lambda: order.append("product") or len(order),  # type: ignore[func-returns-value]
        2,
    )
    assert order == ["limit", "product", "limit", "product", "limit"]
    assert (limits, products) == ([1, 3, 5], [2, 4])


def test_ratio_holds_when_limit_and_product_drift_together() -> None:
    limits = [4.0, 3.0, 2.0, 1.0]
    assert around(limits) == [3.5, 2.5, 1.5]
    products = [1.75, 1.25, 0.75]
    assert against(products, limits) == [0.5, 0.5, 0.5]
    with pytest.raises(ValueError, match="need 4 limits"):
        against(products, limits[1:])
    with pytest.raises(ValueError, match="limit of 0"):
        against([1.0], [0.0, 0.0])


def test_slope_needs_two_different_points() -> None:
    assert slope([(2, 30.0), (4, 40.0), (8, 60.0)]) == pytest.approx(5)
    with pytest.raises(ValueError, match="differ in x"):
        slope([(2, 1.0), (2, 3.0)])


# Figures.


def test_target_is_met_on_its_side_of_the_limit() -> None:
    assert TARGETS["round"].is_met(0.60)
    assert not TARGETS["round"].is_met(0.59)
    assert TARGETS["turn"].is_met(5.0)
    assert not TARGETS["turn"].is_met(5.1)


def test_verdict_is_of_the_median() -> None:
    one = figure("p", "row", "/ raw", [0.5, 0.7, 0.61], "x", target="round")
    assert (one.median, one.low, one.high, one.is_met) == (0.61, 0.5, 0.7, True)
    assert figure("p", "row", "/ raw", 0.9, "x").is_met is None


def test_worst_figure_decides_a_target() -> None:
    turns = [figure("p", f"{ms}", "turn", ms, "ms", target="turn") for ms in (2.0, 7.0, 4.0)]
    shares = [figure("p", f"{x}", "/ raw", x, "x", target="round") for x in (0.9, 0.4, 0.7)]
    bad_turn, bad_share = worst([*turns, *shares], "turn"), worst([*turns, *shares], "round")
    assert bad_turn is turns[1]
    assert bad_share is shares[1]
    assert worst(turns, "round") is None


def test_figures_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        figure("p", "row", "name", [], "s")
    with pytest.raises(ValueError, match="is no unit"):
        figure("p", "row", "name", 1.0, "furlongs")
    with pytest.raises(ValueError, match="its target in ms"):
        figure("p", "row", "name", 1.0, "s", target="turn")


def test_values_are_shown_with_the_digits_of_their_unit() -> None:
    assert [show(0.0214, "%"), show(12.345, "ms"), show(63.7, "MB")] == ["2.1%", "12.3 ms", "64 MB"]
    assert [show(1.0042, "times"), number(0.614, "x")] == ["1.004", "0.61"]


def test_json_has_every_value_and_verdict() -> None:
    plain = report(
        figure("whole round", "125M", "/ raw", [0.5, 0.58, 0.7], "x", target="round"),
        figure("limits", "memcpy", "speed", 15.0, "GB/s", note="one thread"),
    ).plain()
    again = json.loads(json.dumps(plain, allow_nan=False))
    first, second = again["figures"]
    assert first["values"] == [0.5, 0.58, 0.7]
    assert first["target"] == {
        "name": TARGETS["round"].name,
        "words": ">= 0.60",
        "met": False,
    }
    assert (second["target"], second["note"]) == (None, "one thread")
    assert [(each["of"], each["met"]) for each in again["targets"]] == [("125M", False)]


# Phases.


def test_phases_sum_up_to_the_round() -> None:
    found = phases(Moments(10.0, 10.1, 10.5, 10.2, 10.9, 11.0))
    assert sum(found.values()) == pytest.approx(1.0)
    assert found["step"] == 0  # chunks came back before the last went up
    assert found["download"] == pytest.approx(0.4)  # what was left of it then


def test_step_is_what_lies_between_the_last_up_and_the_first_down() -> None:
    found = phases(Moments(0.0, 0.1, 0.5, 0.8, 0.9, 1.0))
    assert found["step"] == pytest.approx(0.3)
    assert found["download"] == pytest.approx(0.1)


def test_moments_are_those_of_chunks_and_not_of_small_messages() -> None:
    small, large = CHUNK_IS_MORE_THAN // 8, 4 * CHUNK_IS_MORE_THAN
    samples = [
        (1.0, 0, 0),
        (2.0, small, 0),  # the push is offered
        (3.0, large, small),
        (4.0, 2 * large, large),
        (5.0, 2 * large + small, 2 * large),  # credit goes back
        (6.0, 2 * large + small, 2 * large + small),
    ]
    found = moments(samples, 1.5, 7.0)
    assert found == Moments(1.5, 3.0, 4.0, 4.0, 5.0, 7.0)


def test_a_round_without_chunks_has_no_moments() -> None:
    assert moments([], 0.0, 1.0) is None
    assert moments([(0.0, 0, 0), (1.0, 100, 100)], 0.0, 1.0) is None


# How it grows.


def test_growth_is_the_slope_over_workers_and_over_parameters() -> None:
    measured = []
    for size in ("10M", "125M"):
        for workers in (2, 4):
            row = rounds.row_of(size, workers, "fp32")
            seconds = workers * parameters_of(size) / 1e9
            measured.append(figure(WHOLE_ROUND, row, "seconds", seconds, "s"))
            memory = 40.0 + 5 * workers
            measured.append(figure(rounds.COST_PART, row, "broker beyond state", memory, "MB"))
    found = {(each.of, each.name): each for each in rounds.growth(measured)}
    assert found["10M, fp32", "a worker"].median == pytest.approx(5)
    assert found["125M, fp32", "a worker"].is_met
    assert found["4 workers, fp32", "100M parameters"].median == pytest.approx(0.4)


def test_one_configuration_has_no_growth() -> None:
    row = rounds.row_of("10M", 2, "fp32")
    assert not rounds.growth([figure(WHOLE_ROUND, row, "seconds", 1.0, "s")])


# What people see.


def test_table_has_rows_columns_and_spreads() -> None:
    figures = [
        figure("whole round", "10M", "seconds", [0.1, 0.2, 0.3], "s"),
        figure("whole round", "10M", "/ raw", 0.5, "x"),
        figure("whole round", "50M", "seconds", 1.0, "s"),
    ]
    (table,) = tables(report(*figures))
    text = printed(table)
    assert "whole round" in text
    assert "0.200 0.100-0.300" in text
    assert [line.split() for line in text.splitlines() if "50M" in line] == [["50M", "1.000"]]


def test_missed_and_met_targets_are_told_apart() -> None:
    both = report(
        figure("p", "125M, 2 workers", "/ raw", 0.4, "x", target="round"),
        figure("p", "everything", "turn", 3.0, "ms", target="turn"),
    )
    lines = printed(targets_table(both)).splitlines()
    assert any("125M, 2 workers" in line and "NOT MET" in line for line in lines)
    assert any("everything" in line and line.split()[-1] == "met" for line in lines)


def test_what_was_not_measured_is_said() -> None:
    one = report(
        figure("p", "row", "turn", 3.0, "ms", target="turn"), skipped=("the largest: left out",)
    )
    told = sentences(one)
    assert told[0] == "the largest: left out"
    assert TARGETS["heartbeat"].name in told[1]
    assert TARGETS["turn"].name not in told[1]


def test_tables_fit_a_hundred_and_thirty_columns() -> None:
    row = rounds.row_of("125M", 8, "fp32")
    units = {"seconds": "s", "in + out": "GB/s", "/ raw": "x"}
    part = [
        figure(WHOLE_ROUND, row, name, [10.111, 10.222, 10.333], unit)
        for name, unit in units.items()
    ]
    figures = [
        *part,
        *(figure("t", "x" * 40, "n", 9.9, t.unit, target=k) for k, t in TARGETS.items()),
    ]
    whole = report(*figures)
    for table in (*tables(whole), targets_table(whole)):
        text = printed(table, width=1000)
        assert max(len(line.rstrip()) for line in text.splitlines()) <= 130, text


def test_files_lie_beside_each_other(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=130)
    figures = [figure(TRANSPORT, "chunks", "up / raw", [0.9, 1.0, 1.1], "x")]
    write(report(*figures), tmp_path / "all", console)
    assert {path.name for path in tmp_path.iterdir()} == {"all.json", "all.txt", "all.png"}
    assert "1.00 0.90-1.10" in (tmp_path / "all.txt").read_text()
    assert json.loads((tmp_path / "all.json").read_text())["figures"][0]["median"] == 1.0


def test_picture_shows_rounds_phases_and_growth(tmp_path: Path) -> None:
    figures = []
    for size in ("10M", "50M"):
        row = rounds.row_of(size, 2, "fp32")
        figures.append(figure(WHOLE_ROUND, row, "seconds", [1.0, 2.0], "s"))
        figures.append(figure(WHOLE_ROUND, row, "/ raw", 0.5, "x", target="round"))
        for name in phases(Moments(0, 1, 2, 3, 4, 5)):
            figures.append(figure(PHASES_OF_ROUNDS, row, name, 1.0, "ms"))
    assert draw(report(*figures), tmp_path / "whole.png")
    assert draw(report(figures[0], figures[1]), tmp_path / "ratios.png")
    heights = [_png_height(tmp_path / f"{name}.png") for name in ("whole", "ratios")]
    assert heights[0] > 2 * heights[1]
    assert not draw(report(figure("limits", "memcpy", "speed", 1.0, "GB/s")), tmp_path / "no.png")


def _png_height(path: Path) -> int:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(head[20:24], "big")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["round", "--parameters", "7M"], "'7M' is no model"),
        (["round", "--workers", "2,none"], "--workers '2,none'"),
        (["round", "--workers", "0"], "--workers '0'"),
        (["round", "--reply-dtype", "int3"], "'int3'"),
        (["transport", "--chunk-kib", "8192"], "from 1 to 4096"),
        (["transport", "--window", ""], "--window ''"),
        (["heartbeat", "--parameters", "huge"], "'huge'"),
    ],
)
def test_bad_option_is_refused_with_one_sentence(
    arguments: list[str], words: str, tmp_path: Path
) -> None:
    result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert words in result.stderr
    assert not list(tmp_path.iterdir())


# What is measured.


def test_sizes_are_what_their_names_say() -> None:
    for size, about in (("0.4M", 0.43e6), ("10M", 10e6), ("50M", 50e6), ("125M", 125e6)):
        assert parameters_of(size) == pytest.approx(about, rel=0.02)


def test_still_model_has_the_tensors_of_the_real_one() -> None:
    still = list(StillGPT(SIZES["0.4M"]).parameters())
    real = list(GPT(shape_of("0.4M")).parameters())
    assert sorted(tuple(p.shape) for p in still) == sorted(tuple(p.shape) for p in real)
    assert sum(p.numel() for p in still) == parameters_of("0.4M")
    assert all(bool((p > 0).all()) for p in still)


def test_fake_worker_pretends_the_model_it_is_asked_for() -> None:
    for parameters in (1000, 1 << 24, (1 << 24) + 1, 1_000_000_000):
        manifest = flat_manifest(parameters)
        assert manifest.trainable_elements == parameters
        assert not manifest.problems()


def test_fake_worker_sends_one_finite_value_in_every_dtype() -> None:
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    for name, dtype in dtypes.items():
        assert len(VALUE_BYTES[name]) == ELEMENT_BYTES[name]
        assert torch.frombuffer(bytearray(VALUE_BYTES[name]), dtype=dtype).item() == VALUE


@pytest.mark.parametrize(("quick", "left_out"), [(False, set()), (True, {"largest model"})])
def test_every_part_is_measured_once(quick: bool, left_out: set[str]) -> None:
    names = [part.name for part in all_parts(quick=quick)]
    of_commands = {each.parts()[0].name.split(",")[0] for each in COMMANDS.values()}
    assert {name.split(",")[0] for name in names} == of_commands - left_out
    assert len(set(names)) == len(names)


def test_whole_benchmark_has_the_rounds_that_its_targets_are_about() -> None:
    names = {part.name for part in all_parts()}
    for workers in (2, 4):
        assert f"{WHOLE_ROUND}, {rounds.row_of('125M', workers, 'fp32')}" in names


# The link.


def test_link_puts_bytes_on_the_wire_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("diloco_tools.bench.roles.link.time.monotonic", lambda: now[0])
    lane = Lane(bytes_per_s=1e6, delay_s=0.05)
    assert lane.put(500_000) == pytest.approx(100.55)
    assert lane.put(500_000) == pytest.approx(101.05)
    assert lane.room() == pytest.approx(1.0 - link.QUEUE_S)
    now[0] = 102.0
    assert lane.room() < 0
    assert lane.put(500_000) == pytest.approx(102.55)


def test_link_counts_its_share_between_the_first_and_the_last_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr("diloco_tools.bench.roles.link.time.monotonic", lambda: now[0])
    lane = Lane(bytes_per_s=1e6, delay_s=0.05)
    lane.put(100)  # a message without a chunk
    assert lane.share == 0
    now[0] = 200.0
    lane.put(500_000)
    now[0] = 201.5
    lane.put(500_000)
    now[0] = 300.0
    lane.put(100)
    assert lane.share == pytest.approx(0.5)
    lane.forget()
    assert lane.share == 0


# Processes.


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[ProcessPool]:
    with ProcessPool(tmp_path, bytes_raw=8 * MIB) as it:
        yield it


def test_cpu_and_memory_of_a_process_are_read() -> None:
    before = machine.cpu_seconds(os.getpid())
    math.factorial(20_000)
    assert machine.cpu_seconds(os.getpid()) > before
    found = machine.memory(os.getpid())
    assert found.peak >= found.resident > 0


def test_raw_tcp_moves_what_it_is_asked_to(pool: ProcessPool) -> None:
    sample = pool.raw()
    assert sample.speed > 0
    assert sample.send_cpu > 0
    assert sample.receive_cpu > 0
    assert pool.raw_samples == [sample]


def test_transport_alone_goes_both_ways(pool: ProcessPool) -> None:
    found = wire.transport(pool, repeats=1, chunk_kib=[1024], window=[1, 4])
    assert [each.name for each in found[:4]] == ["up", "up / raw", "down", "down / raw"]
    assert {each.of for each in found} == {f"chunks of 1024 KiB, window {n}" for n in (1, 4)}


def test_role_that_dies_is_reported_with_its_last_words(pool: ProcessPool) -> None:
    role = pool.role("stage-hand")
    with pytest.raises(ChildFailed, match="there is no role 'stage-hand'"):
        role.ask("anything")


def test_role_that_does_not_answer_is_not_waited_for(pool: ProcessPool) -> None:
    role = pool.role("raw")
    role.tell("accept")  # nobody connects
    with pytest.raises(ChildFailed, match=r"did not answer within 0.2 s"):
        role.hear(within_s=0.2)
    os.kill(role.pid, signal.SIGKILL)


def test_everybody_has_ended_when_the_pool_is_left(tmp_path: Path) -> None:
    with ProcessPool(tmp_path, bytes_raw=MIB) as pool:
        pids = [pool.role("raw", name).pid for name in ("one", "two")]
        pool.dismiss("one")
        assert not Path(f"/proc/{pids[0]}").exists()
        assert Path(f"/proc/{pids[1]}").exists()
    assert not Path(f"/proc/{pids[1]}").exists()


@pytest.fixture
def broker() -> Iterator[Broker]:
    anywhere = "tcp://127.0.0.1:*"
    config = BrokerConfig(sync_every=1, bind=anywhere, feed=anywhere, chunk_elements=CHUNK)
    with Broker(config) as it:
        yield it


def test_fake_worker_is_counted_like_any_worker(broker: Broker) -> None:
    parameters = 100 * CHUNK + 10  # many more chunks than credit, the last one short
    worker = OneWorker(lambda: True)
    worker.join(broker.address, "pretender", parameters)
    worker.learn_version()
    times = worker.push(pull=True)
    assert times["began"] <= times["up"] <= times["ended"]
    with DiLoCoClient(broker.address) as client:
        found = client.pull()
    worker.leave()
    # Nesterov's first step from theta = VALUE with g = VALUE: theta - 0.7 (1 + 0.9) g.
    (weight,) = found.tensors.values()
    assert weight.numel() == parameters
    assert torch.allclose(weight, torch.full_like(weight, VALUE * (1 - 0.7 * 1.9)))
    assert found.version.counter == 1


def test_each_heartbeat_of_a_fake_worker_is_timed_from_when_it_was_due(broker: Broker) -> None:
    turns = iter([False] * 50 + [True])
    worker = OneWorker(lambda: next(turns))
    worker.join(broker.address, "heart", 10)
    worker.learn_version()
    seconds = worker.beat(interval_s=0.001)["seconds"]
    worker.leave()
    assert seconds
    assert all(0 < each < 10 for each in seconds)


@pytest.mark.timeout(100)
def test_tiny_run_moves_exactly_the_bytes_of_the_model(pool: ProcessPool) -> None:
    size, parameters = "0.4M", parameters_of("0.4M")
    found = rounds.whole_round(pool, size=size, workers=1, reply="fp32", repeats=1)
    by_name = {each.name: each.median for each in found}
    bytes_moved = by_name["in + out"] * by_name["seconds"] * 1e9
    # bf16 up and fp32 down; headers and control messages are less than a percent of it.
    assert 6 * parameters < bytes_moved < 1.01 * 6 * parameters
    assert by_name["broker CPU"] > 0
    assert by_name["longest turn"] > 0
    assert {each.name for each in found if each.part == PHASES_OF_ROUNDS} >= {"delta", "apply"}
