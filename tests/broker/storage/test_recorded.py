"""What an older release has saved is loaded, written again byte for byte, and trained on."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from diloco_broker.storage.checkpoint import found, load, save
from diloco_broker.storage.history import ACTIONS, HISTORY
from diloco_tools.monitor.feed.replay import read_history
from kit.recorded_runs import AFTER, RECORDED, RUNS, TRAINED_ON, trained

RECORDINGS = Path(__file__).parent / "recorded"


@pytest.mark.parametrize("name", RUNS)
def test_recorded_checkpoint_is_written_again_as_it_was(name: str, tmp_path: Path) -> None:
    (old,) = found(RECORDINGS / name)
    new = save(tmp_path, load(old), keep=1)
    assert sorted(file.name for file in new.iterdir()) == sorted(
        file.name for file in old.iterdir()
    )
    for file in old.iterdir():
        assert (new / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize("name", RUNS)
def test_recorded_run_trains_on_as_in_the_release_that_wrote_it(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(RECORDINGS / name, folder)
    reached = trained(name, str(folder), RECORDED, TRAINED_ON)
    expected = load_file(RECORDINGS / name / AFTER)
    assert reached.keys() == expected.keys()
    # The last bits of torch's own AdamW depend on the processor; a lost moment costs 0.1 an element.
    rtol, atol = (1e-5, 1e-6) if name == "torch" else (0, 0)
    for key, value in expected.items():
        torch.testing.assert_close(reached[key], value, rtol=rtol, atol=atol)
    newest = load(found(folder)[0])
    assert (newest.incarnation, newest.number) == (2, TRAINED_ON)


def rounds(folder: Path) -> list[int]:
    """Numbers of the rounds in a history, all of whose lines are understood."""
    assert not read_history(folder).skipped
    lines = [json.loads(line) for line in (folder / HISTORY).read_text().splitlines()]
    return [line["number"] for line in lines if line["kind"] == "round"]


def test_recorded_history_is_read_and_continued(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(RECORDINGS / "streaming", folder)
    old, actions = (folder / HISTORY).read_bytes(), (folder / ACTIONS).read_bytes()
    assert rounds(folder) == list(range(RECORDED))
    trained("streaming", str(folder), RECORDED, TRAINED_ON)
    assert (folder / HISTORY).read_bytes().startswith(old)
    assert (folder / ACTIONS).read_bytes() == actions
    assert rounds(folder) == list(range(TRAINED_ON))
