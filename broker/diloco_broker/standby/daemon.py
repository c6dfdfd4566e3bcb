"""The public face of a standby: it follows its hub, and becomes a `Broker` when it takes over."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import zmq

from diloco_broker.config import BrokerConfig
from diloco_broker.config.broker_config import run_differences
from diloco_broker.config.declaration import AUTO
from diloco_broker.core.events import Received
from diloco_broker.core.members import permissions
from diloco_broker.shell import relays
from diloco_broker.shell.broker import ITS_PROGRAM, Broker, Service
from diloco_broker.shell.loop import machine_clock
from diloco_broker.shell.sockets import Incoming, Sockets
from diloco_broker.standby import core
from diloco_broker.standby.mirror import Mirror
from diloco_broker.standby.record import StandbyRecord, read_standby, write_standby
from diloco_broker.storage import checkpoint, resume
from diloco_broker.storage.checkpoint import Damaged
from diloco_broker.storage.key_folder import KeyFolder
from diloco_protocol.addresses import with_scheme
from diloco_protocol.clients.address_file import leads_somewhere, wrong_address
from diloco_protocol.clients.dealer import Dealer
from diloco_protocol.clients.keys import Keys
from diloco_protocol.errors import Code, ProtocolError, UsageError
from diloco_protocol.frames import KEEPALIVE_IDLE_S, LONGEST_UNAUTHENTICATED, pack, unpack
from diloco_protocol.messages import Error, Message, Promise
from diloco_protocol.relays import first_step, wrapped

logger = logging.getLogger("diloco.standby")

TICK_S = 0.05
# Messages handled in a turn: of workers and operators, and of the hub, which sends a few a second.
MESSAGES_A_TURN = 256
BATCH = 64
NOW = int(zmq.NOBLOCK)
# Seconds between two messages to the hub that was replaced, which may be restarted at any time.
TELL_S = 1.0


class HubLink(Dealer):
    """The connection to the hub, for one thread; messages sent while it is down are dropped."""

    OPTIONS: ClassVar[Mapping[int, int]] = {
        **Dealer.OPTIONS,
        # Milliseconds between attempts to connect (a restarted hub waits for its standby), and until an
        # attempt times out.
        zmq.RECONNECT_IVL: 100,
        zmq.RECONNECT_IVL_MAX: 500,
        zmq.CONNECT_TIMEOUT: 2000,
        zmq.TCP_KEEPALIVE: 1,
        zmq.TCP_KEEPALIVE_IDLE: KEEPALIVE_IDLE_S,
        # Messages queued before a connection broke are dropped, not sent on the next one.
        zmq.IMMEDIATE: 1,
    }

    def __init__(self, address: str, keys: Keys | None) -> None:
        super().__init__(address, keys)
        self._address, self._said = address, ""
        self.sockets = self._socket, self._monitor.socket  # to be polled

    def say(self, message: Message) -> None:
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart(pack(message), NOW)

    def heard(self) -> Iterator[Message]:
        """The messages received since the last call."""
        for _ in range(BATCH):
            try:
                frames = self._socket.recv_multipart(NOW, copy=False)
            except zmq.Again:
                return
            try:
                yield unpack([frame.buffer for frame in frames])[0]
            except ProtocolError as error:
                logger.warning("The hub sent a message that cannot be read: %s", error)

    def broke(self) -> bool:
        """Whether the connection has broken since the last call. Logs why it cannot be made."""
        self._monitor.has_disconnected = False
        while self._monitor.look():  # the next attempt may find another hub there
            pass
        if self.failure is not None and self.failure != self._said:
            self._said = self.failure
            logger.warning("The hub at %s: %s", self._address, self.failure)
        return self._monitor.has_disconnected


class StandbyBroker(Service):
    """A standby: `run()` it in this thread, or `start()` and `stop()` it in its own.

    The constructor binds the sockets, so `address` and `feed_address` are known at once and survive a
    takeover. A standby that took over before it was restarted is the hub from the start.

    Args:
        config: the options of the broker that it may become: the hub's, except addresses, keys and
            `save_dir`, the folder for copies of the hub's checkpoints, which is required.
        hub: the hub's control address.
        keys: an operator's, if the hub requires keys.

    Raises:
        UsageError: an address cannot be bound, `save_dir` is missing or in use, or the options begin a
            run or resume another one.
    """

    thread_name = "diloco-standby"
    stops_within_s = 90.0

    def __init__(self, config: BrokerConfig, hub: str, *, keys: Keys | None = None) -> None:
        if config.save_dir is None:
            raise UsageError(
                "A standby keeps the hub's checkpoints; give it a folder: --save-dir DIR."
            )
        for name, usual in (("fresh", False), ("resume", AUTO)):
            if (given := getattr(config, name)) != usual:
                raise UsageError(
                    f"A standby continues the hub's run; leave out {name} (it is {given})."
                )
        self.hub = with_scheme(hub)
        if not leads_somewhere(self.hub):
            raise wrong_address("--of", hub)
        self._keys, self._folder = keys, Path(config.save_dir)
        self._record = read_standby(self._folder) or StandbyRecord(secrets.token_hex(8))
        self._broker: Broker | None = None
        self._stop: tuple[str, bool] | None = None  # why, and whether to come back
        self._takes_over: core.TakeOver | None = None
        self._tried: Path | None = None  # the copy with which the options were tried
        self._said = ""  # last, of what cannot be written down
        self._opened = ExitStack()
        # It has no standby of its own until it is restarted with --standby.
        self.config = replace(config, standby=False)
        if self._record.term is not None:
            self._broker = Broker(self.config, term=self._record.term)
            self.address, self.feed_address = self._broker.address, self._broker.feed_address
            return
        with ExitStack() as opened:
            self._mirror = Mirror(self.hub, self._folder, keys=keys, keep=config.keep)
            opened.callback(self._mirror.close)
            try:
                write_standby(self._folder, self._record)
            except OSError as error:
                raise UsageError(f"{self._folder} cannot be written: {error.strerror}.") from None
            self._link = HubLink(self.hub, keys)
            opened.callback(self._link.close)
            of_keys = KeyFolder(Path(config.keys)) if config.keys else None
            self._sockets = Sockets(config.bind, config.feed, of_keys, config.max_workers)
            opened.callback(self._sockets.close)
            self._opened = opened.pop_all()
        for each in self._link.sockets:
            self._sockets.watch(each)
        self._clock = machine_clock()
        draw = partial(secrets.randbits, 63)
        self._core = core.Standby(self._record.name, self.hub, draw, self._clock())
        self.address, self.feed_address = self._sockets.address, self._sockets.feed_address
        self.config = replace(self.config, bind=self.address, feed=self.feed_address)
        self._follow_settings(self._record.settings)

    @property
    def is_hub(self) -> bool:
        """Whether it has taken over."""
        return self._broker is not None

    @property
    def run_is_over(self) -> bool:
        return self._broker is not None and self._broker.run_is_over

    @property
    def is_complete(self) -> bool:
        return self._broker is not None and self._broker.is_complete

    def run(self) -> None:
        try:
            broker = self._broker or self._follow()
            if broker is not None:
                self._serve(broker)
        finally:
            self.close()

    def request_stop(self, reason: str = ITS_PROGRAM, *, restarting: bool = False) -> None:
        self._stop = self._stop or (reason, restarting)
        if self._broker is not None:
            self._broker.request_stop(reason, restarting=restarting)
        else:
            self._sockets.wake()

    def close(self) -> None:
        self._opened.close()
        if self._broker is not None:
            self._broker.close()

    # Following the hub.

    def _follow(self) -> Broker | None:
        """Follow the hub until the takeover. Returns the broker; None if it was asked to stop."""
        self._mirror.start()
        next_tick = 0.0
        while self._takes_over is None:
            if self._stop is not None:
                return None
            self._sockets.wait(max(0.0, min(next_tick - self._clock(), TICK_S)))
            for _ in range(MESSAGES_A_TURN):
                incoming = self._sockets.receive()
                if incoming is None:
                    break
                if incoming.route and not incoming.is_left_behind:
                    self._take(incoming)
            for message in self._link.heard():
                self._hear_hub(message)
            if self._link.broke():
                self._core.hub_lost()
            now = self._clock()
            if now >= next_tick:
                next_tick = now + TICK_S
                self._look_at_copy()
                self._do(self._core.tick(now))
                self._sockets.changed_keys(now)
            if now >= self._sockets.next_look:
                self._sockets.look(self._core.waiting.keys() | self._core.relays.keys(), now)
        self._opened.close()
        return self._taken_over(self._takes_over)

    def _take(self, incoming: Incoming) -> None:
        if not self._sockets.lets_in(incoming.peer):
            return
        try:
            if incoming.route in self._core.relays:
                found = relays.received(incoming.route, incoming.frames, incoming.peer)
            else:
                message, _ = unpack(incoming.frames, LONGEST_UNAUTHENTICATED)
                found = Received(incoming.route, message, peer=incoming.peer)
            if isinstance(found, Received):
                permissions.check(found.peer, found.message)
                self._do(self._core.receive(found.route, found.message, self._clock()))
        except ProtocolError as error:
            self._answer(incoming.route, Error(error.code, str(error)))
        except Exception:
            logger.exception("Could not handle a message; sent an error to its sender.")
            text = "The standby could not handle this message; its log has more."
            self._answer(incoming.route, Error(Code.BAD_HEADER, text))

    def _hear_hub(self, message: Message) -> None:
        try:
            self._do(self._core.receive_from_hub(message, self._clock()))
        except Exception:
            logger.exception("Could not handle a message of the hub.")

    def _do(self, commands: core.Commands) -> None:
        for command in commands:
            match command:
                case core.SendToHub(message):
                    self._link.say(message)
                case core.Send(route, message):
                    self._answer(route, message)
                case core.FollowSettings(settings):
                    self._follow_settings(settings)
                case core.TakeOver(term=term):
                    if self._writes_down(term=max(term, self._term_of_copy() + 1)):
                        self._takes_over = command
                    else:
                        self._core.cannot_take_over(self._clock())
                case core.Log(text, is_warning):
                    logger.log(logging.WARNING if is_warning else logging.INFO, "%s", text)

    def _answer(self, route: bytes, message: Message) -> None:
        step = first_step(route)
        if step is None:
            self._sockets.send(route, pack(message))
        else:
            self._sockets.send(step[0], wrapped(step[1], message))

    def _follow_settings(self, settings: Mapping[str, Any]) -> None:
        """Adopt and record the settings that operators have changed at the hub."""
        ours = self.config.settings
        theirs = {name: value for name, value in settings.items() if name in ours}
        try:
            self.config = replace(self.config, **theirs)
        except UsageError as error:
            logger.warning("Cannot adopt the hub's settings, keeping ours: %s", error)
            return
        for name in [name for name in theirs if theirs[name] != ours[name]]:
            logger.info("Adopted %s %s from the hub.", name, theirs[name])
        if theirs != self._record.settings:
            self._writes_down(settings=theirs)

    def _writes_down(self, **changes: Any) -> bool:
        """Record on disk before announcing anything. Returns False if that fails."""
        record = replace(self._record, **changes)
        try:
            write_standby(self._folder, record)
        except OSError as error:
            text = f"{self._folder} cannot be written: {error.strerror or error}."
            if text != self._said:
                self._said = text
                logger.error("Cannot record the takeover; retrying: %s", text)
            return False
        self._record = record
        return True

    def _look_at_copy(self) -> None:
        """Check whether a broker could resume the newest copy with our options."""
        newest, before = self._mirror.newest, self._core.misfit
        if newest is None or newest == self._tried:
            return
        try:
            found = checkpoint.load_record(newest)
        except (Damaged, OSError):
            return  # wait for the next copy
        if self._tried is None:  # early enough to fix it
            for text in run_differences(found.config, self.config):
                logger.warning("%s", text)
        self._tried, self._core.saved, self._core.misfit = newest, found.number, None
        try:
            resume.check_options(self.config, found, newest)
        except UsageError as error:
            text = str(error).replace(", or --resume none to begin a new run", "")
            self._core.misfit = text
            if text != before:
                logger.error("This standby cannot take over: %s", text)

    # After the takeover.

    def _taken_over(self, command: core.TakeOver) -> Broker:
        term = self._record.term or command.term
        logger.warning("Taking over with term %d. %s", term, command.why)
        try:
            self._broker = broker = Broker(self.config, term=term)
        except Exception:
            # No worker was admitted, so the takeover is void; the next start may repeat it.
            self._writes_down(term=None)
            raise
        if self._stop is not None:  # requested before the broker existed
            broker.request_stop(self._stop[0], restarting=self._stop[1])
        return broker

    def _term_of_copy(self) -> int:
        """The hub's term in the newest copy of its checkpoints."""
        for path in checkpoint.found(self._folder)[:1]:
            with contextlib.suppress(Damaged, KeyError, TypeError, ValueError):
                return int(checkpoint.read_manifest(path).get("term", 0))
        return 0

    def _serve(self, broker: Broker) -> None:
        is_over = threading.Event()
        tells = threading.Thread(target=self._tell_the_hub, args=(is_over,), daemon=True)
        tells.start()
        try:
            broker.run()
        finally:
            is_over.set()
            tells.join()

    def _tell_the_hub(self, is_over: threading.Event) -> None:
        """Tell the replaced hub whenever it is reachable."""
        said = Promise(self._record.name, 1, wants="over", term=self._record.term or 0)
        with contextlib.closing(HubLink(self.hub, self._keys)) as link:
            while not is_over.wait(TELL_S):
                link.say(said)
                for _ in link.heard():
                    pass
                link.broke()
