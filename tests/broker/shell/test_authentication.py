"""Keys that are taken back while messages under them wait to be handled."""

import errno
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import msgpack
import pytest
import zmq

from diloco_broker.config import BrokerConfig
from diloco_broker.shell.loop import Loop
from diloco_broker.storage.key_folder import KeyFolder
from diloco_protocol.frames import MAX_BUFFER_BYTES
from diloco_protocol.roles import Peer, Role
from kit.keyed_broker import file_of, key, public_of
from kit.process_kit import LOCAL, PATIENCE_S

pytest_plugins = ("kit.key_fixtures",)


@pytest.fixture
def loop(folder: KeyFolder) -> Iterator[Loop]:
    made = Loop(BrokerConfig(keys=str(folder.path), **LOCAL), None, None, None)
    yield made
    made.close()


@contextmanager
def a_peer(folder: KeyFolder, name: str) -> Iterator[zmq.Socket[bytes]]:
    """A socket with the key of this name, not connected yet."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger = 0
        key(folder, name).lock(peer)
        yield peer


def turn_until(loop: Loop, is_so: Callable[[], object]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < until
        loop._turn()


def control(action: str) -> bytes:
    return bytes(msgpack.packb({"v": 1, "kind": "control", "action": action, "request": 1}))


def test_peer_that_came_before_the_broker_is_let_in(loop: Loop, folder: KeyFolder) -> None:
    with (
        a_peer(folder, "anna") as operator,
        operator.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH) as refusals,
    ):
        operator.connect(loop.sockets.address)
        operator.send(control("status"))
        doorkeeper = loop.sockets._doorkeeper
        assert doorkeeper and doorkeeper.socket.poll(int(1000 * PATIENCE_S))
        turn_until(loop, lambda: operator.poll(0) or refusals.poll(0))
        assert not refusals.poll(0)
        operator.disable_monitor()


@pytest.mark.parametrize("meanwhile", ["its key is removed", "its key is replaced", "nothing"])
def test_message_that_waited_while_its_key_was_taken_back_is_dropped(
    loop: Loop, folder: KeyFolder, meanwhile: str
) -> None:
    with a_peer(folder, "anna") as operator:
        operator.connect(loop.sockets.address)
        operator.send(control("status"))
        turn_until(loop, lambda: operator.poll(0))
        operator.send(control("pause"))
        assert loop.sockets._router.poll(int(1000 * PATIENCE_S))  # it is here, and the loop is busy
        if meanwhile != "nothing":
            public_of(folder, "anna").unlink()
        if meanwhile == "its key is replaced":
            file_of(folder, "anna").unlink()
            folder.add_all([Peer(Role.OPERATOR, "anna")])
        loop._see_changed_keys(loop.now() + 10)
        loop._turn()
        assert (loop.core.state.paused_at is None) is (meanwhile != "nothing")


def test_largest_buffer_comes_through_under_a_key(loop: Loop, folder: KeyFolder) -> None:
    with a_peer(folder, "w0") as worker:
        worker.connect(loop.sockets.address)
        worker.send_multipart([b"header", bytes(MAX_BUFFER_BYTES)])
        until = time.monotonic() + PATIENCE_S
        while (message := loop.sockets.receive()) is None:
            assert time.monotonic() < until
            loop.sockets.wait(0.1)
        assert [len(frame) for frame in message.frames] == [6, MAX_BUFFER_BYTES]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO])
def test_system_error_revokes_no_key_and_is_logged_once(
    loop: Loop, folder: KeyFolder, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    doorkeeper = loop.sockets._doorkeeper
    assert doorkeeper is not None
    anna = Peer(Role.OPERATOR, "anna")
    assert doorkeeper.look(0.0) is not None

    def fails(path: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as broken:
        broken.setattr(os, "scandir", fails)
        changes = doorkeeper.look(10.0)
        assert changes is not None
        assert not changes.revoked
        assert os.strerror(number) in changes.complaints[0]
        assert doorkeeper.look(20.0) is None
        assert doorkeeper.lets_in(anna)
    assert doorkeeper.look(30.0) is None
    public_of(folder, "anna").unlink()
    changes = doorkeeper.look(40.0)
    assert changes is not None
    assert changes.revoked == {anna}


def test_rest_of_the_loop_ends_when_bytes_of_an_unauthenticated_peer_come(loop: Loop) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        loop.sockets._poll(ours.fileno(), zmq.POLLIN)
        assert not loop.sockets.rest(0.0)
        theirs.send(b"?")
        assert loop.sockets.rest(PATIENCE_S)
        loop.sockets._poll(ours.fileno(), 0)
        assert not loop.sockets.rest(0.0)


def test_rest_of_the_loop_lasts_until_it_is_woken(loop: Loop) -> None:
    began = time.monotonic()
    assert not loop.sockets.rest(0.02), "with no peer to look at"
    assert time.monotonic() - began >= 0.02
    loop.sockets.wake()
    assert loop.sockets.rest(PATIENCE_S)
