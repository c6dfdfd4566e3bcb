"""`make lan` and `make sites`: their files and pages; tiny runs over such lines."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diloco_lab.bench.process_pool import ProcessPool
from diloco_lab.bench.sizes import parameters_of
from diloco_lab.driver.records import BadFile, read_document, text_of
from diloco_lab.driver.tables import WHERE, blocks_in, filled
from diloco_lab.network.__main__ import SKIPPED, app
from diloco_lab.network.lan import grid
from diloco_lab.network.lan.grid import INT4Z, USUAL, LanFile, Measurement, Part
from diloco_lab.network.lan.measuring import measure
from diloco_lab.network.lan.tables import KEYS, blocks
from diloco_lab.network.namespaces import Place, one_switch, several_sites
from diloco_lab.network.sites import tables as sites
from diloco_lab.network.sites.rounds import rounds
from kit.limited_networks import network_or_skip
from kit.paths import LAB, ROOT

PAGE = ROOT / "docs" / "performance.md"
SHOWN = {WHERE, "sync", "streaming", "mixed"}  # the terminal shows all
TINY = "0.4M"


# 10M parameters, one worker, bf16 up and fp32 down at 1 Gb/s: 40 MB that take 0.32 s, and 0.4 s.
A_ROUND = Measurement(
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


def a_file(*measurements: Measurement) -> LanFile:
    return LanFile(
        "python -m diloco_lab.network lan", "2026-01-01T00:00:00", {"cores": 2}, measurements
    )


A_ROUND_OF_SITES = sites.Measurement(
    way="star",
    parameters=10**7,
    sites=2,
    workers=6,
    wire_dtype="bf16",
    reply_dtype="fp32",
    wan_bits_per_s=5e7,
    delay_s=0.04,
    seconds=(30.0,),
    bytes_up=1.2e8,
    bytes_down=2.4e8,
    averaged=6,
    load=0.1,
    at="2026-01-01T00:00:00+00:00",
)
RELAYS = replace(A_ROUND_OF_SITES, way="relays", seconds=(12.0,), bytes_up=4e7, bytes_down=8e7)
A_LOSS = sites.Loss("relay killed", 9.0, 2.0, None, 6, "2026-01-01T00:01:00+00:00")
COMMAND = "python -m diloco_lab.network sites"


@pytest.mark.parametrize(
    "found",
    [
        a_file(
            A_ROUND, replace(A_ROUND, kind="mixed", mode="quorum", quorum=2, slow_seconds=(3.0,))
        ),
        sites.SitesFile(COMMAND, {"cores": 2}, (A_ROUND_OF_SITES, RELAYS), (A_LOSS,)),
    ],
    ids=["lan", "sites"],
)
def test_file_is_read_as_it_was_written(found: LanFile | sites.SitesFile, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    path.write_text(text_of(found))
    assert read_document(path, type(found)) == found


@pytest.mark.parametrize("text", ["", "[]", '{"measurements": [{"kind": "round"}]}', "no JSON"])
def test_what_is_no_file_of_measurements_gets_a_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lan.json"
    path.write_text(text)
    with pytest.raises(BadFile, match="no measurements"):
        read_document(path, LanFile)


def test_page_in_the_repository_is_that_of_the_measurements_beside_it() -> None:
    text = PAGE.read_text()
    of_lan = blocks(read_document(LAB / "lan.json", LanFile))
    of_sites = sites.blocks(read_document(LAB / "sites.json", sites.SitesFile))
    assert filled(filled(text, of_lan, "lan"), of_sites, "sites") == text
    keys = {match["key"] for match in blocks_in("lan").finditer(text)}
    assert keys == SHOWN and keys <= {WHERE, *KEYS}


def test_other_measurements_change_the_page_between_its_marks_only() -> None:
    before = "Words.\n<!-- table: lan/sync -->\n| 1M | 7 s |\n<!-- end -->\nMore.\n"
    after = filled(before, blocks(a_file(replace(A_ROUND, workers=2, seconds=(0.5,)))), "lan")
    assert "| 10M | bf16/fp32 | 0.50 s, 64% |" in after
    assert after.startswith("Words.\n<!-- table: lan/sync -->\n") and after.endswith("-->\nMore.\n")
    assert "1M | 7 s" not in after


def test_command_without_root_says_why_it_measures_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("diloco_lab.network.__main__.why_not", lambda: "it needs root")
    done = CliRunner().invoke(app, ["lan", "--quick", "--out", str(tmp_path)])
    assert done.exit_code == SKIPPED
    assert done.stderr == "python -m diloco_lab.network lan: skipped: it needs root\n"
    as_make_has_it = ["lan", "--quick", "--out", str(tmp_path), "--skip-is-success"]
    assert CliRunner().invoke(app, as_make_has_it).exit_code == 0


def test_page_is_written_without_measuring(tmp_path: Path) -> None:
    file, written = tmp_path / "lan.json", tmp_path / "page.md"
    file.write_text(text_of(a_file(replace(A_ROUND, workers=2))))
    written.write_text("<!-- table: lan/sync -->\n<!-- end -->\n")
    assert (
        CliRunner().invoke(app, ["lan", "--page", str(written), "--into", str(file)]).exit_code == 0
    )
    assert "0.40 s, 80%" in written.read_text()
    written.unlink()
    done = CliRunner().invoke(app, ["lan", "--page", str(written), "--into", str(file)])
    assert (done.exit_code, "page.md cannot be read" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--page", "page.md"], "takes the file of results"),
        (["--into", "/nowhere/sites.json"], "cannot be written"),
    ],
)
def test_option_that_cannot_work_gets_a_sentence(options: list[str], sentence: str) -> None:
    result = CliRunner().invoke(app, ["sites", *options])
    assert result.exit_code == 2
    assert sentence in result.output


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """Lines for three workers."""
    with network_or_skip(one_switch(3)) as made, ProcessPool(tmp_path, 1) as pool:
        yield Place(made, pool)


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
def test_relays_carry_a_third_of_the_bytes(tmp_path: Path) -> None:
    """Three workers at each site: by the token buckets, with all headers."""
    members = several_sites(2, 3)
    with (
        network_or_skip(members, folder=tmp_path, delay_s=0.01) as made,
        ProcessPool(tmp_path, 0) as pool,
    ):
        place = Place(made, pool)
        found = {each.way: each for each in rounds(place, "0.4M", ("bf16", "fp32"), 1)}
    assert found["star"].averaged == found["relays"].averaged == 6
    assert found["star"].bytes_up / found["relays"].bytes_up == pytest.approx(3, rel=0.15)
    assert found["star"].bytes_down / found["relays"].bytes_down == pytest.approx(3, rel=0.15)
