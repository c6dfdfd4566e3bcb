"""`--auto`: scripts without DiLoCo, in real processes with a real broker."""

import sys

import pytest
import torch

from diloco_protocol import UsageError
from diloco_worker.auto import AUTO, with_auto
from kit.paths import KIT, ROOT
from kit.process_kit import Child, Processes

# Trains for the given number of steps; the seed is that of its parameters.
TRAIN = """
import sys, torch
seed, steps = int(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(seed)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(steps):
    model(torch.ones(4, 3)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", step, flush=True)
torch.save(model.state_dict(), f"{seed}.pt")
"""
# A forked child, such as a data loader's, makes an optimizer step before the script.
STEPS_IN_A_CHILD = """
import os, torch
def step(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return optimizer
child = os.fork()
if not child:
    step(torch.nn.Linear(3, 5))
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
model = torch.nn.Linear(3, 2)
optimizer = step(model)
optimizer.step()
"""
SHARED = """
import torch
one, other = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
other.weight, other.bias = one.weight, one.bias
optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
one(torch.ones(1, 3)).sum().backward()
optimizer.step()
print("trains on", flush=True)
"""
OWN = """
import torch
from diloco_worker import DiLoCoWorker
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with DiLoCoWorker(model, optimizer, worker_id="by hand"):
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
"""
# Two optimizers; one needs gradients that are tensors, the other's weight decay needs none.
NEEDS_GRADIENTS = """
import torch
class Muon(torch.optim.Optimizer):
    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                assert p.grad is not None
                p.add_(p.grad.sign(), alpha=-float(group["lr"]))
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
optimizers = (
    Muon(model[0].parameters(), lr=torch.tensor(0.5)),
    torch.optim.AdamW(model[1].parameters(), lr=0.5, weight_decay=0.5),
)
def step():
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.ones(4, 3)).pow(2).mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    print("changed", [not torch.equal(*both) for both in zip(before, model.parameters())])
step()
step()
print("rates", [float(each.param_groups[0]["lr"]) for each in optimizers])
"""
# The head alone first, then all of it by another optimizer.
TWO_PHASES = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
def train(optimizer):
    for _ in range(3):
        model(torch.ones(4, 3)).pow(2).mean().backward()
        optimizer.step()
train(torch.optim.SGD(model[1].parameters(), lr=0.1))
train(torch.optim.AdamW(model.parameters()))
"""
# Ends before it trains; its first argument says what it does before.
DOES_NOT_TRAIN = """
import subprocess, sys, torch
if sys.argv[1] == "optimizer":
    torch.optim.SGD(torch.nn.Linear(3, 2).parameters(), lr=0.1)
if sys.argv[1] == "child":
    subprocess.run([sys.executable, "-c", ""])
if sys.argv[1] == "background":
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
if sys.argv[1] == "error":
    raise ValueError("no such file")
