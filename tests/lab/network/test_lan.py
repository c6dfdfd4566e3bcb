"""`make lan`: what is computed from measurements, its file and page; tiny runs over such lines."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diloco_lab.bench.process_pool import ProcessPool
from diloco_lab.bench.sizes import parameters_of
from diloco_lab.driver.records import BadFile, read_document, text_of
from diloco_lab.driver.tables import WHERE, blocks_in, filled
from diloco_lab.network import namespaces
from diloco_lab.network.__main__ import SKIPPED, app
from diloco_lab.network.lan import founding, grid
from diloco_lab.network.lan.grid import INT4Z, USUAL, LanFile, Measurement, Part
from diloco_lab.network.lan.measuring import measure
from diloco_lab.network.lan.tables import KEYS, blocks
from diloco_lab.network.namespaces import NoNetwork, Place, network, one_switch, why_not
from kit.paths import LAB, ROOT

COMMITTED = LAB / "lan.json"
PAGE = ROOT / "docs" / "performance.md"
SHOWN = {WHERE, "sync", "training", "streaming", "mixed"}  # the terminal shows all
TINY = "0.4M"


def a_round(**changes: object) -> Measurement:
    """10M parameters, one worker, bf16 up and fp32 down at 1 Gb/s: 40 MB that take 0.32 s, and 0.4 s."""
    usual = Measurement(
        kind="round",
        parameters=10**7,
        workers=1,
        wire_dtype="bf16",
        reply_dtype="fp32",
        broker_bits_per_s=1e9,
        worker_bits_per_s=(1e9,),
        round_trip_s=1e-4,
        seconds=(0.4,),
        line_seconds=0.32,
        bytes_up=2e7,
        bytes_down=4e7,
        broker_cpu_s=0.1,
        worker_cpu_s=0.2,
        at="2026-01-01T00:00:00+00:00",
    )
    return replace(usual, **changes)  # type: ignore[arg-type]  # by name


def a_file(*measurements: Measurement) -> LanFile:
    return LanFile(
        "python -m diloco_lab.network lan", "2026-01-01T00:00:00", {"cores": 2}, measurements
    )


# What is computed


def test_efficiency_is_the_longest_of_line_and_work_over_what_was_measured() -> None:
    costs = founding.costs_of([a_round()], USUAL)
    assert costs is not None
    assert (costs.bits_up, costs.bits_down) == (16, 32)
    assert costs.efficiency == pytest.approx(0.32 / 0.4)
    # Twice the parameters and four workers: eight times the bytes on the broker's line.
    assert costs.seconds(2e7, 4, 1e9) == pytest.approx(8 * 0.4)
    # On a line a hundred times as fast four workers' work at the broker takes longer.
    assert costs.least_seconds(1e7, 4, 1e11) == pytest.approx(0.4)
    # One worker's own work is the longest where the broker has little.
    assert costs.least_seconds(1e7, 1, 1e11) == pytest.approx(0.2)


def test_work_of_the_broker_is_a_straight_line_over_workers() -> None:
    more = [a_round(workers=n, broker_cpu_s=0.1 + 0.05 * n) for n in (1, 2, 4)]
    costs = founding.costs_of(more, USUAL)
    assert costs is not None
    assert costs.broker_cpu * 1e7 == pytest.approx(0.1)
    assert costs.broker_cpu_of_each * 1e7 == pytest.approx(0.05)
    assert costs.of is more[0]  # where processes wait for a core the least


def test_only_rounds_of_these_codecs_on_the_fast_line_count() -> None:
    others = [
        a_round(kind="mixed"),
        a_round(wire_dtype="int8", reply_dtype="int8"),
        a_round(broker_bits_per_s=1e8),
    ]
    assert founding.costs_of(others, USUAL) is None


def test_streaming_leaves_copies_and_what_does_not_fit_between_two_syncs() -> None:
    streamed = a_round(kind="streaming", seconds=(0.05,), fragments=4)
    standstill = founding.streaming_standstill([streamed], USUAL)
    assert standstill is not None and standstill * 1e8 == pytest.approx(0.5)
    assert founding.standstill_beside(0.5, 300.0) == pytest.approx(0.5)
    assert founding.standstill_beside(0.5, 620.0) == pytest.approx(120.5)


@pytest.mark.parametrize(
    ("sync", "copies"), [(5.0, None), (300.0, 2.0), (700.0, 2.0), (50.0, 40.0)]
)
def test_steps_that_reach_a_share_are_the_least_that_do(sync: float, copies: float | None) -> None:
    steps = founding.Cell("1B", "bf16/fp32", 1, sync, False, copies).steps_for(0.97)

    def share(sync_every: int) -> float:
        left = sync
        if copies is not None:
            left = founding.standstill_beside(copies, sync, sync_every)
        return founding.utilisation(left, sync_every)

    assert share(steps) >= 0.97 > share(steps - 1)


# What is measured


def test_all_of_it_fits_into_twenty_minutes_by_what_is_guessed() -> None:
    seconds = 0.0
    for part in grid.everything():
        seconds += 15  # to start, to join, for the first round
        for line in part.lines:
            sync = grid.guess(parameters_of(part.size), part.pair, part.workers, line)
            if line in grid.too_long(part):
                continue
            if part.kind == "round":
                seconds += sync * grid.repeats(sync)
            elif part.kind == "streaming":
                seconds += sync * (2 + 2 * grid.STREAMING_TIMES)
            else:
                seconds += grid.MIXED_SYNCS * (grid.MIXED_STEPS * grid.MIXED_STEP_S + 5)
    assert seconds < 20 * 60


def test_what_would_take_a_minute_a_sync_is_left_out() -> None:
    part = Part("round", "125M", USUAL, 2, (1e9, 1e8, 5e7))
    left_out = grid.too_long(part)
    assert list(left_out) == [1e8, 5e7]
    assert all(seconds > grid.MOST_S for seconds in left_out.values())


def test_short_syncs_are_measured_more_often() -> None:
    assert [grid.repeats(seconds) for seconds in (0.1, 7.0, 50.0)] == [grid.MOST_REPEATS, 2, 1]


# The file and the page


def test_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = a_file(a_round(), a_round(kind="mixed", mode="quorum", quorum=2, slow_seconds=(3.0,)))
    path = tmp_path / "lan.json"
    path.write_text(text_of(found))
    assert read_document(path, LanFile) == found


@pytest.mark.parametrize("text", ["", "[]", '{"measurements": [{"kind": "round"}]}', "no JSON"])
def test_what_is_no_file_of_measurements_gets_a_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lan.json"
    path.write_text(text)
    with pytest.raises(BadFile, match="no measurements"):
        read_document(path, LanFile)


def test_page_in_the_repository_is_that_of_the_measurements_beside_it() -> None:
    text = PAGE.read_text()
    assert filled(text, blocks(read_document(COMMITTED, LanFile)), "lan") == text
    keys = {match["key"] for match in blocks_in("lan").finditer(text)}
    assert keys == SHOWN and keys <= {WHERE, *KEYS}


def test_other_measurements_change_the_page_between_its_marks_only() -> None:
    before = "Words.\n<!-- table: lan/sync -->\n| 1M | 7 s |\n<!-- end -->\nMore.\n"
    after = filled(before, blocks(a_file(a_round(workers=2, seconds=(0.5,)))), "lan")
    assert "| 10M | bf16/fp32 | 0.50 s, 64% |" in after
    assert after.startswith("Words.\n<!-- table: lan/sync -->\n") and after.endswith("-->\nMore.\n")
    assert "1M | 7 s" not in after


def test_table_of_nothing_says_so() -> None:
    before = "<!-- table: lan/mixed -->\n<!-- end -->"
    assert "Nothing was measured for this." in filled(before, blocks(a_file(a_round())), "lan")


def test_table_that_there_is_not_is_named() -> None:
    with pytest.raises(BadFile, match="'nonsense'"):
        filled(
            "<!-- table: lan/nonsense -->\n<!-- end -->", blocks(a_file(a_round(workers=2))), "lan"
        )


# The command


def test_command_without_root_says_why_it_measures_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("diloco_lab.network.__main__.why_not", lambda: "it takes root")
    done = CliRunner().invoke(app, ["lan", "--quick", "--out", str(tmp_path)])
    assert done.exit_code == SKIPPED
    assert done.stderr == "python -m diloco_lab.network lan: skipped: it takes root\n"
    as_make_has_it = ["lan", "--quick", "--out", str(tmp_path), "--skip-is-success"]
    assert CliRunner().invoke(app, as_make_has_it).exit_code == 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--into", "/nowhere/lan.json"], "--into /nowhere/lan.json cannot be written"),
        (["--page", "page.md"], "--page takes the file of results: --into tools/lab/lan.json"),
    ],
)
def test_options_that_cannot_be_get_a_sentence(options: list[str], sentence: str) -> None:
    done = CliRunner().invoke(app, ["lan", *options])
    assert done.exit_code == 2
    assert sentence in done.stderr


def test_page_is_written_without_measuring(tmp_path: Path) -> None:
    file, written = tmp_path / "lan.json", tmp_path / "page.md"
    file.write_text(text_of(a_file(a_round(workers=2))))
    written.write_text("<!-- table: lan/sync -->\n<!-- end -->\n")
    assert (
        CliRunner().invoke(app, ["lan", "--page", str(written), "--into", str(file)]).exit_code == 0
    )
    assert "0.40 s, 80%" in written.read_text()
    written.unlink()
    done = CliRunner().invoke(app, ["lan", "--page", str(written), "--into", str(file)])
    assert (done.exit_code, "page.md cannot be read" in done.stderr) == (2, True)


# Real runs, tiny


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """Lines for three workers, or the test is skipped with the reason why there are none."""
    try:
        with network(one_switch(3)) as made, ProcessPool(tmp_path, 1) as pool:
            yield Place(made, pool)
    except NoNetwork as error:
        pytest.skip(str(error))


@pytest.mark.timeout(200)
def test_sync_moves_the_bytes_of_its_codecs_over_the_lines(place: Place) -> None:
    parameters = parameters_of(TINY)
    usual, few = (
        next(measure(place, Part("round", TINY, pair, 2, (1e8,)))) for pair in (USUAL, INT4Z)
    )
    # Two bytes and four, and what acknowledgements and heartbeats add on a busy machine.
    assert 2 < usual.bytes_up / parameters < 3.5
    assert 4 < usual.bytes_down / parameters < 6
    assert few.bytes_up < 0.7 * usual.bytes_up and few.bytes_down < 0.5 * usual.bytes_down
    # All replies pass the broker's line, which is the busiest; none is faster than its line but for
    # the burst that a token bucket lets through at once.
    assert usual.line_seconds == pytest.approx(2 * 8 * usual.bytes_down / 1e8, rel=0.3)
    assert all(seconds > 0.9 * usual.line_seconds for seconds in usual.seconds)
    assert usual.worker_bits_per_s == (1e8, 1e8)
    assert usual.broker_cpu_s and usual.worker_cpu_s


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_streaming_stands_still_for_less_than_a_sync_of_as_many_bytes(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid, "STREAMING_TIMES", 10.0)
    (found,) = measure(place, Part("streaming", TINY, USUAL, 2, (5e7,)))
    parameters = parameters_of(TINY)
    assert 2 < found.bytes_up / parameters < 3.5
    assert 4 < found.bytes_down / parameters < 6
    assert (found.fragments, found.sync_every) == (grid.FRAGMENTS, grid.STREAMING_STEPS)
    assert len(found.seconds) == 2 and found.sync_seconds
    assert found.hidden == pytest.approx(1 - found.median_s / found.sync_seconds)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["sync", "quorum", "async"])
def test_slow_worker_comes_to_its_end_beside_fast_ones(
    place: Place, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(grid, "MIXED_STEP_S", 0.01)
    (found,) = measure(place, Part("mixed", TINY, USUAL, 3, (1e9,), mode))
    assert found.worker_bits_per_s == (1e9, 1e9, grid.SLOW)
    assert (found.mode, len(found.seconds)) == (mode, grid.MIXED_SYNCS)
    assert len(found.slow_seconds) == grid.MIXED_SYNCS
    assert (found.quorum, found.grace_s) == (
        (2, grid.GRACE_S) if mode == "quorum" else (None, None)
    )


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_when_it_is_stopped_in_the_middle(
    number: signal.Signals, tmp_path: Path
) -> None:
    if reason := why_not():
        pytest.skip(reason)
    command = [sys.executable, "-m", "diloco_lab.network", "lan", "--quick", "--out", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as running:
        assert running.stdout is not None
        assert b"1/5" in running.stdout.readline()  # its networks and first processes are there
        mine = f"{namespaces.PREFIX}-{running.pid}-*"
        assert list(namespaces.NAMES.glob(mine))
        running.send_signal(number)
        said = running.communicate(timeout=60)[0]
    assert running.returncode == (130 if number == signal.SIGINT else 143), said
    assert not list(namespaces.NAMES.glob(mine))
