"""Keys that are taken back while messages under them wait to be handled."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import msgpack
import pytest
import zmq

from diloco_broker.config import BrokerConfig
from diloco_broker.shell.loop import Loop
from diloco_broker.storage.key_folder import KeyFolder
from kit.keyed_broker import key, public_of
from kit.process_kit import LOCAL, PATIENCE_S

pytest_plugins = ("kit.key_fixtures",)


@pytest.fixture
def loop(folder: KeyFolder) -> Iterator[Loop]:
    made = Loop(BrokerConfig(keys=str(folder.path), **LOCAL), None, None, None)
    yield made
    made.close()


def turn_until(loop: Loop, is_so: Callable[[], object]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < until
        loop._turn()


def control(action: str) -> bytes:
    return bytes(msgpack.packb({"v": 1, "kind": "control", "action": action, "request": 1}))


def test_whoever_was_there_before_the_broker_is_let_in_at_its_first_turn(
    loop: Loop, folder: KeyFolder
) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as operator:
        operator.linger = 0
        key(folder, "anna").lock(operator)
        with operator.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH) as refusals:
            operator.connect(loop.sockets.address)
            operator.send(control("status"))
            doorkeeper = loop.sockets._doorkeeper
            assert doorkeeper and doorkeeper.socket.poll(int(1000 * PATIENCE_S))
            turn_until(loop, lambda: operator.poll(0) or refusals.poll(0))
            assert not refusals.poll(0)
            operator.disable_monitor()


@pytest.mark.parametrize("is_revoked", [True, False])
def test_message_that_waited_while_its_key_was_taken_back_is_dropped(
    loop: Loop, folder: KeyFolder, is_revoked: bool
) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as operator:
        operator.linger = 0
        key(folder, "anna").lock(operator)
        operator.connect(loop.sockets.address)
        operator.send(control("status"))
        turn_until(loop, lambda: operator.poll(0))
        operator.send(control("pause"))
        assert loop.sockets._router.poll(int(1000 * PATIENCE_S))  # it is here, and the loop is busy
        if is_revoked:
            public_of(folder, "anna").unlink()
        loop._see_changed_keys(loop.now() + 10)
        loop._turn()
        assert (loop.core.state.paused_at is None) is is_revoked
