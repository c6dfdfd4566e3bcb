"""The attacks: what is measured, what counts as broken, and each against a broker in this process."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from typer.testing import CliRunner

from diloco_broker import Broker, BrokerConfig
from diloco_broker.core.members import permissions
from diloco_broker.storage.key_folder import KeyFolder
from diloco_lab.chaos.__main__ import app
from diloco_lab.chaos.attacks import drill, floods, keyed, peers, watch, words
from diloco_lab.chaos.attacks.peers import Scene, Tally
from diloco_lab.chaos.attacks.report import MIB, Row
from diloco_lab.chaos.attacks.table import ATTACKS, BY_NAME, attack
from diloco_lab.driver import machine
from diloco_protocol.clients import Operator, find_keys
from diloco_protocol.description import describe
from diloco_protocol.errors import DilocoError
from diloco_tools.processes import ChildFailed
from diloco_worker import DiLoCoClient, manifest_of
from kit.process_kit import LOCAL, PATIENCE_S

needs_proc = pytest.mark.skipif(bool(machine.complaint()), reason="memory is in /proc")
SECONDS = 0.2  # of each attack here
NOTHING = {"messages": 1, "connections": 1, "bytes": 1, "ended": 0, "refused": 0}


def test_pace_counts_parts_of_the_rounds_that_a_window_cuts() -> None:
    times = [1.0, 2.0, 3.0, 4.0, 8.0]
    assert watch.pace(times, 1.0, 3.0) == 1.0
    assert watch.pace(times, 1.5, 3.5) == 1.0
    assert watch.pace(times, 4.0, 8.0) == 0.25
    assert watch.pace(times, 4.0, 6.0) == 0.25, "half of a round that lasted four seconds"
    assert watch.pace([1.0, 2.0], 2.0, 4.0) == 0, "no round has ended since"


def test_rounds_are_those_of_versions_that_came_after_others(tmp_path: Path) -> None:
    rounds = watch.Rounds(tmp_path / "audit.jsonl")
    assert rounds.seen() == []
    began = time.monotonic()
    lines = [json.dumps({"after": after}) + "\n" for after in (None, ["r", 0, "t"])]
    (tmp_path / "audit.jsonl").write_text("".join(lines))
    (at,) = rounds.seen()
    assert began <= at <= time.monotonic() and rounds.seen() == [at]


@pytest.mark.parametrize(
    ("log", "is_forged"),
    [
        ("12:00:00 INFO a joined from host?12:00:00 WARNING FORGED", False),
        ("12:00:00 INFO a\x1b]0;x\x07", True),
        ("12:00:00 INFO a\n12:00:00 WARNING FORGED", True),
    ],
)
def test_forged_lines_of_a_log_are_found(tmp_path: Path, log: str, is_forged: bool) -> None:
    (tmp_path / "log").write_text(log)
    (tmp_path / "history").write_text(json.dumps({"text": "joined from a?b"}) + "\n")
    found = watch.forged(tmp_path / "log", [tmp_path / "history", tmp_path / "none"], "FORGED")
    assert bool(found) == is_forged


def a_row(**known: Any) -> Row:
    plain: dict[str, Any] = {
        "by": "stranger",
        "calm": 5.0,
        "beside": 5.0,
        "answer_ms": 20.0,
        "echo_ms": 5.0,
    }
    return Row("an attack", attempts=NOTHING, **{"through": [], **plain, **known})


@pytest.mark.parametrize(
    ("known", "words_of_it"),
    [
        ({}, None),
        ({"through": ["a monitor did pause"]}, "GOT THROUGH: a monitor did pause"),
        ({"beside": 4.0}, None),
        ({"beside": 3.9}, "rounds closed at 0.78 of their pace"),
        ({"calm": 0.0, "beside": 0.0}, "at 0.00 of their pace"),
        ({"rise_mib": 65.0}, "memory rose by 65 MiB"),
        ({"kept_mib": 129.0}, "129 MiB have stayed"),
        ({"by": "key: worker", "rise_mib": 127.0, "kept_mib": 127.0}, None),
        ({"by": "key: worker", "rise_mib": 129.0}, "memory rose by 129 MiB"),
        ({"answer_ms": 54.0}, None),
        ({"answer_ms": 56.0}, "took 56 ms (an echo 5 ms)"),
        ({"written_kib": 65.0}, "65 KiB went to the log"),
    ],
)
def test_each_bound_is_a_sentence_where_it_is_broken(
    known: dict[str, Any], words_of_it: str | None
) -> None:
    found = a_row(**known).broken()
    assert len(found) == (words_of_it is not None)
    assert words_of_it is None or words_of_it in found[0]


def test_second_measurement_forgives_pace_and_answers_but_not_what_stays() -> None:
    first = a_row(beside=1.0, answer_ms=500.0, rise_mib=80.0, written_kib=70.0)
    found = drill.twice(first, a_row(rise_mib=1.0, written_kib=2.0))
    assert found.first == first.plain() and found.kept == 1.0 and found.answer_ms == 20.0
    assert [each.split(": ")[1] for each in found.broken()] == [
        "the broker's memory rose by 80 MiB",
        "70 KiB went to the log and the history",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--out", "x", "attack"), "--out"),
        (("attack", "--only", "teapot"), "teapot"),
        (("attack",), "no /proc"),
    ],
)
def test_impossible_call_is_refused(
    arguments: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    if said == "no /proc":
        monkeypatch.setattr(machine, "complaint", lambda: said)
    result = CliRunner().invoke(app, [*arguments])
    assert result.exit_code == 2
    assert said in result.stderr


@pytest.mark.parametrize("error", [ChildFailed("w0 died"), DilocoError("the pulse may not join")])
def test_rows_that_were_measured_are_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def measure(*_: object, **__: object) -> Iterator[Row]:
        yield a_row()
        raise error

    monkeypatch.setattr(drill, "measured", measure)
    options = drill.Options(tmp_path, is_quick=True, names=("one-byte",))
    rows, problems = drill.drill(options, lambda _: None)
    assert rows == [a_row()] and problems == [str(error)]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.Linear(2, 2).weight.detach().clone())


@pytest.fixture(scope="module", params=[False, True], ids=["open", "keys"])
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Broker, KeyFolder | None, Path]]:
    """A broker with a model, with keys or without, and the file that describes its model."""
    tmp_path = tmp_path_factory.mktemp("attacks")
    folder = KeyFolder.make(tmp_path / "keys") if request.param else None
    options: dict[str, Any] = {"save_dir": str(tmp_path / "run"), "save_every": keyed.SAVE_EVERY}
    host = None
    if folder is not None:
        folder.add_all([*keyed.WORKERS, keyed.OPERATOR, keyed.MONITOR])
        host = folder.path / "clients" / f"worker-{keyed.VICTIM.name}.key"
        options["keys"] = str(folder.path)
    description = tmp_path / "description"
    description.write_bytes(describe(manifest_of(Model())).packed)
    with Broker(BrokerConfig(**{**LOCAL, **options})) as broker:
        with DiLoCoClient(broker.address, keys=host, timeout=PATIENCE_S) as first:
            first.join(Model())
        yield broker, folder, description


def attacked(name: str, place: tuple[Broker, KeyFolder | None, Path]) -> tuple[Tally, Operator]:
    broker, folder, description = place
    owner = BY_NAME[name].with_key
    of_owner = "" if folder is None or owner is None else str(_key_file(folder, owner))
    tally = attack(
        name,
        keys=of_owner,
        description=str(description),
        address=broker.address,
        feed=broker.feed_address,
        seconds=SECONDS,
        folder="" if folder is None else str(folder.path),
    )
    keys = None if folder is None else find_keys(str(_key_file(folder, keyed.OPERATOR)))
    return tally, Operator(broker.address, timeout=PATIENCE_S, keys=keys)


def _key_file(folder: KeyFolder, owner: Any) -> Path:
    return folder.path / "clients" / f"{owner.role.value}-{owner.name}.key"


@pytest.mark.parametrize("name", [each.name for each in ATTACKS])
def test_attack_is_tried_and_nothing_gets_through(
    name: str, place: tuple[Broker, KeyFolder | None, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(floods, "JOINS", 5)
    monkeypatch.setattr(floods, "HEADER_BYTES", 700_000)
    monkeypatch.setattr(floods, "EMPTIES_OF_A_KEY", 30_000)
    monkeypatch.setattr(floods, "EMPTY_FRAMES", 300_000)
    monkeypatch.setattr(floods, "ENDLESS_BYTES", 256 * MIB)
    monkeypatch.setattr(floods, "ENDS_WITHIN_S", PATIENCE_S)
    monkeypatch.setattr(peers, "ANSWERS_WITHIN_S", PATIENCE_S)
    monkeypatch.setattr(keyed, "FEED_WITHIN_S", SECONDS)
    if place[1] is None and not BY_NAME[name].without_keys:
        pytest.skip("it is an attack on keys")
    tally, operator = attacked(name, place)
    with operator:
        assert operator.ask("status").ok, "the broker is there"
    assert tally.connections > 0
    assert tally.through == []


def test_attack_says_what_got_through(monkeypatch: pytest.MonkeyPatch) -> None:
    with Broker(BrokerConfig(**LOCAL)) as broker:
        scene = Scene(broker.address, seconds=0.0)
        monkeypatch.setattr(words, "RUINOUS", ({"outer_lr": 0.5},))
        words.settings(scene)
        monkeypatch.setattr(floods, "JOINS", 1)
        monkeypatch.setattr(floods, "HEADER_BYTES", 1150)
        floods.large_joins(scene)
        scene.close()
    settings, joins = scene.tally.through
    assert "outer learning rate" in settings.lower()
    assert "a join with a header" in joins


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("set, with a worker's key", {"set {'outer_lr'", "pause {}"}),
        ("a monitor's key that steers", {"a monitor did pause", "join", "pull"}),
        ("another worker's name, session", {"join as w0", "credit in the session of another"}),
    ],
)
def test_attack_with_a_key_says_what_got_through(
    name: str,
    expected: set[str],
    place: tuple[Broker, KeyFolder | None, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if place[1] is None:
        pytest.skip("it is an attack on keys")
    monkeypatch.setattr(permissions, "check", lambda *_: None)
    monkeypatch.setattr(permissions, "is_own", lambda *_: True)
    monkeypatch.setattr(keyed, "STEERING", ("pause",))
    monkeypatch.setattr(peers, "ANSWERS_WITHIN_S", 0.5)
    tally, operator = attacked(name, place)
    with operator:
        operator.ask("resume")
    through = tally.through
    assert all(any(each.startswith(said) for each in through) for said in expected), through


@needs_proc
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_drill_starts_trains_attacks_and_writes_what_it_found(tmp_path: Path) -> None:
    command = ["attack", "--quick", "--only", "ruinous,monitor", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, command)
    document = json.loads((tmp_path / "out" / "attack.json").read_text())
    assert [each["attack"] for each in document["rows"]] == [
        "set to ruinous values",
        "a monitor's key that steers",
    ]
    assert all(each["through"] == [] and each["calm"] > 0 for each in document["rows"])
    # On a busy machine a pace may be broken; what is broken decides the exit code.
    assert result.exit_code == (1 if document["problems"] else 0), result.output
