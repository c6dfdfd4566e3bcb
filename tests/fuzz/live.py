"""A live broker, with keys and without, that hears anything at all from connections that come and go.

It is a process of its own, with two workers that have made a version. Afterwards they make another one,
it has answered the status all the time, takes no more memory, and ends with exit code 0.

    PYTHONPATH=tests python -m fuzz live --inputs 100000 --seed 1
"""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgpack
import zmq

from diloco_broker.storage.key_folder import KeyFolder
from diloco_protocol.clients import Keys
from diloco_protocol.clients.keys import read_keys
from diloco_protocol.messages import KINDS, Control, Message, encode
from diloco_protocol.roles import Peer, Role
from diloco_worker import DiLoCoClient
from fuzz import hostile_messages
from fuzz.draws import Draws
from kit.keyed_broker import GUESTS, file_of
from kit.layers import Layers, delta, name_of
from kit.process_kit import PATIENCE_S, Child, Processes, memory_kib

# Of one connection: some more, and a stranger's is ended by the broker.
MESSAGES_A_CONNECTION = 16
ANSWERS_WITHIN_S = 20.0
MOST_MORE_KIB = 64 << 10
WARM_UP = 50  # connections before memory is compared: what a process takes once for all
RAW_EVERY = 20  # connections
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"  # of ZMTP 3; what follows is the mechanism
OTHER = Peer(Role.WORKER, "w2")  # whose key the hostile one has
# They would end the attack, not the broker.
NOT_ASKED = ("shutdown", "stop_all", "pause", "set")


class Stranger:
    """Makes connections to a broker, and says anything."""

    def __init__(self, address: str, dice: random.Random, keys: Keys | None) -> None:
        self.address, self._dice, self._keys = address, dice, keys
        self._context = zmq.Context()
        self._words = hostile_messages.Words()
        self._words.learn("w0", "w1", "manifest")
        self.messages = self.unanswered = 0

    def close(self) -> None:
        self._context.destroy(linger=0)

    def connects(self) -> None:
        """One connection: some messages, and the status, which must be answered unless it was ended."""
        with (
            contextlib.closing(self._context.socket(zmq.DEALER)) as dealer,
            contextlib.closing(dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)) as ends,
        ):
            dealer.linger = 0
            poller = zmq.Poller()
            poller.register(dealer, zmq.POLLIN)
            poller.register(ends, zmq.POLLIN)
            if self._keys is not None:
                self._keys.lock(dealer)
            dealer.connect(self.address)
            for _ in range(MESSAGES_A_CONNECTION):
                dealer.send_multipart(self._frames())
                self.messages += 1
            dealer.send(encode(Control("status", 4711)))
            until = time.monotonic() + ANSWERS_WITHIN_S
            while (left := until - time.monotonic()) > 0:
                ready = dict(poller.poll(int(left * 1000)))
                if dealer not in ready:
                    break
                answer: Any = msgpack.unpackb(dealer.recv_multipart()[0])
                if answer["kind"] == "result" and answer["request"] == 4711:
                    assert answer["ok"], answer["text"]
                    dealer.disable_monitor()
                    return
            ended = ends in ready
            dealer.disable_monitor()
            assert ended, "the broker neither answers nor ends the connection"
            self.unanswered += 1

    def is_raw(self) -> None:
        """No ZeroMQ at all, or one that breaks off in the middle of what it says."""
        dice = self._dice
        host, port = self.address.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port)), timeout=ANSWERS_WITHIN_S) as raw:
            kind = dice.randrange(3)
            if kind:
                mechanism = dice.choice([b"NULL", b"CURVE", b"PLAIN", b"\x00"]).ljust(20, b"\x00")
                raw.sendall(GREETING + mechanism + bytes(32))
            if kind == 2:
                raw.sendall(b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER")
            with contextlib.suppress(OSError):
                raw.sendall(dice.randbytes(dice.randrange(2000)))
        self.messages += 1

    def _frames(self) -> list[bytes]:
        dice = self._dice
        draws = Draws(dice.randbytes(200))
        match dice.randrange(4):
            case 0:
                return [dice.randbytes(dice.randrange(100)) for _ in range(1 + dice.randrange(4))]
            case 1:
                header = hostile_messages.header(draws)
            case _:
                header = self._encoded(draws)
        if any(word.encode() in header for word in NOT_ASKED):
            return [b""]
        return [header, dice.randbytes(dice.randrange(3000))] if dice.random() < 0.3 else [header]

    def _encoded(self, draws: Draws) -> bytes:
        message: Message = self._words.message(draws, sorted(KINDS))
        try:
            return encode(message)
        except (OverflowError, UnicodeEncodeError):
            return b"\xc1"


def run(seed: int, messages: float, seconds: float) -> tuple[int, int]:
    """Say so much to a broker without keys, and as much to one with keys.

    Returns how many messages that were, and on how many connections the status had no answer since the
    broker had ended them.
    """
    sent = unanswered = 0
    for has_keys in (False, True):
        with _broker(has_keys) as (child, address, folder), ExitStack() as clients:
            began = time.monotonic()
            workers = [
                clients.enter_context(_worker(address, folder, name)) for name in ("w0", "w1")
            ]
            _makes_a_version(workers, 0)
            # A worker's key; what it may not do is most of what is tried.
            keys = (
                None
                if folder is None
                else read_keys(folder.path / f"clients/worker-{OTHER.name}.key")
            )
            stranger = Stranger(address, random.Random(seed), keys)
            clients.callback(stranger.close)
            before = 0
            connections = 0
            while stranger.messages < messages / 2 and time.monotonic() < began + seconds / 2:
                stranger.is_raw() if connections % RAW_EVERY == 0 else stranger.connects()
                connections += 1
                if connections == WARM_UP:
                    before = memory_kib(child.pid)
            more = memory_kib(child.pid) - before if before else 0
            assert more < MOST_MORE_KIB, f"the broker takes {more} KiB more"
            assert stranger.unanswered <= connections / 2, "the broker answers hardly anybody"
            _makes_a_version(workers, 1)
            clients.close()
            child.gets(signal.SIGTERM)
            code = child.ends()
            assert code == 0, f"exit code {code}\n{child.output}"
            assert "could not be handled" not in child.output, child.output[-5000:]
            sent, unanswered = sent + stranger.messages, unanswered + stranger.unanswered
    return sent, unanswered


@contextlib.contextmanager
def _broker(has_keys: bool) -> Iterator[tuple[Child, str, KeyFolder | None]]:
    with tempfile.TemporaryDirectory() as place:
        processes = Processes(Path(place))
        folder = None
        options = ["--workers", "2", "--sync-every", "1"]
        if has_keys:
            folder = KeyFolder.make(Path(place) / "keys")
            folder.add_all([*GUESTS.values(), OTHER])
            options += ["--keys", str(folder.path)]
        try:
            child, address = processes.serve(*options)
            yield child, address, folder
        finally:
            processes.close()


def _worker(address: str, folder: KeyFolder | None, name: str) -> DiLoCoClient:
    if folder is None:
        return DiLoCoClient(address, worker_id=name, timeout=PATIENCE_S)
    return DiLoCoClient(address, keys=file_of(folder, name), timeout=PATIENCE_S)


def _makes_a_version(workers: list[DiLoCoClient], number: int) -> None:
    for worker in workers if number == 0 else ():
        worker.join(Layers(1))
    for each, worker in enumerate(workers):
        worker.push({name_of(0): delta(each, number)}, steps=1)
    versions = {str(worker.pull().versions) for worker in workers}
    assert len(versions) == 1, versions
