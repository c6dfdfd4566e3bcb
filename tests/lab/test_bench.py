"""The benchmark: its arithmetic, what it prints and writes, and one tiny run with real processes."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from diloco_broker import Broker, BrokerConfig
from diloco_broker.pure import upload_window
from diloco_lab.bench import link
from diloco_lab.bench.__main__ import ALL, COMMANDS, QUICK, app, parts_of, write
from diloco_lab.bench.parts import codecs, rounds, wire
from diloco_lab.bench.parts.rounds import PHASES_OF_ROUNDS, WHOLE_ROUND
from diloco_lab.bench.process_pool import ProcessPool
from diloco_lab.bench.report import arithmetic
from diloco_lab.bench.report.figures import TARGETS, figure, number, sentences, show, tables
from diloco_lab.bench.roles import fake_worker
from diloco_lab.bench.roles.trainer import still_model
from diloco_lab.bench.sizes import CONTEXT, SIZES, parameters_of
from diloco_tools.demo.model import GPT, GPTConfig
from diloco_tools.processes import ChildFailed
from diloco_worker import DiLoCoClient
from diloco_worker.core import downloads
from kit.tool_results import report

MIB = 1 << 20
CHUNK = 1000  # elements, where the broker is the test's own


def test_percentile_is_the_nearest_rank() -> None:
    values = [float(i) for i in range(1, 101)]
    assert [arithmetic.percentile(values, share) for share in (0.99, 1, 0)] == [99, 100, 1]
    assert arithmetic.percentile([5.0], 0.99) == 5
    assert arithmetic.percentile([3.0, 1.0, 2.0, 4.0], 0.99) == 4


def test_ratio_of_what_is_measured_in_turn_holds_when_both_drift() -> None:
    speeds = iter([4.0, 1.75, 3.0, 1.25, 2.0])
    limits, products = arithmetic.in_turn(lambda: next(speeds), lambda: next(speeds), 2)
    assert (limits, products) == ([4.0, 3.0, 2.0], [1.75, 1.25])
    assert arithmetic.against(products, limits) == [0.5, 0.5]


NO_FIGURE = "no values, an unknown unit, or a target in another: .*"


def test_phases_are_what_each_adds_and_small_messages_begin_none() -> None:
    small, large = arithmetic.CHUNK_IS_MORE_THAN // 8, 4 * arithmetic.CHUNK_IS_MORE_THAN
    samples = [
        (1.0, 0, 0),
        (2.0, small, 0),  # the push is offered
        (3.0, large, small),
        (4.0, 2 * large, large),
        (5.0, 2 * large + small, 2 * large),  # credit goes back
        (6.0, 2 * large + small, 2 * large + small),
    ]
    assert phases_of(samples, 1.5, 7.0) == ([1.5, 1.0, 0.0, 1.0, 2.0], 4.0)
    # Chunks come back before the last goes up: the download is what is left of it then.
    early = [(0.0, 0, 0), (1.0, large, 0), (2.0, large, large), (4.0, 2 * large, 2 * large)]
    assert phases_of(early, 0.0, 5.0) == ([1.0, 3.0, 0.0, 0.0, 1.0], 2.0)
    waits = [(0.0, 0, 0), (1.0, large, 0), (4.0, large, large)]
    assert phases_of(waits, 0.0, 5.0) == ([1.0, 0.0, 3.0, 0.0, 1.0], 4.0)
    assert arithmetic.phases([], 0.0, 1.0) is None
    assert arithmetic.phases([(0.0, 0, 0), (1.0, 100, 100)], 0.0, 1.0) is None


def phases_of(
    samples: list[tuple[float, int, int]], began: float, ended: float
) -> tuple[list[float], float]:
    found = arithmetic.phases(samples, began, ended)
    assert found is not None and list(found) == [*arithmetic.PHASES, "first_down"]
    *seconds, first_down = found.values()
    return seconds, first_down


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
    assert not rounds.growth(measured[:2]), "one configuration has none"


def test_target_is_met_by_the_median_on_its_side_of_the_limit() -> None:
    assert [TARGETS["round"].is_met(value) for value in (0.60, 0.59)] == [True, False]
    assert [TARGETS["turn"].is_met(value) for value in (5.0, 5.1)] == [True, False]
    one = figure("p", "row", "/ raw", [0.5, 0.7, 0.61], "x", target="round")
    assert (one.median, one.low, one.high, one.is_met) == (0.61, 0.5, 0.7, True)
    assert figure("p", "row", "/ raw", 0.9, "x").is_met is None


def test_values_are_shown_with_the_digits_of_their_unit() -> None:
    assert [show(0.0214, "%"), show(12.345, "ms"), show(63.7, "MB")] == ["2.1%", "12.3 ms", "64 MB"]
    assert [show(1.0042, "times"), number(0.614, "x")] == ["1.004", "0.61"]


def test_tables_and_figures_are_written_beside_each_other(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=130)
    results = report(
        figure(WHOLE_ROUND, "10M", "seconds", [0.1, 0.2, 0.3], "s", note="one thread"),
        figure(WHOLE_ROUND, "10M", "/ raw", [0.5, 0.58, 0.7], "x", target="round"),
        figure(WHOLE_ROUND, "50M", "seconds", 1.0, "s"),
        figure("p", "better", "/ raw", 0.9, "x", target="round"),
        *(figure("p", f"turn {ms}", "turn", ms, "ms", target="turn") for ms in (2.0, 3.0, 1.0)),
        skipped=("the largest: left out",),
    )
    write(results, tmp_path / "all", console)
    assert {path.name for path in tmp_path.iterdir()} == {"all.json", "all.txt"}
    text = (tmp_path / "all.txt").read_text()
    lines = [line.split() for line in text.splitlines()]
    assert [line for line in lines if line[:1] in (["10M"], ["50M"])] == [
        ["10M", "0.200", "0.100-0.300", "0.58", "0.50-0.70"],
        ["50M", "1.000"],
    ]
    assert [line[-2:] for line in lines if "turn" in line and "3.0" in line][-1] == ["ms", "met"]
    assert any(line[-2:] == ["NOT", "MET"] and "10M" in line for line in lines)
    read = json.loads((tmp_path / "all.json").read_text())
    seconds, share, *_ = read["figures"]
    assert (seconds["target"], seconds["note"], seconds["median"]) == (None, "one thread", 0.2)
    assert share["values"] == [0.5, 0.58, 0.7]
    assert share["target"] == {"name": TARGETS["round"].name, "words": ">= 0.60", "met": False}
    worst = [(each["of"], each["met"]) for each in read["targets"]]
    assert worst == [("10M", False), ("turn 3.0", True)], "the worst figure decides"
    skipped, absent, _ = sentences(results)
    assert skipped == "the largest: left out"
    assert TARGETS["heartbeat"].name in absent
    assert TARGETS["turn"].name not in absent
    assert "target" in sentences(report())[0]


def test_tables_fit_a_hundred_and_thirty_columns() -> None:
    row = rounds.row_of("125M", 8, "fp32")
    units = {"seconds": "s", "in + out": "GB/s", "/ raw": "x"}
    values = [10.111, 10.222, 10.333]
    whole = report(
        *(figure(WHOLE_ROUND, row, name, values, unit) for name, unit in units.items()),
        *(figure("t", "x" * 40, "n", 9.9, t.unit, target=k) for k, t in TARGETS.items()),
    )
    console = Console(file=io.StringIO(), width=1000, record=True)
    console.print(*tables(whole))
    text = console.export_text()
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 130, text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["round", "--parameters", "7M"], "--parameters '7M' is unknown here"),
        (["round", "--workers", "2,none"], "--workers '2,none'"),
        (["round", "--workers", "0"], "--workers '0'"),
        (["round", "--reply-dtype", "int3"], "'int3'"),
        (["transport", "--chunk-kib", "8192"], "from 1 to 4096"),
        (["transport", "--window", ""], "--window ''"),
        (["heartbeat", "--parameters", "10M,50M"], "'10M,50M'"),
        (["heartbeat", "--parameters", "huge"], "'huge' is unknown here"),
    ],
)
def test_bad_option_is_refused_with_one_sentence(
    arguments: list[str], words: str, tmp_path: Path
) -> None:
    result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert words in result.stderr
    assert not list(tmp_path.iterdir())


NOT_QUICK = {"largest model", codecs.CODECS_WAN, codecs.CODECS_LIMITED}
OF_ROUNDS = (WHOLE_ROUND, rounds.WITH_KEYS)


@pytest.mark.parametrize(("commands", "left_out"), [(ALL, set()), (QUICK, NOT_QUICK)])
def test_every_part_is_measured_once(commands: str, left_out: set[str]) -> None:
    names = list(parts_of(commands))
    measured = {"round" if name.startswith(OF_ROUNDS) else name for name in names}
    assert measured == {name for name, _ in COMMANDS.values()} - left_out
    if commands is ALL:  # the rounds that targets are about
        wanted = {f"{WHOLE_ROUND}, {rounds.row_of('125M', n, 'fp32')}" for n in (2, 4)}
        assert wanted <= set(names)
        assert sum(name.startswith(WHOLE_ROUND) for name in names) == 3 * 3 * 2
    assert any(name.startswith(rounds.WITH_KEYS) for name in names)


def test_still_model_has_the_tensors_of_the_real_one() -> None:
    still = list(still_model("0.4M").parameters())
    real = GPT(GPTConfig(CONTEXT, *SIZES["0.4M"])).parameters()
    assert sorted(each.shape for each in still) == sorted(each.shape for each in real)
    assert sum(each.numel() for each in still) == parameters_of("0.4M")
    assert all(bool((each > 0).all()) for each in still)
    for size, about in (("10M", 10e6), ("50M", 50e6), ("125M", 125e6)):
        assert parameters_of(size) == pytest.approx(about, rel=0.02)


def test_fake_worker_pretends_the_model_it_is_asked_for_in_finite_values() -> None:
    for parameters in (1000, 1 << 24, (1 << 24) + 1, 1_000_000_000):
        manifest = fake_worker.flat_manifest(parameters)
        assert manifest.trainable_elements == parameters
        assert not manifest.problems()
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    for name, dtype in dtypes.items():
        assert (
            torch.frombuffer(bytearray(fake_worker.VALUE_BYTES[name]), dtype=dtype).item()
            == fake_worker.VALUE
        )


def test_link_has_its_rate_and_counts_its_share_between_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr("diloco_lab.bench.link.time.monotonic", lambda: now[0])
    lane = link.Lane(bytes_per_s=1e6, delay_s=0.05)
    lane.put(100)  # a message without a chunk
    assert lane.share == 0
    for now[0], size in ((200.0, 500_000), (201.5, 500_000), (300.0, 100)):
        lane.put(size)
    assert lane.share == pytest.approx(0.5)
    lane.forget()
    assert lane.share == 0
    now[0] = 400.0
    assert [lane.put(500_000), lane.put(500_000)] == pytest.approx([400.55, 401.05])
    assert lane.room() == pytest.approx(1.0 - link.QUEUE_S)
    now[0] = 402.0
    assert lane.room() < 0
    assert lane.put(500_000) == pytest.approx(402.55)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[ProcessPool]:
    with ProcessPool(tmp_path, bytes_raw=8 * MIB) as it:
        yield it


def test_as_many_chunks_are_in_flight_as_in_a_run() -> None:
    credit = (downloads.DOWNLOAD_WINDOW, downloads.CREDIT_BATCH)
    assert credit == (fake_worker.WINDOW, fake_worker.CREDIT_BATCH)
    assert upload_window(1) == wire.DEFAULT_WINDOW


def test_transport_alone_goes_both_ways(pool: ProcessPool) -> None:
    found = wire.transport(pool, repeats=1, chunk_kib="1024", window="1,4")
    assert [each.name for each in found[:4]] == ["up", "up / raw", "down", "down / raw"]
    assert {each.of for each in found} == {f"chunks of 1024 KiB, window {n}" for n in (1, 4)}
    assert len(pool.raw_samples) == 2 * 2, "one limit more than measurements, for each window"
    assert all(min(each.speed, each.send_cpu, each.receive_cpu) > 0 for each in pool.raw_samples)


def test_role_that_dies_or_hangs_is_reported_and_all_end_with_the_pool(tmp_path: Path) -> None:
    with ProcessPool(tmp_path, bytes_raw=MIB) as pool:
        with pytest.raises(ChildFailed, match="there is no role 'stage-hand'"):
            pool.role("stage-hand").ask("anything")
        hangs, dismissed = pool.role("raw", "hangs"), pool.role("raw", "dismissed")
        hangs.tell("accept")  # nobody connects
        with pytest.raises(ChildFailed, match=r"did not answer within 0.2 s"):
            hangs.hear(within_s=0.2)
        pool.dismiss("dismissed")
        assert not Path(f"/proc/{dismissed.pid}").exists()
        assert hangs.running
    assert not Path(f"/proc/{hangs.pid}").exists()


@pytest.fixture
def broker() -> Iterator[Broker]:
    anywhere = "tcp://127.0.0.1:*"
    config = BrokerConfig(sync_every=1, bind=anywhere, feed=anywhere, chunk_elements=CHUNK)
    with Broker(config) as it:
        yield it


def test_fake_worker_is_counted_like_any_worker(broker: Broker) -> None:
    parameters = 100 * CHUNK + 10  # many more chunks than credit, the last one short
    worker = fake_worker.FakeWorkers(lambda: True)
    worker.join(broker.address, parameters)
    worker.learn_version()
    times = worker.push(pull=True)
    assert 0 < times["began"] <= times["up"] <= times["ended"]
    with DiLoCoClient(broker.address) as client:
        found = client.pull()
    worker.leave()
    # Nesterov's first step from theta = VALUE with g = VALUE: theta - 0.7 (1 + mu) g, where mu is where
    # its warm-up begins.
    (weight,) = found.tensors.values()
    assert weight.numel() == parameters
    assert torch.allclose(weight, torch.full_like(weight, fake_worker.VALUE * (1 - 0.7 * 1.5)))
    assert found.version.counter == 1


def test_each_heartbeat_of_fake_workers_is_timed_from_when_it_was_due(broker: Broker) -> None:
    turns = iter([False] * 50 + [True])
    workers = fake_worker.FakeWorkers(lambda: next(turns))
    workers.join(broker.address, 10, count=2)
    workers.learn_version()
    found = workers.beat(interval_s=0.002)
    workers.leave()
    assert found["sent"] == len(found["seconds"]) == 50
    assert all(0 < each < 10 for each in found["seconds"])


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


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_workers_of_two_processes_are_measured_against_workers_of_one(pool: ProcessPool) -> None:
    found = rounds.groups(pool, size="0.4M", repeats=1)
    by_name = {each.name: each.median for each in found}
    assert min(by_name.values()) > 0
    assert by_name["ratio"] == pytest.approx(by_name["2 processes"] / by_name["1 process"], rel=0.9)


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_round_with_keys_is_measured_against_one_without(pool: ProcessPool) -> None:
    found = rounds.round_with_keys(pool, size="0.4M", workers=1, reply="fp32", repeats=1)
    by_name = {each.name: each.median for each in found}
    assert min(by_name.values()) > 0
    assert by_name["ratio"] == pytest.approx(
        by_name["with keys"] / by_name["without keys"], rel=0.9
    )
    assert any("--keys" in str(each.process.args) for each in pool.all), "a broker has keys"
    assert not (pool.folder / "keys").exists(), "no secret is left behind"
