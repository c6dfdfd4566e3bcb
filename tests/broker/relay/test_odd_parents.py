"""What a relay makes of a parent that says something odd, and what it is called there."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_broker.config import BrokerConfig
from diloco_broker.relay.daemon import default_name
from diloco_broker.relay.loop import RelayLoop
from diloco_protocol.messages import Notice
from diloco_worker.session.effects import Told


def test_what_cannot_be_handled_ends_no_relay(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop = RelayLoop(
        BrokerConfig(bind="tcp://127.0.0.1:0", feed="tcp://127.0.0.1:0", relays=True),
        "tcp://127.0.0.1:9",
        "north",
        None,
    )
    heard: list[Any] = []

    def told(effect: Any, *_: Any) -> Any:
        if effect.message.what == "odd":
            raise KeyError(effect.message.what)
        heard.append(effect.message.what)
        return iter(())

    monkeypatch.setattr(loop._relay, "told", told)
    try:
        loop._uplink.news.extend((Told(Notice("odd")), None) for _ in range(2))
        loop._uplink.news.append((Told(Notice("usual")), None))
        loop._turn()
    finally:
        loop._uplink.close("the test is over")
        loop.close()
    assert heard == ["usual"]
    assert [record.levelname for record in caplog.records].count("ERROR") >= 1


def test_relay_is_called_the_same_after_a_restart_with_the_same_options() -> None:
    first, second = (BrokerConfig(bind=f"tcp://127.0.0.1:{port}") for port in (8512, 8612))
    assert default_name(first) == default_name(first)
    assert default_name(first) != default_name(second)
    unbound = BrokerConfig(bind="tcp://127.0.0.1:0")
    assert default_name(unbound) != default_name(unbound)
