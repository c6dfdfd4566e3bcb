"""`diloco-worker run`, with real processes: variables, exit codes, signals, restarts, the background."""

import os
import signal
import socket
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diloco_worker.cli.app import app
from diloco_worker.launching import (
    ASKED,
    BEGAN_WELL_S,
    LONGEST_PAUSE_S,
    OVER,
    RUN_IS_OVER,
    TERMINATED,
    Restarts,
    meant,
)
from kit.process_kit import Child, Processes, wait_for

SERVER = ("--server", "127.0.0.1:1")
# Prints its variables, and ends with the given code.
SHOW = ("sh", "-c", "env; exit $0")
# Prints the signals that it receives; SIGTERM ends it with 7.
LISTEN = """
import os, signal, sys
wanted = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1}
signal.pthread_sigmask(signal.SIG_BLOCK, wanted)  # one before `pause` would wait
print("listens, leader:", os.getsid(0) == os.getpid(), flush=True)
while True:
    number = signal.sigwait(wanted)
    print("got", signal.Signals(number).name, flush=True)
    if number == signal.SIGTERM:
        sys.exit(7)
"""


def launch(processes: Processes, *words: str, **env: str) -> Child:
    return processes.run("-m", "diloco_worker", "run", *words, **env)


def script(processes: Processes, text: str) -> tuple[str, str]:
    (processes.folder / "script.py").write_text(text)
    return sys.executable, "script.py"


def is_running(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def host() -> str:
    return socket.gethostname()[:50]


@pytest.mark.parametrize(("address", "code"), [(SERVER, 0), (("127.0.0.1:1",), 42)])
def test_exit_code_is_that_of_the_script(
    processes: Processes, address: tuple[str, ...], code: int
) -> None:
    made = launch(processes, *address, "--", *SHOW, str(code))
    assert made.ends() == code
    assert f"DILOCO_WORKER_ID={host()}-0\n" in made.output
    assert "DILOCO_SERVER=tcp://127.0.0.1:1\n" in made.output


@pytest.mark.slow
def test_each_slot_and_each_shard_has_its_own_name(processes: Processes) -> None:
    program = (*SHOW, "0")
    shards = ("--shard-index", "3", "--num-shards", "8")
    by_slot, by_shard, by_name = (
        launch(processes, *SERVER, *words, *program)
        for words in (("--slot", "2"), shards, ("--worker-id", "gpu", *shards))
    )
    assert [made.ends() for made in (by_slot, by_shard, by_name)] == [0, 0, 0]
    assert f"DILOCO_WORKER_ID={host()}-2\n" in by_slot.output
    assert "SHARD" not in by_slot.output
    assert f"DILOCO_WORKER_ID={host()}-3\n" in by_shard.output
    assert "DILOCO_SHARD_INDEX=3\n" in by_shard.output
    assert "DILOCO_NUM_SHARDS=8\n" in by_shard.output
    assert "DILOCO_WORKER_ID=gpu\n" in by_name.output


@pytest.mark.slow
def test_name_is_that_of_the_key(processes: Processes, tmp_path: Path) -> None:
    assert processes.asks("keygen", "keys", "berlin", "oslo") == 0
    program = (*SHOW, "0")
    file = tmp_path / "keys" / "clients" / "worker-oslo.key"
    by_file = launch(processes, *SERVER, "--keys", str(file), *program)
    chosen = launch(processes, *SERVER, "--keys", "keys", "--worker-id", "berlin", *program)
    unclear = launch(processes, *SERVER, "--keys", "keys", *program)
    assert [made.ends() for made in (by_file, chosen, unclear)] == [0, 0, 2]
    assert "DILOCO_WORKER_ID=oslo\n" in by_file.output
    assert f"DILOCO_KEYS={file}\n" in by_file.output
    assert "worker-berlin.key" in chosen.output
    assert "name the file: worker-berlin.key, worker-oslo.key" in unclear.output


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "address is missing"),
        (("--server", "file://"), "it must be an address"),
        (("file://",), "it must be an address"),
        ((*SERVER, "10.0.0.1:8512"), "omit one of them"),
        (("10.0.0.1:8512", *SERVER), "options come before"),
        ((*SERVER, "--shard-index", "3", "--num-shards", "3"), "DILOCO_SHARD_INDEX is '3'"),
        ((*SERVER, "--shard-index", "3"), "DILOCO_NUM_SHARDS is ''"),
        ((*SERVER, "--log-file", "x"), "--log-file needs --detach"),
        ((*SERVER, "--worker-id", "\x1b[2J"), "printable"),
    ],
)
def test_wrong_usage_starts_nothing(tmp_path: Path, words: tuple[str, ...], sentence: str) -> None:
    program = (sys.executable, "-c", f"open({str(tmp_path / 'began')!r}, 'w')")
    made = CliRunner().invoke(app, ["run", "--restarts", "3", *words, "--", *program])
    assert made.exit_code == 2
    assert sentence in made.output
    assert not (tmp_path / "began").exists()


