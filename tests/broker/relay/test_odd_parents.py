"""What a relay makes of a parent that says something odd, and what it is called there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import zmq

from diloco_broker.config import BrokerConfig
from diloco_broker.relay.daemon import default_name
from diloco_broker.relay.loop import RelayLoop
from diloco_protocol.messages import Join, Notice, decode
from diloco_worker.session.effects import Told
from diloco_worker.session.events import Start
from diloco_worker.session.session import Session
from kit.process_kit import wait_for


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


def test_relay_follows_a_parent_that_moves_while_it_tries_the_old_address(tmp_path: Path) -> None:
    file = tmp_path / "address"
    file.write_text("tcp://127.0.0.1:9")
    loop = RelayLoop(
        BrokerConfig(bind="tcp://127.0.0.1:0", feed="tcp://127.0.0.1:0", relays=True),
        f"file://{file}",
        "north",
        None,
    )
    with zmq.Context() as context, context.socket(zmq.ROUTER) as parent:
        port = parent.bind_to_random_port("tcp://127.0.0.1")
        try:
            loop._uplink.begin(Session(Join("north"), lambda: 1))
            loop._uplink.tell(Start())
            loop._uplink.turn()
            file.write_text(f"tcp://127.0.0.1:{port}")

            def is_asked() -> bool:
                loop._uplink.turn()
                return bool(parent.poll(10))

            wait_for(is_asked)
            assert isinstance(decode(parent.recv_multipart()[1]), Join)
        finally:
            loop._uplink.close("the test is over")
            loop.close()


def test_relay_is_called_the_same_after_a_restart_with_the_same_options() -> None:
    first, second = (BrokerConfig(bind=f"tcp://127.0.0.1:{port}") for port in (8512, 8612))
    assert default_name(first) == default_name(first)
    assert default_name(first) != default_name(second)
    unbound = BrokerConfig(bind="tcp://127.0.0.1:0")
    assert default_name(unbound) != default_name(unbound)
