"""The benchmark: its arithmetic, what it prints and writes, and one tiny run with real processes."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from diloco_broker import Broker, BrokerConfig
from diloco_lab.bench import link
from diloco_lab.bench.__main__ import app, write
from diloco_lab.bench.parts import codecs, rounds
from diloco_lab.bench.parts.rounds import WHOLE_ROUND
from diloco_lab.bench.process_pool import ProcessPool
from diloco_lab.bench.report.figures import TARGETS, figure, sentences
from diloco_lab.bench.roles.hearts import Hearts
from diloco_lab.bench.roles.trainer import still_model
from diloco_lab.bench.sizes import CONTEXT, SIZES, parameters_of
from diloco_tools.demo.model import GPT, GPTConfig
from diloco_tools.processes import ChildFailed
from diloco_worker import DiLoCoClient
from kit.tool_results import report

MIB = 1 << 20
CHUNK = 1000  # elements, where the broker is the test's own


def test_target_is_met_by_the_median_on_its_side_of_the_limit() -> None:
    assert [TARGETS["round"].is_met(value) for value in (0.60, 0.59)] == [True, False]
    assert [TARGETS["turn"].is_met(value) for value in (5.0, 5.1)] == [True, False]
    one = figure("p", "row", "/ raw", [0.5, 0.7, 0.61], "x", target="round")
    assert (one.median, one.is_met) == (0.61, True)
    assert figure("p", "row", "/ raw", 0.9, "x").is_met is None


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
    assert {path.name for path in tmp_path.iterdir()} == {"all.json", "all.md", "all.txt"}
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
    assert share["target"] == "round"
    worst = [(each["of"], each["met"]) for each in read["targets"].values()]
    assert worst == [("10M", False), ("turn 3.0", True)], "the worst figure decides"
    skipped, absent, _ = sentences(results)
    assert skipped == "the largest: left out"
    assert TARGETS["heartbeat"].name in absent
    assert TARGETS["turn"].name not in absent
    assert "target" in sentences(report())[0]


def test_part_that_there_is_not_is_refused_with_one_sentence(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["round", "huge", "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "'huge'" in result.stderr and "heartbeat" in result.stderr
    assert not (tmp_path / "out").exists()


def test_still_model_has_the_tensors_of_the_real_one() -> None:
    still = list(still_model("0.4M").parameters())
    real = GPT(GPTConfig(CONTEXT, *SIZES["0.4M"])).parameters()
    assert sorted(each.shape for each in still) == sorted(each.shape for each in real)
    assert sum(each.numel() for each in still) == parameters_of("0.4M")
    assert all(bool((each > 0).all()) for each in still)
    for size, about in (("10M", 10e6), ("50M", 50e6), ("125M", 125e6)):
        assert parameters_of(size) == pytest.approx(about, rel=0.02)


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


def test_role_that_dies_or_hangs_is_reported_and_all_end_with_the_pool(tmp_path: Path) -> None:
    with ProcessPool(tmp_path, bytes_raw=MIB) as pool:
        with pytest.raises(ChildFailed, match="'stage-hand'"):
            pool.role("stage-hand").ask("anything")
        hangs, dismissed = pool.role("raw", "hangs"), pool.role("raw", "dismissed")
        hangs.tell("accept")  # without a client
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


def test_each_heartbeat_of_hearts_is_timed_from_when_it_was_due(broker: Broker) -> None:
    turns = iter([False] * 50 + [True])
    hearts = Hearts(lambda: next(turns))
    with DiLoCoClient(broker.address) as client:
        client.join(torch.nn.Linear(2, 2))
        hearts.join(broker.address, ["one", "two"])
        assert {each["id"] for each in client.status()["workers"]} >= {"one", "two"}
        found = hearts.beat(interval_s=0.002)
        hearts.leave()
    assert found["sent"] == len(found["seconds"]) == len(found["due"]) == 50
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


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_rounds_with_keys_are_measured_against_ones_without(pool: ProcessPool) -> None:
    found = {each.name: each.median for each in rounds.with_keys(pool, size="0.4M", repeats=1)}
    assert min(found.values()) > 0
    both = found["round, with"] / found["round, without"]
    assert found["round, ratio"] == pytest.approx(both, rel=0.9)
    assert any("--keys" in str(each.process.args) for each in pool.all), "a broker has keys"
    assert not (pool.folder / "keys").exists(), "no secret is left behind"


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_each_pair_of_dtypes_sends_the_bits_that_it_says(pool: ProcessPool) -> None:
    found = codecs.table(pool, size="0.4M", workers=2, repeats=1)
    rows = {(each.of.split(", ")[2], each.name, each.unit): each.median for each in found}
    bits = {"fp32": 32, "bf16": 16, "int8": 8.06, "int4": 4.06, "int4z": 2.2}
    for wire, reply in [codecs.USUAL, *codecs.PAIRS]:
        # Headers weigh more here than with a model of a usual size.
        name = f"{wire}/{reply}"
        assert rows[name, "up", "bits"] == pytest.approx(bits[wire], rel=0.1)
        assert rows[name, "down", "bits"] == pytest.approx(bits[reply], rel=0.1)
        assert rows[name, "up", "MB"] > 0
        assert rows[name, "round", "s"] > 0
