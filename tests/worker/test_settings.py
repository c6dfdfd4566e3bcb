"""Keywords and the DILOCO_* variables behind them."""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from inspect import signature
from logging import WARNING
from typing import Any

import pytest
import torch
from torch import nn, optim
from typer.main import get_command

from diloco_broker.cli.app import app
from diloco_protocol import UsageError
from diloco_worker import DiLoCoClient, DiLoCoWorker, WorkerOptions
from diloco_worker.settings import RANKS, resolve, say_once, unknown_variables
from kit.paths import ROOT

PARTS = ("protocol", "broker", "worker", "tools")
# The value of a variable, and the setting.
VARIABLES: dict[str, tuple[str, Any]] = {
    "server": ("tcp://10.0.0.1:8512",) * 2,
    "sync_every": ("20", 20),
    "worker_id": ("rtx", "rtx"),
    "keys": ("a.key", "a.key"),
    "wire_dtype": ("fp16", "fp16"),
    "timeout": ("60", 60.0),
    "expect": (
        "num_fragments=4, fragment_update_alpha=0.5, dylu=no, mode=sync",
        {"num_fragments": 4, "fragment_update_alpha": 0.5, "dylu": False, "mode": "sync"},
    ),
    "heartbeat_interval": ("2.5", 2.5),
    "max_sync_retries": ("7", 7),
    "dylu": ("0", False),
    "tied": ("a.w = b.w, a.v=b.v", [["a.w", "b.w"], ["a.v", "b.v"]]),
    "extra": ("gpu=a100, site=berlin", {"gpu": "a100", "site": "berlin"}),
    "pin_memory": ("no", False),
    "keep_global_on": ("CPU", "cpu"),
    "handle_signals": ("Exit", "exit"),
    "audit": ("log.jsonl", "log.jsonl"),
    "tensor_threads": ("3", 3),
    "local": ("outer_lr=0.8, outer_momentum=0.5", {"outer_lr": 0.8, "outer_momentum": 0.5}),
}
ALL = {f"DILOCO_{name.upper()}": text for name, (text, _) in VARIABLES.items()}
OPTIONS = {each.name for each in fields(WorkerOptions)}


def test_keyword_or_option_takes_precedence_over_its_variable() -> None:
    settings = resolve({}, ALL)
    assert {name: getattr(settings, name) for name in VARIABLES} == {
        name: value for name, (_, value) in VARIABLES.items()
    }
    keywords = signature(DiLoCoWorker).parameters.keys() - {"model", "optimizer", "process_group"}
    assert VARIABLES.keys() == keywords - {"options"} | OPTIONS
    assert resolve({"sync_every": 5}, ALL).sync_every == 5
    for options in (WorkerOptions(heartbeat_interval=0), {"heartbeat_interval": 0}):
        assert resolve({"options": options}, ALL).heartbeat_interval == 0


def test_page_names_few_variables_at_first_and_then_each_option() -> None:
    page = (ROOT / "docs" / "training-script.md").read_text()
    first, names = page.split("## Worker options")
    assert len(set(re.findall(r"DILOCO_[A-Z_]*[A-Z]", first))) <= 8
    assert all(f"| `{option}` |" in names for option in OPTIONS)


@pytest.mark.parametrize("variables", [{}, {"DILOCO_SYNC_EVERY": " "}])
def test_defaults_leave_the_choice_to_the_broker(variables: dict[str, str]) -> None:
    settings = resolve({}, variables)
    assert settings.wants == {}
    assert (settings.max_sync_retries, settings.timeout) == (3, 600.0)


def test_only_given_values_are_required_of_the_run() -> None:
    expected = {"num_fragments": 3, "fragment_sync_delay": "auto", "dylu": True}
    asked = {"sync_every": 5, "wire_dtype": "int8", "expect": expected, "timeout": 3.0}
    assert resolve(asked, {}).wants == {"sync_every": 5, "wire_dtype": "int8", **expected}
    # Only the worker decides whether it takes part in Dynamic Local Updates.
    assert resolve({"options": WorkerOptions(dylu=False)}, {}).wants == {}


