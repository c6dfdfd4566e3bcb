"""The loop of a standby as long as it follows its hub: who comes here is answered, nothing is served."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path

from diloco_broker.config import BrokerConfig
from diloco_broker.core.members import permissions
from diloco_broker.shell.loop import machine_clock
from diloco_broker.shell.sockets import Incoming, Sockets
from diloco_broker.standby import core
from diloco_broker.standby.link import HubLink
from diloco_broker.storage.key_folder import KeyFolder
from diloco_protocol.clients.keys import Keys
from diloco_protocol.errors import Code, ProtocolError
from diloco_protocol.frames import LONGEST_OF_A_STRANGER, pack, unpack
from diloco_protocol.messages import Error, Message

logger = logging.getLogger("diloco.standby")

TICK_S = 0.05
MESSAGES_A_TURN = 256


class Following:
    """See the head of this module.

    Args:
        config: where it is to be found, and with which keys.
        hub: the hub's control address; `keys` are those that it asks for.
        name: of this standby.
        saved: returns the number of the newest checkpoint of the hub that is here.
        misfit: returns why the options do not go with that; None if they do.
        writes_down: that this one has taken over; False where that is not possible now.

    Raises:
        UsageError: an address cannot be bound.
    """

    def __init__(
        self,
        config: BrokerConfig,
        hub: str,
        name: str,
        *,
        saved: Callable[[], int | None],
        misfit: Callable[[], str | None],
        writes_down: Callable[[core.TakeOver], bool],
        keys: Keys | None,
    ) -> None:
        of_keys = KeyFolder(Path(config.keys)) if config.keys else None
        self.sockets = Sockets(config.bind, config.feed, of_keys, config.max_workers)
        self._clock = machine_clock()
        draw = partial(secrets.randbits, 63)
        self.core = core.Standby(name, hub, draw, self._clock(), saved=saved, misfit=misfit)
        self._writes_down = writes_down
        self._link = HubLink(hub, keys)
        for each in self._link.sockets:
            self.sockets.watch(each)
        self._is_ending = self._is_closed = False
        self._takes_over: core.TakeOver | None = None

    def run(self) -> core.TakeOver | None:
        """Follow until this standby is to take over; None where it was asked to end."""
        next_tick = 0.0
        while not self._is_ending and self._takes_over is None:
            now = self._clock()
            self.sockets.wait(max(0.0, min(next_tick - now, TICK_S)))
            for _ in range(MESSAGES_A_TURN):
                incoming = self.sockets.receive()
                if incoming is None:
                    break
                if incoming.route and not incoming.is_left_behind:
                    self._take(incoming)
            for message in self._link.heard():
                self._hear_hub(message)
            if self._link.broke():
                self.core.hub_lost()
            now = self._clock()
            if now >= next_tick:
                next_tick = now + TICK_S
                self._do(self.core.tick(now))
                self.sockets.changed_keys(now)
            if now >= self.sockets.next_look:
                self.sockets.look(self.core.guests, now)
        return self._takes_over

    def _take(self, incoming: Incoming) -> None:
        if not self.sockets.lets_in(incoming.peer):
            return
        try:
            message, _ = unpack(incoming.frames, LONGEST_OF_A_STRANGER)
            permissions.check(incoming.peer, message)
            self._do(self.core.hears_guest(incoming.route, message, self._clock()))
        except ProtocolError as error:
            self._answer(incoming.route, Error(error.code, str(error)))

        except Exception:
            logger.exception("A message could not be handled; its sender is told.")
            text = "The standby could not handle this message; its log has more."
            self._answer(incoming.route, Error(Code.BAD_HEADER, text))

    def _hear_hub(self, message: Message) -> None:
        try:
            self._do(self.core.hears_hub(message, self._clock()))
        except Exception:
            logger.exception("A message of the hub could not be handled.")

    def _do(self, commands: core.Commands) -> None:
        for command in commands:
            match command:
                case core.ToHub(message):
                    self._link.say(message)
                case core.Answer(route, message):
                    self._answer(route, message)
                case core.TakeOver():
                    if self._writes_down(command):
                        self._takes_over = command
                    else:
                        self.core.cannot_take_over(self._clock())
                case core.Say(text, is_trouble):
                    logger.log(logging.WARNING if is_trouble else logging.INFO, "%s", text)

    def _answer(self, route: bytes, message: Message) -> None:
        self.sockets.send(route, pack(message))

    def request_stop(self) -> None:
        """Let `run` end; from any thread or a signal handler."""
        self._is_ending = True
        self.sockets.wake()

    def close(self) -> None:
        """Close the sockets. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        for each in self._link.sockets:
            self.sockets.unwatch(each)
        self._link.close()
        self.sockets.close()
