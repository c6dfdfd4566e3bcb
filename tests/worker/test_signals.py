"""How a training script ends on SIGTERM or Ctrl-C, also twice, anywhere in the loop.

Most scripts run in their own processes; the broker is in a thread of this one, so that a test sees
whether the worker left (one that vanishes counts as dead).
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco_broker import Broker
from diloco_broker.core.rounds.streaming import StreamingRound
from diloco_protocol.messages import Leave
from diloco_worker import DiLoCoWorker
from diloco_worker.transport.sigterm import EXIT_CODE, Termination
from kit.process_kit import Processes, a_free_address, wait_for
from kit.scripted_broker import ScriptedBroker
from kit.scripted_training import ScriptedTraining
from kit.whole_run import an_mlp, make_config

pytest_plugins = ("kit.worker_fixtures",)

# Time limit of "at once" and "within 10 s" on a busy machine.
SOON_S = 30.0

SCRIPT = """
import sys, threading, torch
from torch import nn
from diloco_worker import DiLoCoWorker

torch.set_num_threads(1)
torch.manual_seed(0)
manners = sys.argv[1]
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
steps = 0
try:
    with DiLoCoWorker(model, optimizer, timeout=600) as diloco:
        while True:
            model(torch.randn(8, 4)).pow(2).mean().backward()
            optimizer.step()
            steps += 1
            print("step", steps, flush=True)
            threading.Event().wait(0.01)
            if diloco.should_stop and manners == "polite":
                print("stops because", diloco.stop_reason, flush=True)
                break
    print("after the with", flush=True)
finally:
    print("unwound", flush=True)
"""


@pytest.fixture(autouse=True)
def _script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)


def serving(**options: Any) -> Broker:
    """A broker that waits long after a broken connection."""
    return Broker(make_config(**{"sync_every": 4, "disconnect_grace": 60.0} | options))


@pytest.mark.parametrize("at_a_boundary", [False, True])
@pytest.mark.parametrize(
    ("number", "manners", "code"),
    [
        (signal.SIGTERM, "polite", 0),
        (signal.SIGTERM, "careless", EXIT_CODE),
        (signal.SIGINT, "polite", -signal.SIGINT),
    ],
)
def test_signal_ends_a_script_through_its_with_and_notifies_the_broker(
    processes: Processes, number: signal.Signals, manners: str, code: int, at_a_boundary: bool
) -> None:
    """A script that reads `should_stop` ends by itself, any other after its next step.

    The first round may wait for a worker that never joins.
    """
    with serving(workers=2 if at_a_boundary else 1) as broker:
        worker = processes.run("train.py", manners, DILOCO_SERVER=broker.address)
        worker.says("step 3" if at_a_boundary else "step 6")
        state = broker._loop.core.state
        if at_a_boundary:
            wait_for(lambda: any(m.figures.state == "pushing" for m in state.members))
        worker.gets(number)
        assert worker.ends(SOON_S) == code
        wait_for(lambda: len(state.members) == 0 and state.totals.deaths == 0)
        if at_a_boundary and number is signal.SIGTERM:
            assert isinstance(state.round, StreamingRound)
            counted = {c.worker_id for c in state.round.contributions.values() if c.is_whole}
            assert len(counted) == 1, "its uploaded push counts after it left"
    is_term = number is signal.SIGTERM
    assert "unwound" in worker.output
    assert ("stops because SIGTERM" in worker.output) == (code == 0)
    assert ("after the with" in worker.output) == (code == 0)
    assert worker.output.count("Received SIGTERM") == is_term
    assert ("KeyboardInterrupt" in worker.output) == (not is_term)


def test_sigterm_ends_a_worker_that_waits_for_its_last_push(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting = Termination.waiting

    @contextlib.contextmanager
    def interrupted(self: Termination) -> Iterator[None]:
        with waiting(self):
            signal.raise_signal(signal.SIGTERM)
            yield

    each = an_mlp(0)
    with serving(workers=2, fragment_sync_delay=3) as broker:
        worker = DiLoCoWorker(each.model, each.optimizer, broker.address, timeout=600).start()
        for _ in range(4):
            each.step()
        monkeypatch.setattr(Termination, "waiting", interrupted)
        with pytest.raises(SystemExit) as ended:
            worker.close()
    assert ended.value.code == EXIT_CODE


def test_sigterm_ends_the_wait_for_an_absent_broker(processes: Processes) -> None:
    worker = processes.run("train.py", "polite", DILOCO_SERVER=a_free_address())
    worker.says("aiting")
    worker.gets(signal.SIGTERM)
    assert worker.ends(SOON_S) == 143


def test_ctrl_c_does_not_hang_with_a_silent_broker(processes: Processes) -> None:
    broker, address = processes.serve("--sync-every", "4", "--heartbeat-timeout", "0")
    worker = processes.run("train.py", "polite", DILOCO_SERVER=address)
    worker.says("step 6")
    broker.gets(signal.SIGSTOP)
    worker.gets(signal.SIGINT)
    assert worker.ends(SOON_S) == -signal.SIGINT
    assert "unwound" in worker.output


@pytest.mark.parametrize("is_ended", [True, False])
def test_ending_script_waits_for_its_push_and_an_interrupted_one_for_its_upload(
    training: ScriptedTraining, broker: ScriptedBroker, is_ended: bool
) -> None:
    worker = training.begins(config={"fragment_sync_delay": 3})
    training.steps(4)
    error = KeyboardInterrupt() if is_ended else None
    training.does(worker.__exit__, type(error) if error else None, error, None)
    push, _ = training.takes()
    if not is_ended:
        broker.hears_nothing_of(Leave, 0.2)
        training.serves(5, 1, push)
    leave = broker.hears(Leave)
    assert ("KeyboardInterrupt" in leave.reason) == is_ended
    training.done()


TORN = """
import os, signal, sys, torch
from torch import nn
import diloco_worker.model.merging as merging
from diloco_worker import DiLoCoWorker

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
copy_in, copied = merging._copy_in, []

