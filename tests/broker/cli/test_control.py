"""Steering a broker that serves: the operator's socket, the commands, the logs, and the numbers."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from typer.testing import CliRunner

from diloco_broker import Broker, BrokerConfig
from diloco_broker.cli.app import app
from diloco_broker.cli.operator import reached_end
from diloco_broker.storage.history import ACTIONS, HISTORY
from diloco_protocol.clients import Operator
from diloco_protocol.errors import Unreachable, UsageError
from diloco_protocol.frames import pack, unpack
from diloco_protocol.messages import Control, Result
from kit.process_kit import Processes, a_free_address, wait_for
from kit.whole_run import joined, make_config, mlp, run, trainees

PATIENCE_S = 20.0


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker(make_config(workers=2, sync_every=4, save_dir=str(tmp_path / "run"))) as broker:
        yield broker


def invoke(broker: Broker, *words: str) -> tuple[int, str]:
    """Run a command at this broker; its exit code, and all it said."""
    result = CliRunner().invoke(app, [*words, "--address", broker.address])
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("settings", "reached"),
    [
        ({"max_rounds": 0}, False),
        *(({"max_rounds": rounds}, True) for rounds in (1, 2, 3)),  # the third is open
        ({"max_rounds": 9}, False),
        ({"token_budget": 100}, True),
        ({"token_budget": 101}, False),
        ({"max_time": "1m"}, True),
        ({"max_time": "2m"}, False),
        ({"max_time": "nonsense"}, False),
        ({"outer_lr": 0.5}, False),
    ],
)
def test_status_tells_which_end_is_reached(settings: dict[str, Any], reached: bool) -> None:
    totals = {"tokens": 100, "open_s": 60}
    said = reached_end(settings, {"round": {"number": 2}, "totals": totals, "end": None})
    assert (said is not None) is reached


def test_end_that_is_reached_is_to_be_confirmed(broker: Broker) -> None:
    assert invoke(broker, "set", "--max-rounds", "1")[0] == 0, "no round has begun"
    with joined(broker, mlp(), 2):
        code, said = invoke(broker, "set", "--max-rounds", "1")
        assert (code, "--yes" in said) == (2, True)
        assert invoke(broker, "set", "--max-rounds", "1", "--yes")[0] == 0


def lines_of(broker: Broker, name: str) -> list[dict[str, Any]]:
    assert broker.config.save_dir is not None
    path = Path(broker.config.save_dir) / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_every_action_is_in_the_log_of_actions_and_in_the_history(broker: Broker) -> None:
    with Operator(broker.address, who="ann@desk") as operator:
        operator.ask("set", outer_lr=0.5, workers=3)
        operator.ask("pause")
        operator.ask("resume")
        operator.ask("set", outer_lr=-1)  # refused: no action
        data = operator.ask("status").data
    assert any("ann@desk (unproven): workers 2 -> 3" in event["text"] for event in data["events"])
    wait_for(lambda: len(lines_of(broker, ACTIONS)) == 4)
    first = lines_of(broker, ACTIONS)[0]
    assert (first["who"], first["what"]) == ("ann@desk", "set outer_lr")
    assert (first["before"], first["after"]) == (0.7, 0.5)
    assert [line["what"] for line in lines_of(broker, ACTIONS)[1:]] == [
        "set workers", "pause", "resume",
    ]  # fmt: skip
    wait_for(
        lambda: sum("ann@desk" in line.get("text", "") for line in lines_of(broker, HISTORY)) == 4
    )


def test_history_has_the_start_each_round_each_event_and_the_end(tmp_path: Path) -> None:
    with Broker(make_config(sync_every=4, save_dir=str(tmp_path))) as broker:
        run(broker, trainees(1), 12)
    lines = lines_of(broker, HISTORY)
    assert lines[0]["kind"] == "start"
    assert lines[-1]["kind"] == "stop"
    rounds = [line for line in lines if line["kind"] == "round"]
    assert [(line["number"], line["version"]) for line in rounds] == [(0, 1), (1, 2), (2, 3)]
    assert rounds[-1]["workers"][0]["id"] == "w0"
    assert rounds[-1]["averaged"] == 1
    assert rounds[-1]["bytes_up"] > rounds[0]["bytes_up"] > 0
    assert any(line["kind"] == "event" and "joins" in line["text"] for line in lines)
    assert len({line["epoch"] for line in lines}) == 1
    models = [line["model"] for line in lines if line["kind"] == "start"]
    assert models[-1] is not None, "written again once the model is known"


def test_commands_do_what_they_say(broker: Broker) -> None:
    with joined(broker, mlp(), 2):
        code, said = invoke(broker, "status")
        assert code == 0
        assert "2 alive" in said
        assert "w1" in said
        code, said = invoke(broker, "status", "--json")
        assert json.loads(said)["counts"]["alive"] == 2
        code, said = invoke(broker, "set", "--outer-lr", "0.5", "--grace", "0", "--json")
        assert (code, json.loads(said)["changes"][0]["after"]) == (0, 0.5)
        for command in ("save", "pause", "resume"):
            assert invoke(broker, command)[0] == 0
        code, said = invoke(broker, "save-all", "--wait", "0", "--json")
        assert (code, json.loads(said)["waiting"]) == (1, ["w0", "w1"])
        assert invoke(broker, "kick", "w1", "--yes")[0] == 0
        code, said = invoke(broker, "status", "--json")
        assert [row["id"] for row in json.loads(said)["workers"]] == ["w0"]
        assert invoke(broker, "shutdown", "--yes")[0] == 0
        wait_for(lambda: invoke(broker, "status", "--timeout", "0.2")[0] == 2)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["kick", "absent", "--yes"], 1),
        (["kick", "absent"], 2),
        (["shutdown"], 2),
        (["stop-all"], 2),
        (["set"], 2),
        (["set", "--outer-lr", "-1"], 1),
        (["set", "--quorum", "1"], 1),
        (["save"], 1),
        (["status", "--timeout", "0"], 2),
    ],
    ids=str,
)
def test_refused_command_exits_with_one_line(broker: Broker, words: list[str], code: int) -> None:
    got, said = invoke(broker, *words)
    assert (got, said.count("\n")) == (code, 1), said
    with Operator(broker.address) as operator:
        assert operator.ask("status").data["outer"]["lr"] == 0.7


@pytest.mark.parametrize("words", [["status"], ["status", "--json"]], ids=str)
def test_refused_status_is_an_error(
    broker: Broker, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a broker of another version, which answers with an error."""
    monkeypatch.setattr(Operator, "ask", lambda *_, **__: Result(1, False, "another version"))
    code, said = invoke(broker, *words)
    assert (code, "another version" in said) == (1, True)


