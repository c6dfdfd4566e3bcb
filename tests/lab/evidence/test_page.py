"""The page of the evidence, the pictures, and the command that makes them."""

import math
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from typer.testing import CliRunner

from diloco_lab.driver.records import Results
from diloco_lab.evidence import page
from diloco_lab.evidence.__main__ import app
from diloco_lab.evidence.claim import Result, sent
from diloco_lab.evidence.conduct import Conducted, Study, key_of, measure
from diloco_lab.evidence.page import kills
from diloco_lab.evidence.parts import PARTS
from diloco_lab.evidence.trial import Trial, parameters
from kit.evidence_trials import a_result
from kit.paths import LAB, ROOT

COMMITTED, EVIDENCE = LAB / "evidence", ROOT / "docs" / "evidence.md"


def filled(file: Path, loss: float | None = 2.0) -> Results:
    """A file with made-up results of every part, of three seeds."""
    results = Results(file, key_of)
    study = Study(results)
    for part in PARTS.values():
        for trial in study.tuning(part):
            results.add(a_result(trial, 2.5))
        for trial in study.measuring(part):
            worse = trial.seed / 100 + (trial.arm == "alone") + trial.workers / 1000
            results.add(a_result(trial, None if loss is None else loss + worse))
    return results


def runs(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments)


def test_page_is_what_the_program_writes_from_the_committed_results(tmp_path: Path) -> None:
    page_file = tmp_path / "EVIDENCE.md"
    page_file.write_text(EVIDENCE.read_text())
    out = tmp_path / "evidence"
    out.mkdir()
    (out / "results.jsonl").write_text((COMMITTED / "results.jsonl").read_text())
    answer = runs("page", "--out", str(out), "--page", str(page_file))
    assert answer.exit_code == 0, answer.output
    assert page_file.read_text() == EVIDENCE.read_text()
    drawn = {path.name for path in out.glob("*.*g")}
    assert drawn == {path.name for path in COMMITTED.glob("*.*g")}  # png and svg
    assert drawn == set(re.findall(r"/evidence/([a-z-]+\.(?:png|svg))\)", page_file.read_text()))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_claim_computed_from_scratch_is_the_committed_one() -> None:
    """Two workers against one, on one seed. Another processor rounds differently, so not to the bit."""
    committed = Study(Results(COMMITTED / "results.jsonl", key_of)).conducted(PARTS["workers"])
    losses = {}
    for arm in ("one worker", "M = 2"):
        was = committed.measured[arm][0]
        now = measure(Trial.from_plain(was["trial"]))
        losses[arm] = now["loss"]
        assert now["loss"] == pytest.approx(was["loss"], rel=0.015)
        assert now["curve"][1][2] == pytest.approx(was["curve"][1][2], rel=0.01)
        for way in ("bytes_up", "bytes_down"):
            assert now[way] == pytest.approx(was[way], rel=0.001)
    (finding,) = (each for each in committed.findings if each.claim.text == "with 2 workers")
    percent = 100 * (math.exp(losses["M = 2"] - losses["one worker"]) - 1)
    assert percent == pytest.approx(finding.values[0], abs=3)


@pytest.mark.parametrize("points", [3, 9])
def test_part_has_a_picture_where_there_are_curves(points: int, tmp_path: Path) -> None:
    results = filled(tmp_path / "results.jsonl")
    study = Study(results)
    for trial in (each for part in PARTS.values() for each in study.measuring(part)):
        curve = results[trial.key]["curve"]
        results[trial.key]["curve"] = [*curve, *[curve[-1]] * (points - len(curve))]
    for part in PARTS.values():
        conducted = study.conducted(part)
        assert page.has_curves(conducted) == (points == 9)
        if points == 9:
            path, is_svg = page.draw(conducted, tmp_path), part.axis == "bytes"
            assert path == tmp_path / f"{part.name}.{'svg' if is_svg else 'png'}"
            assert path.read_bytes().startswith(b"<?xml" if is_svg else b"\x89PNG")


def test_frontier_shows_the_bytes_of_each_arm_and_where_workers_were_killed(tmp_path: Path) -> None:
    part, size = PARTS["frontier"], sum(parameters("0.4M"))
    measured: dict[str, list[Result]] = {}
    for arm in part.arms:
        trial, every = arm.trial, arm.trial.every * arm.trial.sync_every
        steps = range(0, trial.steps + 1, every)
        curve = [[step, float(step), 5.0 - 3 * (step / trial.steps) ** 0.3] for step in steps]
        result = {**a_result(trial, 2.0), "curve": curve}
        measured[arm.name] = [{**result, "bytes_up": 4e7, "bytes_down": 8e7}] * 3
    text = page.draw(Conducted(part, {}, measured), tmp_path).read_text()
    assert ET.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
    assert "prefers-color-scheme:dark" in text
    assert all(f"{name}: 2.000" in text for name in measured)
    first, other = measured["data-parallel"][0], measured["H = 50, int4z"][0]
    assert sent(first)[-1] == 4 * size * 1000
    assert (sent(other)[0], sent(other)[-1]) == (
        5 * size,
        3e7,
    )  # a first version, a quarter of one up
    killed = kills(measured["H = 50, workers killed"][0])
    assert 2 < len(killed) < 15 and killed[-1] <= 20
    assert not kills(other)


def test_command_goes_on_with_what_is_missing_and_prints_each_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "runs"
    out.mkdir()
    filled(out / "results.jsonl")
    answer = runs("workers", "traffic", "--out", str(out))
    assert answer.exit_code == 0, answer.output
    assert "More workers, the same number of steps each" in answer.stdout
    assert answer.stdout.count("PASS") >= 1 and answer.stdout.count("NOT SHOWN") >= 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["weather"], "'weather'"),
        (["workers", "--data", "/nonexistent"], "/nonexistent"),
        (["page"], "measure one first"),
        (["workers", "--out", "/proc/here"], "/proc/here"),
    ],
)
def test_bad_options_give_one_sentence_and_exit_code_2(
    arguments: list[str], words: str, tmp_path: Path
) -> None:
    answer = runs("--out", str(tmp_path), *arguments)
    assert answer.exit_code == 2
    assert words in answer.stderr
    assert answer.stderr.startswith("python -m diloco_lab.evidence: ")
    assert answer.stderr.count("\n") == 1