"""
SHUFFLES = """
import torch
torch.manual_seed(42)
print("order", torch.randperm(1000)[:6].tolist(), flush=True)
"""


def script(processes: Processes, text: str) -> str:
    (processes.folder / "script.py").write_text(text)
    return "script.py"


def auto(processes: Processes, address: str, *words: str) -> Child:
    """Run a script in a process that has imported torch already, which saves seconds."""
    return processes.run("-m", "diloco_worker.auto", *words, DILOCO_SERVER=address)


@pytest.mark.slow
def test_unmodified_scripts_match_the_plain_hook_bit_for_bit(processes: Processes) -> None:
    options = ("--workers", "2", "--sync-every", "4", "--no-save", "--deterministic")
    found = []
    for how in ("plain_script", "unmodified_script"):
        _, address = processes.serve(*options)
        path = str(KIT / f"{how}.py")
        if how == "plain_script":
            made = [processes.run(path, name, DILOCO_SERVER=address) for name in ("a", "b")]
        else:
            python = (sys.executable, "-u", path, "a")
            launched = ("-m", "diloco_worker", "run", "--server", address, "--auto", "--", *python)
            as_module = ("-m", f"kit.{how}", "b")
            made = [
                processes.run(*launched, PYTHONPATH=str(ROOT / "tests")),
                auto(processes, address, *as_module),
            ]
        assert [each.ends() for each in made] == [0, 0], made[0].output + made[1].output
        found.append([torch.load(processes.folder / f"{name}.pt") for name in ("a", "b")])
    for one, other in zip(*found, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert "Attached to TinyModel with 121 parameters, trained by AdamW" in made[0].output
    assert "dropped" not in made[0].output


@pytest.mark.slow
def test_late_worker_drops_its_first_step(processes: Processes) -> None:
    _, address = processes.serve("--sync-every", "2", "--no-save", "--outer", "sgd")
    path = script(processes, TRAIN)
    assert auto(processes, address, path, "1", "2").ends() == 0
    late = auto(processes, address, path, "2", "1")
    assert late.ends() == 0
    assert "dropped" in late.output
    third = auto(processes, address, path, "3", "1")
    assert third.ends() == 0
    one, other = (torch.load(processes.folder / f"{seed}.pt") for seed in (2, 3))
    assert all(torch.equal(one[name], other[name]) for name in one), "both have the run's"


@pytest.mark.slow
def test_script_ends_with_its_run_for_good(processes: Processes) -> None:
    _, address = processes.serve("--sync-every", "5", "--no-save")
    program = (sys.executable, script(processes, TRAIN), "1", "100000000")
    launched = ("-m", "diloco_worker", "run", "--server", address, "--auto", "--restarts", "3")
    made = processes.run(*launched, *program)
    made.says("step 20")
    assert processes.asks("shutdown", "--yes", "--address", address) == 0
    assert made.ends() == 3
    assert "code 3" in made.output
    assert "Traceback" not in made.output


@pytest.mark.slow
def test_children_of_a_script_are_not_part_of_the_run(processes: Processes) -> None:
    broker, address = processes.serve("--sync-every", "2", "--no-save")
    made = auto(processes, address, script(processes, STEPS_IN_A_CHILD))
    assert made.ends() == 0, made.output
    assert made.output.count("Attached to Linear with 8 parameters") == 1
    broker.says("Round 0 closed")


def test_script_that_cannot_join_says_why(processes: Processes) -> None:
    made = auto(processes, "127.0.0.1:1", script(processes, SHARED))
    assert made.ends() == 2
    assert "2 models" in made.output
    assert "trains on" not in made.output


def test_script_with_its_own_worker_is_left_alone(processes: Processes) -> None:
    _, address = processes.serve("--no-save")
    made = auto(processes, address, script(processes, OWN))
    assert made.ends() == 0
    assert "its own DiLoCoWorker" in made.output
    assert "Attached" not in made.output


@pytest.mark.slow
def test_dropped_steps_keep_their_gradients(processes: Processes) -> None:
    _, address = processes.serve("--sync-every", "2", "--no-save")
    made = auto(processes, address, script(processes, NEEDS_GRADIENTS))
    assert made.ends() == 0, made.output
    changed = [line for line in made.output.splitlines() if line.startswith("changed")]
    assert changed == [f"changed {[False] * 4}", f"changed {[True] * 4}"]
    assert "rates [0.5, 0.5]" in made.output
    assert "trained by Muon and AdamW" in made.output


@pytest.mark.slow
def test_optimizer_that_replaces_the_first_is_named(processes: Processes) -> None:
    _, address = processes.serve("--sync-every", "2", "--no-save")
    made = auto(processes, address, script(processes, TWO_PHASES))
    assert made.ends() == 2
    assert "AdamW also trains Sequential, but made no step in the first round of SGD" in made.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("done", "code"), [("", 0), ("optimizer", 2), ("child", 2), ("background", 2), ("error", 1)]
)
def test_script_without_training_is_reported(processes: Processes, done: str, code: int) -> None:
    made = auto(processes, "127.0.0.1:1", script(processes, DOES_NOT_TRAIN), done)
    assert made.ends() == code, made.output
    assert ("did not take part in the run" in made.output) == (done != "error")


@pytest.mark.slow
def test_each_worker_may_shuffle_from_its_own_seed(processes: Processes) -> None:
    path = script(processes, SHUFFLES)

    def order(*options: str) -> str:
        words = ("run", "--server", "127.0.0.1:1", "--auto", *options, "--", sys.executable, path)
        made = processes.run("-m", "diloco_worker", *words)
        assert made.ends() == 0
        return made.says("order")

    orders = [order("--own-seed", "--worker-id", name) for name in ("a", "b", "a")]
    assert orders[0] == orders[2] != orders[1]
    assert order() not in orders


@pytest.mark.parametrize(
    ("command", "place"),
    [
        ("python train.py --auto -m x", 1),
        ("/usr/bin/python3.12 -u -X dev -W error train.py", 6),
        ("python3 -Werror -m pkg.train -m", 2),
    ],
)
def test_auto_is_inserted_before_the_script(command: str, place: int) -> None:
    words = command.split()
    assert with_auto(words) == [*words[:place], *AUTO, *words[place:]]


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("torchrun train.py", "torchrun starts the script in other processes.*process_group"),
        ("accelerate launch train.py", "accelerate starts"),
        ("python -m torch.distributed.run train.py", "torch.distributed.run starts"),
        ("python /usr/bin/torchrun train.py", "torchrun starts"),
        ("srun train.py", "begins with 'srun'"),
        ("pythonista train.py", "begins with 'pythonista'"),
        ("python -c pass", "needs a script"),
        ("python -cpass", "needs a script"),
        ("python -", "needs a script"),
        ("python -u", "needs a script"),
        ("python -m", "needs a script"),
    ],
)
def test_command_without_a_script_is_refused(command: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        with_auto(command.split())