def then_comes_the_signal(target, values):
    copy_in(target, values)
    copied.append(values.clone())
    if len(copied) == 3:  # the first of the two layers of the second version
        os.kill(os.getpid(), int(sys.argv[1]))

merging._copy_in = then_comes_the_signal
try:
    with DiLoCoWorker(model, optimizer, timeout=600):
        while True:
            model(torch.ones(1, 4)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
finally:
    whole = all(torch.equal(p.detach(), v) for p, v in zip(model.parameters(), copied[-2:]))
    print("copied", len(copied), "whole", whole, flush=True)
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, EXIT_CODE), (signal.SIGINT, -signal.SIGINT)]
)
def test_signal_during_a_merge_leaves_a_consistent_model(
    processes: Processes, number: int, code: int
) -> None:
    """Else the exit checkpoint of a script would have one layer of a version and not the other."""
    (processes.folder / "torn.py").write_text(TORN)
    with serving() as broker:
        variables = {"DILOCO_SERVER": broker.address, "DILOCO_HANDLE_SIGNALS": "exit"}
        worker = processes.run("torn.py", str(int(number)), **variables)
        assert worker.ends(SOON_S) == code
    assert "copied 4 whole True" in worker.output


@pytest.mark.parametrize("is_set_before", [True, False])
def test_handler_of_the_script_stays(is_set_before: bool) -> None:
    heard: list[int] = []
    termination = Termination(lambda: None)
    if not is_set_before:
        termination.install()
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    if is_set_before:
        termination.install()
    os.kill(os.getpid(), signal.SIGTERM)
    termination.restore()
    os.kill(os.getpid(), signal.SIGTERM)
    assert heard == [signal.SIGTERM] * 2
    assert not termination.is_asked


def test_echo_of_a_sigterm_is_ignored_but_no_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """systemd also sends one to the script, and `diloco-worker run` forwards its own."""
    now = [50.0]
    termination = Termination(lambda: None, lambda: now[0])
    termination.is_training = True
    termination.install()
    ended: list[int] = []
    monkeypatch.setattr(os, "kill", lambda _, number: ended.append(number))
    for now[0] in (50.0, 50.0, 50.9):
        signal.raise_signal(signal.SIGTERM)
        assert termination.is_asked and not ended
    now[0] = 51.1
    signal.raise_signal(signal.SIGTERM)
    assert ended == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    termination.restore()


@pytest.fixture
def termination() -> Iterator[Termination]:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    made = Termination(lambda: None)
    made.is_training = True
    made.install()
    yield made
    made.restore()


def presses(_: Termination) -> None:
    signal.raise_signal(signal.SIGINT)


def fails(_: Termination) -> None:
    raise MemoryError


def waits(termination: Termination, meanwhile: Callable[[Termination], None] | None = None) -> None:
    with termination.waiting():
        if meanwhile is not None:
            meanwhile(termination)


def goes_on(_: Termination) -> None:
    pass


Action = Callable[[Termination], None]


@pytest.mark.parametrize(
    ("actions", "done", "is_raised"),
    [
        ([presses, goes_on], 2, True),  # after the protected section
        ([goes_on], 1, False),
        ([presses, fails], 1, True),  # kept where an error is raised
        ([lambda term: waits(term, presses), goes_on], 0, True),  # waiting ends at once
        ([presses, waits, goes_on], 1, True),
        ([presses, presses, goes_on], 1, True),  # the second one interrupts
    ],
)
def test_held_ctrl_c_is_raised_once(
    termination: Termination, actions: list[Action], done: int, is_raised: bool
) -> None:
    count, was_raised = 0, False
    try:
        with termination.held():
            for action in actions:
                action(termination)
                count += 1
    except KeyboardInterrupt:
        was_raised = True
    assert (count, was_raised) == (done, is_raised)
    with termination.held():
        pass  # it is not pending any more
    with pytest.raises(KeyboardInterrupt):
        presses(termination)


@pytest.mark.usefixtures("termination")
def test_forked_child_that_inherits_the_handler_dies_of_sigterm() -> None:
    """Data loaders end their processes so."""
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(tell, b"!")
            signal.pause()
        finally:
            os._exit(0)
    os.read(ready, 1)  # a signal sent during the fork is lost
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM
    os.close(ready)
    os.close(tell)
