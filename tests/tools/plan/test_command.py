"""What the command takes, shows and draws, and the table of its page."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from diloco_protocol.errors import UsageError
from diloco_protocol.outer_advice import recommended
from diloco_protocol.quantities import parse_parameters
from diloco_tools.plan import quantities
from diloco_tools.plan.cli import app
from diloco_tools.plan.picture import FACTORS, curves, draw
from diloco_tools.plan.question import Question
from diloco_tools.plan.simulated.costs import Costs
from diloco_tools.plan.validation import Row, filled, read, rows
from kit.paths import LAB, ROOT

SMALL = ("--parameters", "10M", "--delay", "1ms")
PAGE, MEASURED = ROOT / "docs" / "performance.md", LAB / "lan.json"


def run(*words: str, columns: int = 80) -> Result:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": str(columns)})


# Quantities.


@pytest.mark.parametrize(
    ("read", "meant"),
    [
        (parse_parameters, {"124M": 124e6, "1.3B": 1.3e9, "7g": 7e9, "350e6": 350e6}),
        (quantities.rate, {"1G": 1e9, "2.5Gbit/s": 2.5e9, "50 Mb/s": 5e7}),
        (quantities.share, {"95%": 0.95, "0.95": 0.95}),
    ],
)
def test_quantities_are_parsed(read: Callable[[str], Any], meant: dict[str, float]) -> None:
    assert {text: read(text) for text in meant} == pytest.approx(meant)
    assert quantities.both_ways("100M") == pytest.approx((1e8, 1e8))
    assert quantities.both_ways("40Mb/s/250Mb/s") == pytest.approx((4e7, 2.5e8))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--parameters", "many"), "'many' is not a number of parameters"),
        (("--parameters", "-1"), "is not a number of parameters"),
        ((*SMALL, "--link", "fast"), "'fast' is not a rate"),
        ((*SMALL, "--link", "0M"), "is not a rate"),
        ((*SMALL, "--delay", "20 parsecs"), "not a duration"),
        ((*SMALL, "--target", "120%"), "is not a share"),
        ((*SMALL, "--tau", "soon"), "is not a number of steps"),
        ((), "--parameters"),
        ((*SMALL, "--fails-every", "0s"), "--fails-every"),
        ((*SMALL, "--broker-link", "5k"), "too slow"),
        (("validate", "no-such-file.json"), "make lan writes it"),
    ],
)
def test_wrong_input_gets_a_sentence(words: tuple[str, ...], said: str) -> None:
    found = run(*words, columns=300)
    assert found.exit_code == 2, found.output
    assert said in found.output


# What is shown.


def test_table_fits_80_columns_and_names_what_was_asked() -> None:
    found = run(*SMALL, "--workers", "3", "--link", "100M,1G,40M/250M", "--fails-every", "24h")
    assert found.exit_code == 0, found.output
    assert max(map(len, found.stdout.splitlines())) <= 80
    assert "10M parameters, 3 workers, sync, H = 500, bf16/fp32" in found.stdout
    for name in ("training has", "a round takes", "its memory", "a failure costs", "simulated"):
        assert name in found.stdout


def test_json_has_seconds_bytes_and_shares() -> None:
    found = json.loads(run(*SMALL, "--json").stdout)
    assert found["question"]["parameters"] == 10_000_000
    assert 0.99 < found["utilisation"] < 1.0
    assert found["broker_bytes_in"] == pytest.approx(4e7)
    assert found["broker_bytes_out"] == pytest.approx(8e7)
    day = 86400 / found["cycle_s"]
    assert found["broker_bytes_in_a_day"] == pytest.approx(day * found["broker_bytes_in"])
    assert found["target"] is None and found["failures"] is None
    assert (found["outer_lr"], found["warnings"]) == (0.6, [])


@pytest.mark.parametrize(
    ("workers", "steps", "said"),
    [
        (1, 30, "about 0.4 (0.4 for 1 worker at H = 30, arXiv 2503.09799)"),
        (3, 30, "about 0.6 (0.6 for 2 workers"),
        (4, 24, "at most 0.6"),
        (
            8,
            500,
            "at least 0.8 (0.8 for 8 workers at H = 30, arXiv 2503.09799; above 1 can be right)",
        ),
        (64, 30, "at least 0.8"),
    ],
)
def test_outer_learning_rate_is_recommended_by_workers_and_h(
    workers: int, steps: int, said: str
) -> None:
    assert recommended(workers, steps).startswith(said)


def test_small_h_is_warned_of() -> None:
    found = run(*SMALL, "-H", "10")
    assert "outer learning rate" in found.stdout and "H = 24 or more" in found.stdout
    found = run(*SMALL, "-H", "10", "--mode", "async")
    assert "outer learning rate" not in found.stdout and "H = 24" not in found.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_target_names_options_of_serve() -> None:
    words = (*SMALL, "-H", "5", "--broker-link", "100M", "--target", "90%", "--json")
    target = json.loads(run(*words).stdout)["target"]
    best = target["best"]
    assert "--sync-every" in target["text"]
    assert best["utilisation"] >= 0.9 or best["sync_every"] > 5
    assert set(best) >= {"num_fragments", "fragment_sync_delay", "wire_dtype", "reply_dtype"}


def test_fragments_overlap_unless_a_number_is_given() -> None:
    def delay(*words: str) -> Any:
        return json.loads(run(*SMALL, *words, "--json").stdout)["question"]["delay_steps"]

    assert delay() == 0
    assert delay("-P", "4") is None
    assert delay("-P", "4", "--tau", "3") == 3
    assert delay("--tau", "auto") is None


# The picture.


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_picture_has_a_curve_for_each_setting(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    question = Question(10_000_000, delays=(0.001,), sync_every=20)
    found = curves(question, Costs())
    assert found[0][0] == "bf16/fp32"
    assert len({name for name, _ in found}) == len(found) == 4
    for _, points in found:
        shares = [share for _, share in points]
        assert len(points) >= len(FACTORS) - 2
        assert shares[-1] >= shares[0]
    (_, slowest), *_, (_, fastest) = found[0][1]
    assert fastest > slowest, "without overlap the link counts"
    path = tmp_path / "plan.png"
    draw(question, found, path, 0.95)
    assert path.read_bytes().startswith(b"\x89PNG")


# Validation.


@pytest.fixture(scope="module")
def compared() -> list[Row]:
    return rows(read(MEASURED))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_page_has_the_table_of_the_measurements(compared: list[Row]) -> None:
    """Page, JSON and planner agree: diloco-plan validate --page docs/performance.md writes it."""
    page = PAGE.read_text()
    assert filled(page, compared, read(MEASURED)) == page


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_rounds_that_wait_for_their_line_are_predicted(compared: list[Row]) -> None:
    """Where replies are twice as long as pushes, the line is what a round waits for."""
    wide = [row for row in compared if row.question.wire_dtype == "bf16"]
    assert len(wide) >= 3
    assert all(row.is_met for row in wide)


@pytest.mark.parametrize("text", ["", "[]", '{"machine": {}, "measurements": []}', "{"])
def test_file_without_measurements_gets_a_sentence(text: str, tmp_path: Path) -> None:
    path = tmp_path / "lan.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="make lan"):
        read(path)
