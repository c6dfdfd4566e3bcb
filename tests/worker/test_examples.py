"""The examples without other libraries: they run, learn, stay short, and take part in a run."""

import json
import re

import pytest

from diloco_worker import RUN_IS_OVER
from kit.examples import BROKER, FOLDER, STEPS, losses, started, two_train
from kit.process_kit import Child, Processes, a_free_address


@pytest.mark.parametrize(
    "name",
    [
        "plain_loop.py",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("amp_compile.py", "muloco.py", "resume.py")
        ),
    ],
)
def test_two_workers_train_by_the_example(processes: Processes, name: str) -> None:
    options = ["--no-compile"] if name == "amp_compile.py" else []
    for output in two_train(processes, name, *options):
        first, *_, last = losses(output)
        assert last < first, output
        assert "after 4 pushes" in output


def test_example_trains_alone_with_an_outer_optimizer(processes: Processes) -> None:
    child = started(processes, "muloco.py", "a", "local")
    assert child.ends(within=90) == 0, child.output
    first, *_, last = losses(child.output)
    assert last < first and "after 1 pushes" in child.output


@pytest.mark.slow
def test_example_ends_with_the_code_for_a_run_that_is_over(processes: Processes) -> None:
    broker = processes.broker(**{**BROKER, "workers": 1, "max_rounds": 2})
    child = started(processes, "plain_loop.py", "a", broker.address())
    assert child.ends(within=90) == RUN_IS_OVER, child.output
    assert "after 2 pushes" in child.output


@pytest.mark.slow
def test_killed_example_resumes(processes: Processes) -> None:
    address = processes.broker(**BROKER).address()
    often = ("--save-every", "5")
    other = started(processes, "resume.py", "b", address, *often, "--checkpoint", "b.pt")
    first = started(processes, "resume.py", "a", address, *often, "--checkpoint", "a.pt")
    first.says("step 20")
    first.kill()
    again = started(processes, "resume.py", "a", address, *often, "--checkpoint", "a.pt")
    for child in (again, other):
        assert child.ends(within=90) == 0, child.output
    (begun,) = (int(line.split()[-1]) for line in again.output.splitlines() if "begins" in line)
    assert 15 <= begun < STEPS


@pytest.mark.slow
def test_worker_of_two_processes_resumes_as_one_of_three(processes: Processes) -> None:
    """The example of FSDP2, killed in the middle."""
    address = processes.broker(**BROKER).address()
    other = started(processes, "resume.py", "b", address, "--checkpoint", "b.pt")

    def launched(count: int) -> list[Child]:
        place = {
            "WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": a_free_address().rpartition(":")[2],
        }
        often = ("--steps", str(STEPS), "--save-every", "5")
        env = {"DILOCO_SERVER": address, "DILOCO_WORKER_ID": "a", **place}
        command = (str(FOLDER / "fsdp.py"), *often)
        return [processes.run(*command, RANK=str(rank), **env) for rank in range(count)]

    first = launched(2)
    first[0].says("step 20")
    for child in first:
        child.kill()
    again = launched(3)
    for child in (*again, other):
        assert child.ends(within=90) == 0, child.output
    begun = int(again[2].says("process 2 of 3 begins at step").split()[-1])
    assert 15 <= begun < STEPS
    assert len({child.says("done with a loss").split("after")[-1] for child in again}) == 1


@pytest.mark.slow
def test_notebook_trains_three_workers(capsys: pytest.CaptureFixture[str]) -> None:
    cells = json.loads((FOLDER / "three_workers.ipynb").read_text())["cells"]
    scope: dict[str, object] = {}
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            assert not cell["outputs"] and cell["execution_count"] is None, "kept without outputs"
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), scope)
    printed = re.findall(r"(?:round|parameters) ([\d.]+)", capsys.readouterr().out)
    first, last, final = map(float, printed)
    assert last < first and final < first