@pytest.mark.parametrize(
    ("old", "wanted", "place"),
    [
        ({"num_fragments": 3}, {"expect": {"num_fragments": 3}}, "expect"),
        ({"fragment_sync_delay": "auto"}, {"expect": {"fragment_sync_delay": "auto"}}, "expect"),
        ({"fragment_update_alpha": 0.5}, {"expect": {"fragment_update_alpha": 0.5}}, "expect"),
        ({"dylu": True}, {"expect": {"dylu": True}}, "expect"),
        ({"dylu": False}, {"options": {"dylu": False}}, "WorkerOptions"),
        ({"pin_memory": False}, {"options": {"pin_memory": False}}, "WorkerOptions"),
        ({"extra": {"gpu": "a100"}}, {"options": {"extra": {"gpu": "a100"}}}, "WorkerOptions"),
    ],
)
def test_moved_keyword_still_works(old: dict[str, Any], wanted: dict[str, Any], place: str) -> None:
    (name,) = old
    both: dict[str, dict[str, Any]]
    both = {"expect": {"mode": "sync"}, "options": {"max_sync_retries": 1}}
    with pytest.warns(DeprecationWarning, match=f"{name} .*{place}") as warned:
        worker = a_worker(**both, **old)
    assert [each.filename for each in warned] == [__file__]
    new = {place: {**both[place], **wanted.get(place, {})} for place in both}
    assert worker._settings == a_worker(**new)._settings


def test_variable_of_a_moved_keyword_works_with_a_warning(warned: Callable[[], list[str]]) -> None:
    variables = {"DILOCO_NUM_FRAGMENTS": "4", "DILOCO_FRAGMENT_SYNC_DELAY": "auto"}
    expected = {"num_fragments": 4, "fragment_sync_delay": "auto"}
    assert resolve({}, variables).wants == expected
    assert resolve({"expect": {"num_fragments": 2}}, variables).wants["num_fragments"] == 2
    assert [sentence.split()[0] for sentence in warned()] == list(variables)


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("DILOCO_SYNC_EVERY", "often", "DILOCO_SYNC_EVERY is 'often'"),
        ("DILOCO_SYNC_EVERY", "0", "1 or more"),
        ("DILOCO_TIMEOUT", "nan", "DILOCO_TIMEOUT is nan"),
        ("DILOCO_TIMEOUT", "-1", "0 or more"),
        ("DILOCO_WIRE_DTYPE", "int3", "fp32, bf16, fp16"),
        ("DILOCO_SERVER", "8512", "tcp://"),
        ("DILOCO_SERVER", "tcp://10.0.0.1:", "tcp://"),
        ("DILOCO_SERVER", "tcp://:8512", "tcp://"),
        ("DILOCO_SERVER", "tcp://host:99999", "tcp://"),
        ("DILOCO_DYLU", "maybe", "1 or 0"),
        ("DILOCO_HANDLE_SIGNALS", "maybe", "'exit'"),
        ("DILOCO_EXPECT", "num_fragments", "num_fragments=4"),
        ("DILOCO_EXPECT", "num_fragment=4", "num_fragments"),
        ("DILOCO_EXTRA", "gpu", "gpu=a100"),
        ("DILOCO_WORKER_ID", "x" * 65, "64 printable"),
    ],
)
def test_invalid_value_is_named_with_its_variable(name: str, text: str, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve({}, {name: text})
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"sync_every": 0}, "sync_every is 0"),
        ({"sync_every": 2.5}, "sync_every is 2.5"),
        ({"sync_every": "5"}, "sync_every is '5'"),
        ({"sync_every": True}, "it must be a whole number"),
        ({"timeout": float("inf")}, "timeout is inf"),
        ({"process_group": object()}, "process_group"),
        ({"worker_id": "a\nb"}, "worker_id is"),
        ({"worker_id": 7}, "worker_id is 7"),
        ({"server": 5}, "server is 5"),
        ({"server": "tcp://*:8512"}, "must be an address like"),
        ({"wire_dtype": ["bf16"]}, r"wire_dtype is \['bf16'\]"),
        ({"expect": ["num_fragments"]}, "expect is"),
        ({"expect": {"num_fragments": torch.tensor(1)}}, "expect is"),
        ({"expect": {"sync_every": 5}}, "sync_every is a keyword"),
        ({"expect": {"num_fragment": 5}}, "did you mean num_fragments"),
        ({"options": 5}, "options is 5"),
        ({"options": {"extr": {}}}, "did you mean extra"),
        ({"options": {"dylu": 1}}, "dylu is 1"),
        ({"options": {"extra": ["a"]}}, r"extra is \['a'\]"),
        ({"options": {"extra": {"lr": torch.tensor(1.0)}}}, r"extra is {'lr': tensor.*"),
        ({"options": {"tied": ["a.w", "b.w"]}}, r"tied is \['a.w', 'b.w'\]"),
        ({"options": {"audit": 7}}, "audit is 7"),
        ({"options": {"local": {"outer_rate": 1.0}}}, "must be a dict of outer_lr, above 0"),
        ({"options": {"local": {"outer_lr": 0}}}, "must be a dict of outer_lr, above 0"),
        ({"server": "local", "keys": "a.key"}, "'local' runs without a broker, and keys need one"),
        ({"server": "local", "wire_dtype": "bf16"}, "wire_dtype='bf16' need one; leave them out"),
        (
            {"server": "local", "expect": {"num_fragments": 4}, "options": {"audit": "a.jsonl"}},
            "audit, num_fragments=4 need one",
        ),
    ],
)
def test_invalid_keyword_value_is_one_sentence(keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        a_worker(**keywords)


def a_worker(**keywords: Any) -> DiLoCoWorker:
    model = nn.Linear(2, 2)
    return DiLoCoWorker(model, optim.SGD(model.parameters(), lr=1.0), **keywords)


@pytest.fixture
def warned(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], list[str]]]:
    """The warnings of a process that has logged nothing yet, visible without configured logging."""
    for name in (*RANKS, *(name for name in os.environ if name.startswith("DILOCO_"))):
        monkeypatch.delenv(name, raising=False)
    say_once.cache_clear()
    yield lambda: [each.getMessage() for each in caplog.records if each.levelno >= WARNING]
    say_once.cache_clear()