def test_start_after_the_last_round_says_so_and_ends(processes: Processes, tmp_path: Path) -> None:
    model = mlp()
    options: dict[str, Any] = {"workers": 1, "sync_every": 4, "save_dir": str(tmp_path / "run")}
    delta = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    free = "tcp://127.0.0.1:*"
    config = BrokerConfig(**options, bind=free, feed=free)
    with Broker(config) as first, joined(first, model, 1) as (client,):
        for _ in range(2):
            client.push(delta)
            client.pull()
    words = ("--save-dir", options["save_dir"], "--sync-every", "4", "--max-rounds", "1")
    second, _ = processes.serve(*words)
    assert "has made 2" in second.says("--max-rounds 1")
    assert second.ends() == 0


@pytest.mark.parametrize("command", ["status", "save", "pause", "resume", "save-all"])
def test_broker_that_is_not_there_is_one_sentence_and_exit_2(command: str) -> None:
    address = a_free_address()
    words = [command, "--address", address, "--timeout", "0.2"]
    result = CliRunner().invoke(app, words)
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert address in result.output
    result = CliRunner().invoke(app, [*words, "--json"])
    assert (result.exit_code, json.loads(result.stdout)["ok"]) == (2, False)


def test_misspelt_name_is_named() -> None:
    with (
        pytest.raises(Unreachable, match=r"no-such-host\.invalid.*spelling"),
        Operator("no-such-host.invalid", timeout=0.1) as operator,
    ):
        operator.ask("status")


def test_operator_hears_only_the_answer_to_its_own_request() -> None:
    """Frames that are not a message, and answers to other requests, are skipped."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.linger = 0
    port = socket.bind_to_random_port("tcp://127.0.0.1")

    def answer() -> None:
        assert socket.poll(int(1000 * PATIENCE_S))
        route, *frames = socket.recv_multipart()
        message, _ = unpack(frames)
        assert isinstance(message, Control)
        assert message.arguments["who"] == "me"
        assert list(message.arguments["deep"]) == [1]
        socket.send_multipart([route, b"no message"])
        socket.send_multipart([route, *pack(Result(message.request + 7, True, "another's"))])
        socket.send_multipart([route, *pack(Result(message.request, True, "its own"))])

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        with Operator(f"tcp://127.0.0.1:{port}", timeout=PATIENCE_S, who="me") as operator:
            assert operator.ask("anything", deep=[1]).text == "its own"
            operator.timeout = 0.05
            with pytest.raises(Unreachable, match="kick"):
                operator.ask("kick", worker="a")
            with pytest.raises(UsageError, match="cannot be sent"):
                operator.ask("set", outer_lr=object())
    finally:
        thread.join(PATIENCE_S)
        socket.close()
        context.term()