def test_signals_reach_the_script_once_each(processes: Processes) -> None:
    made = launch(processes, *SERVER, "--restarts", "3", *script(processes, LISTEN))
    made.says("listens, leader: True")  # or Ctrl-C in a terminal would reach it twice
    for which in (signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        made.gets(which)
        made.says(f"got {which.name}")
    assert made.ends() == 7, "its own exit code, and no restart after a signal"
    assert made.output.count("got ") == 4
    assert made.output.count("listens") == 1


@pytest.mark.slow
def test_signal_ends_a_script_without_a_handler(processes: Processes) -> None:
    plain = "import signal; print('begins', flush=True)\nwhile True: signal.pause()"
    for which, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        made = launch(processes, *SERVER, "--restarts", "3", *script(processes, plain))
        made.says("begins")
        made.gets(which)
        assert made.ends() == code


# As torchrun: it exits with 1 whatever the codes of its processes.
HIDE = """
import os, subprocess, sys
print("begins", flush=True)
told = "import os, pathlib; pathlib.Path(os.environ['DILOCO_END_FILE']).write_text(%r)" % sys.argv[1]
if sys.argv[1]:
    subprocess.run([sys.executable, "-c", told], check=True)
sys.exit(1)
"""


@pytest.mark.parametrize(
    ("word", "options", "code"),
    [("over", ("--over-is-success",), 0), ("", ("--over-is-success",), 1)],
)
def test_end_file_counts_where_a_launcher_hides_the_exit_code(
    processes: Processes, word: str, options: tuple[str, ...], code: int
) -> None:
    program = script(processes, HIDE)
    made = launch(processes, *SERVER, *options, "--restarts", "1", "--", *program, word)
    assert made.ends() == code
    assert made.output.count("begins") == (1 if word else 2)
    assert ("restart 1 of 1 in 1 s" in made.output) == (not word)
    assert ("ended with code 1, which means" in made.output) == bool(word)


@pytest.mark.slow
def test_stale_end_file_is_ignored(processes: Processes, tmp_path: Path) -> None:
    end = tmp_path / "end"
    end.write_text("over")
    program = script(processes, HIDE)
    made = launch(processes, *SERVER, "--", *program, "", DILOCO_END_FILE=str(end))
    assert made.ends() == 1
    assert not end.exists()


def test_worker_in_the_background_is_ended_by_its_pid(processes: Processes, tmp_path: Path) -> None:
    made = launch(processes, *SERVER, "--slot", "1", "--detach", *script(processes, LISTEN))
    assert made.ends() == 0
    pid = int(made.says("pid ").split()[1])
    log = tmp_path / made.says("log ").split()[1]
    try:
        assert log.name == f"diloco-worker-{host()}-1.log"
        wait_for(lambda: "listens" in log.read_text())
        assert os.getsid(pid) == pid, "a closed terminal does not end it"
        os.kill(pid, signal.SIGTERM)
        wait_for(lambda: not is_running(pid))
        assert "got SIGTERM" in log.read_text()
    finally:
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)


FINAL = (0, 2, RUN_IS_OVER, 126, 127, 130, TERMINATED)


@pytest.mark.parametrize("code", [*FINAL, 1, 137, 129, 139])
def test_failures_alone_are_restarted_as_often_as_allowed(code: int) -> None:
    restarts = Restarts(most=2)
    pauses = [restarts.pause(code, ran_s=1.0) for _ in range(3)]
    assert pauses == ([None] * 3 if code in FINAL else [1.0, 2.0, None])
    assert restarts.pause(1, ran_s=1.0) == (1.0 if code in FINAL else None), (
        "final ones do not count"
    )


def test_end_file_replaces_a_lost_exit_code() -> None:
    meanings = {(1, OVER): RUN_IS_OVER, (1, ASKED): TERMINATED, (137, OVER): RUN_IS_OVER}
    meanings |= {(1, ""): 1, (1, "nonsense"): 1, (0, ASKED): 0, (2, OVER): 2}
    assert {each: meant(*each) for each in meanings} == meanings


def test_pauses_double_up_to_a_minute_until_a_long_run() -> None:
    restarts = Restarts(most=1000)
    pauses = [restarts.pause(1, 1.0) for _ in range(1000)]
    assert pauses[:4] == [1.0, 2.0, 4.0, 8.0]
    assert set(pauses[6:]) == {LONGEST_PAUSE_S}
    restarts = Restarts(most=2)
    assert [restarts.pause(1, 1.0) for _ in range(2)] == [1.0, 2.0]
    assert restarts.pause(1, BEGAN_WELL_S) == 1.0
    assert restarts.pause(1, BEGAN_WELL_S - 1) == 2.0
    assert Restarts(most=0).pause(1, 1e6) is None