def train_alone() -> None:
    with a_worker():
        pass


@pytest.mark.parametrize("rank", RANKS)
def test_only_the_first_process_of_a_launcher_warns_that_it_trains_alone(
    warned: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, rank: str
) -> None:
    monkeypatch.setenv(rank, "3")
    train_alone()
    assert warned() == []
    monkeypatch.setenv(rank, "0")
    train_alone()
    assert len(warned()) == 1


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("DILOCO_SERVR", "did you mean DILOCO_SERVER?"),
        ("DILOCO_SYNC_STEPS", "did you mean DILOCO_SYNC_EVERY?"),
        ("DILOCO_KEEP_ON", "did you mean DILOCO_KEEP_GLOBAL_ON?"),
        ("DILOCO_QQQ", "docs/training-script.md"),
    ],
)
def test_variable_that_nothing_reads_is_named_with_the_nearest_known_one(
    warned: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, name: str, advice: str
) -> None:
    monkeypatch.setenv(name, "5")
    train_alone()
    train_alone()
    sentence, alone = warned()
    assert sentence.startswith(name)
    assert advice in sentence
    assert "trains alone" in alone and "DILOCO_SERVER" in alone, "each is said once"


def test_variables_of_the_source_and_empty_ones_are_known() -> None:
    assert unknown_variables({**ALL, "DILOCO_FEED": "x", "DILOCO_SYNC_EVRY": "", "HOME": "/"}) == []
    sources = [path for part in PARTS for path in sorted((ROOT / part).rglob("*.py"))]
    names = {
        name for path in sources for name in re.findall(r"DILOCO_[A-Z_]*[A-Z]", path.read_text())
    }
    assert {"DILOCO_SERVER", "DILOCO_FEED"} <= names
    assert unknown_variables(dict.fromkeys(names, "x")) == []


def test_names_beside_those_of_other_libraries_exist() -> None:
    """Of the page's tables, what stands in backticks in the last column."""
    page = (ROOT / "docs" / "training-script.md").read_text()
    _, tables = page.split("## Names in Forgather and torchft")
    rows = [line.rsplit(" | ", 1)[-1] for line in tables.splitlines() if line.startswith("| ")]
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    broker: Any = get_command(app)
    known = {
        r"serve (--.*)": [
            each for option in broker.commands["serve"].params for each in option.opts
        ],
        r"(\w+)=": signature(DiLoCoWorker).parameters,
        r"WorkerOptions\.(.*)": OPTIONS,
        r"diloco\.(.*)": dir(DiLoCoWorker),
        r"DiLoCoClient\.(.*)": dir(DiLoCoClient),
        r"diloco-broker (\S+).*": broker.commands,
    }
    for pattern, ours in known.items():
        found = {match[1] for name in named if (match := re.fullmatch(pattern, name))}
        assert found and found <= set(ours), pattern
