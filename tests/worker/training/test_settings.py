"""Keywords and the DILOCO_* variables behind them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from logging import WARNING
from typing import Any

import pytest
import torch
from torch import nn, optim

from diloco_protocol import UsageError
from diloco_worker import DiLoCoWorker
from diloco_worker.training.settings import (
    RANKS,
    Settings,
    default_worker_id,
    resolve,
    say_once,
    unknown_variables,
)
from kit.paths import ROOT

PARTS = ("protocol", "broker", "worker", "tools")
ALL = {
    "DILOCO_SERVER": "tcp://10.0.0.1:8512",
    "DILOCO_SYNC_EVERY": "20",
    "DILOCO_WORKER_ID": "rtx",
    "DILOCO_WIRE_DTYPE": "fp16",
    "DILOCO_NUM_FRAGMENTS": "1",
    "DILOCO_FRAGMENT_SYNC_DELAY": "0",
    "DILOCO_FRAGMENT_UPDATE_ALPHA": "0.5",
    "DILOCO_DYLU": "0",
    "DILOCO_HEARTBEAT_INTERVAL": "2.5",
    "DILOCO_MAX_SYNC_RETRIES": "7",
    "DILOCO_TIMEOUT": "60",
    "DILOCO_EXTRA": "gpu=a100, site=berlin",
}


def test_every_keyword_has_a_variable() -> None:
    assert resolve({}, ALL) == Settings(
        server="tcp://10.0.0.1:8512",
        sync_every=20,
        worker_id="rtx",
        wire_dtype="fp16",
        num_fragments=1,
        fragment_sync_delay=0,
        fragment_update_alpha=0.5,
        dylu=False,
        heartbeat_interval=2.5,
        max_sync_retries=7,
        timeout=60.0,
        extra={"gpu": "a100", "site": "berlin"},
    )


def test_without_anything_the_broker_decides() -> None:
    settings = resolve({}, {})
    assert settings == Settings()
    assert settings.wants == {}
    assert (settings.max_sync_retries, settings.timeout) == (3, 600.0)


def test_keyword_wins_over_its_variable() -> None:
    assert resolve({"sync_every": 5}, ALL).sync_every == 5
    assert resolve({"heartbeat_interval": 0}, ALL).heartbeat_interval == 0


def test_empty_variable_counts_as_not_set() -> None:
    assert resolve({}, {"DILOCO_SYNC_EVERY": " "}).sync_every is None


def test_only_what_was_asked_for_is_insisted_on() -> None:
    settings = resolve({"sync_every": 5, "timeout": 3.0}, {})
    assert settings.wants == {"sync_every": 5}
    streaming = {"num_fragments": 3, "fragment_sync_delay": 1, "fragment_update_alpha": 0.5}
    assert resolve({**streaming, "dylu": True}, {}).wants == {**streaming, "dylu": True}


def test_staying_out_of_dynamic_local_updates_is_the_workers_own_affair() -> None:
    assert resolve({"dylu": False}, {}).wants == {}


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("DILOCO_SYNC_EVERY", "often", "DILOCO_SYNC_EVERY is 'often'; it must be a whole number"),
        ("DILOCO_SYNC_EVERY", "0", "1 or more"),
        ("DILOCO_TIMEOUT", "nan", "DILOCO_TIMEOUT is nan"),
        ("DILOCO_TIMEOUT", "-1", "0 or more"),
        ("DILOCO_WIRE_DTYPE", "int3", "fp32, bf16, fp16"),
        ("DILOCO_SERVER", "10.0.0.1", "tcp://"),
        ("DILOCO_SERVER", "tcp://10.0.0.1", "tcp://"),
        ("DILOCO_SERVER", "tcp://:8512", "tcp://"),
        ("DILOCO_SERVER", "tcp://host:99999", "tcp://"),
        ("DILOCO_DYLU", "maybe", "1 or 0"),
        ("DILOCO_FRAGMENT_UPDATE_ALPHA", "1.5", "from 0 to 1"),
        ("DILOCO_KEYS", "/keys", "CURVE"),
        ("DILOCO_EXTRA", "gpu", "gpu=a100"),
        ("DILOCO_WORKER_ID", "x" * 65, "64 printable"),
    ],
)
def test_value_that_cannot_work_is_named_with_its_variable(
    name: str, text: str, sentence: str
) -> None:
    with pytest.raises(UsageError) as caught:
        resolve({}, {name: text})
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("sync_every", 0),
        ("sync_every", 2.5),
        ("sync_every", "5"),
        ("timeout", float("inf")),
        ("keys", "folder"),
        ("dylu", 1),
        ("fragment_update_alpha", -0.1),
        ("process_group", object()),
        ("worker_id", "a\nb"),
        ("extra", ["a"]),
    ],
)
def test_keyword_that_cannot_work_is_named(keyword: str, value: Any) -> None:
    model = nn.Linear(2, 2)
    keywords: dict[str, Any] = {keyword: value}
    with pytest.raises(UsageError, match=keyword):
        DiLoCoWorker(model, optim.SGD(model.parameters(), lr=1.0), **keywords)


def test_server_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_SERVER", "nonsense")
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="DILOCO_SERVER is 'nonsense'"):
        DiLoCoWorker(model, optim.SGD(model.parameters(), lr=1.0))


def test_default_worker_ids_differ_on_one_host() -> None:
    assert default_worker_id() != default_worker_id()
    assert len(default_worker_id()) <= 64


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"server": 5}, "server is 5; it must be an address like"),
        ({"server": "tcp://*:8512"}, "must be an address like"),
        ({"worker_id": 7}, "worker_id is 7; it must be 1 to 64 printable"),
        ({"wire_dtype": ["bf16"]}, r"wire_dtype is \['bf16'\]; it must be one of fp32, bf16, fp16"),
        ({"sync_every": True}, "it must be a whole number"),
        ({"num_fragments": 0}, "num_fragments is 0; it must be a whole number, 1 or more"),
        (
            {"extra": {"lr": torch.tensor(1.0)}},
            r"extra is {'lr': tensor.*; it must be a dict with text keys",
        ),
    ],
)
def test_value_of_the_wrong_kind_is_one_sentence(keywords: dict[str, Any], words: str) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=words):
        DiLoCoWorker(model, optimizer, **keywords)


def test_optimizer_of_another_model_is_refused() -> None:
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    wrong: Any = model
    with pytest.raises(UsageError, match="none of the model's parameters"):
        DiLoCoWorker(model, torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(UsageError, match=r"must be a torch\.optim\.Optimizer"):
        DiLoCoWorker(model, wrong)


@pytest.fixture
def warned(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], list[str]]]:
    """Warnings, which are seen without logging being set up, of a process that has said nothing yet."""
    for name in (*RANKS, *(name for name in os.environ if name.startswith("DILOCO_"))):
        monkeypatch.delenv(name, raising=False)
    say_once.cache_clear()
    yield lambda: [each.getMessage() for each in caplog.records if each.levelno >= WARNING]
    say_once.cache_clear()


def train_alone() -> None:
    model = nn.Linear(2, 2)
    with DiLoCoWorker(model, optim.SGD(model.parameters(), lr=1.0)):
        pass


def test_worker_without_a_server_says_once_that_it_trains_alone(
    warned: Callable[[], list[str]],
) -> None:
    train_alone()
    train_alone()
    (sentence,) = warned()
    assert "no DILOCO_SERVER, so this worker trains alone" in sentence


@pytest.mark.parametrize("rank", RANKS)
def test_only_the_first_process_of_a_launcher_says_that_it_trains_alone(
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
        ("DILOCO_FRAGMENTS", "did you mean DILOCO_NUM_FRAGMENTS?"),
        ("DILOCO_QQQ", "worker/README.md has the list"),
    ],
)
def test_variable_that_nothing_reads_is_named_with_the_nearest_known_one(
    warned: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, name: str, advice: str
) -> None:
    monkeypatch.setenv(name, "5")
    train_alone()
    train_alone()
    sentence, alone = warned()
    assert sentence.startswith(f"{name} is set, but there is no such variable; ")
    assert advice in sentence
    assert "trains alone" in alone


def test_variables_that_something_reads_or_that_are_empty_are_no_mistake() -> None:
    assert unknown_variables({**ALL, "DILOCO_FEED": "x", "DILOCO_SYNC_EVRY": "", "HOME": "/"}) == []


def test_every_variable_in_the_source_is_known() -> None:
    root = ROOT
    sources = [path for part in PARTS for path in sorted((root / part).rglob("*.py"))]
    names = {
        name for path in sources for name in re.findall(r"DILOCO_[A-Z_]*[A-Z]", path.read_text())
    }
    assert {"DILOCO_SERVER", "DILOCO_FEED"} <= names
    assert unknown_variables(dict.fromkeys(names, "x")) == []
