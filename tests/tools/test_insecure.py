"""How the door of a broker is: in the feed, and in everything that shows it."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from diloco_broker import Broker, BrokerConfig
from diloco_broker.cli.status_text import as_text
from diloco_protocol.feed import parse_snapshot
from kit.core_harness import a_stage
from kit.exporter_scrapes import exported
from kit.feed_snapshots import frame, status
from kit.process_kit import LOCAL
from kit.top_screen import LARGE, SMALL, ScreenPilot, document, screen, snapshot
from kit.top_screen import shown as screen_of
from kit.top_text import drawn

OPEN = "tcp://0.0.0.0:8512"


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({}, "loopback"),
        ({"insecure": True}, "loopback"),
        ({"bind": OPEN, "insecure": True}, "INSECURE"),
        ({"feed": OPEN, "insecure": True}, "INSECURE"),
        ({"bind": OPEN, "feed": OPEN, "keys": "keys"}, "keys"),
        ({"bind": OPEN, "keys": "keys", "insecure": True}, "keys"),
    ],
)
def test_feed_says_who_may_connect(options: dict[str, Any], word: str) -> None:
    shown = a_stage(**options).shown()
    assert shown["security"] == word
    assert parse_snapshot(frame(shown)).security == word


@pytest.mark.parametrize(("word", "is_warned"), [("INSECURE", True), ("loopback", False)])
def test_broker_begins_with_a_warning_where_everybody_may_steer(
    word: str, is_warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(BrokerConfig, "security", word)  # nothing here listens to other machines
    with caplog.at_level(logging.WARNING):
        Broker(BrokerConfig(**LOCAL)).close()
    warned = [each.message for each in caplog.records]
    assert bool(warned) == is_warned
    assert not warned or warned[0].startswith("INSECURE: ")


@pytest.mark.parametrize("word", ["INSECURE", "keys", "loopback", None])
def test_displays_say_insecure_and_nothing_of_a_locked_or_older_broker(word: str | None) -> None:
    keys = {} if word is None else {"security": word}
    is_open = word == "INSECURE"
    header, *_ = drawn(status(**keys)).splitlines()
    assert ("INSECURE" in header) == is_open
    for size in (SMALL, LARGE):
        header, *_ = screen_of(document(1, **keys), size, readonly=True).splitlines()
        assert ("INSECURE" in header) == is_open
        assert "● LIVE" in header
    metric = exported(status(**keys)).get(("diloco_broker_insecure", ()))
    assert metric == (None if word is None else float(is_open))


@screen({"size": (80, 24)}, {"size": (140, 40)})
async def test_insecure_is_red_and_stays_while_the_feed_is_late(pilot: ScreenPilot) -> None:
    await pilot.hears(snapshot(42, security="INSECURE"), after_s=1.0)
    (style,) = (each.style for each in pilot.strips()[0] if "INSECURE" in each.text)
    assert style is not None
    assert style.bold
    assert style.color is not None
    assert style.color.get_truecolor().red > 2 * style.color.get_truecolor().green
    await pilot.waits(20)
    assert "INSECURE" in pilot.lines()[0]
    assert "STALE" in pilot.lines()[0]


@pytest.mark.parametrize("word", ["INSECURE", "keys", "loopback"])
def test_status_says_who_may_connect(word: str) -> None:
    assert f"security    {word}" in as_text(document(1, security=word))
    assert "security" not in as_text(document(1))
