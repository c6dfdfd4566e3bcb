"""The one thread of a relay: a broker's loop for the site, and in each turn a look at the parent."""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Mapping
from functools import partial
from os import getpid

from torch import Tensor

from diloco_broker.config import BrokerConfig
from diloco_broker.core import effects, events
from diloco_broker.core.machine import Core
from diloco_broker.relay import commands, core
from diloco_broker.relay.tensors import RelayTensors
from diloco_broker.relay.uplink import Uplink
from diloco_broker.shell.loop import Loop
from diloco_broker.shell.tensor_work import Tensors
from diloco_broker.storage.checkpoint_format import Checkpoint
from diloco_broker.tensors.outer.torch_fragment import OuterOptimizerFactory
from diloco_protocol.clients.keys import Keys
from diloco_protocol.messages import Join
from diloco_worker.session import events as of_parent
from diloco_worker.transport.broker_address import Given

logger = logging.getLogger("diloco.relay")


class RelayLoop(Loop):
    """See the head of this module.

    `name` is the relay's own at its parent, `wire_dtype` what its pushes travel in (None: what the run's
    do). `keys` are those that the parent asks for.
    """

    def __init__(
        self,
        config: BrokerConfig,
        parent: Given,
        name: str,
        wire_dtype: str | None,
        *,
        keys: Keys | None = None,
    ) -> None:
        self._relay_tensors = RelayTensors()
        super().__init__(config, None, None, None)
        self.failure: str | None = None  # why it could not go on
        draw = partial(secrets.randbits, 64)
        join = Join(name, host=socket.gethostname(), pid=getpid())
        where = parent if isinstance(parent, str) else "the address that is given"
        self._relay = core.Relay(
            join, config, draw, self.now(), parent=where, wire_dtype=wire_dtype
        )
        self._uplink = Uplink(
            parent,
            self.sockets,
            self._relay_tensors,
            self.now,
            progress_of=lambda: self._relay.progress,
            keys=keys,
        )
        self._follow(self._relay.site)

    def _make_tensors(
        self,
        config: BrokerConfig,
        factory: OuterOptimizerFactory | None,
        initial: Mapping[str, Tensor] | None,
        found: Checkpoint | None,
    ) -> Tensors:
        return self._relay_tensors

    def _follow(self, site: Core) -> None:
        """This core is the site's from now on."""
        self.core = site
        self._executor = self._executor_of(site)
        self.onlookers.follow(site.state)

    def run(self) -> None:
        try:
            super().run()
        finally:
            self._uplink.close(self.stop_reason or "an error")

    def _turn(self) -> None:
        super()._turn()
        self._uplink.turn()
        while self._uplink.news:
            effect, wires = self._uplink.news.popleft()
            try:
                self._do(self._relay.told(effect, wires, self.now()))
            except Exception:
                logger.exception("What the parent says could not be handled; the relay goes on.")
        self._do(self._relay.tick(self.now()))

    def _stop(self, reason: str) -> events.Stop:
        """Once the run is over, no version comes for a round that is closing."""
        within_s = events.FINISH_WITHIN_S if self.is_restarting else 0.0
        return events.Stop(reason, self.is_restarting, within_s)

    def _export(self) -> None:
        """The parent keeps the final model."""

    def _hear(self, received: events.Received) -> None:
        self._do(self._relay.hears(received))

    def _work(self) -> None:
        super()._work()
        if self._relay_tensors.is_averaged:
            self._do(self._relay.averaged())

    def _do(self, told: commands.Commands) -> None:  # noqa: C901, PLR0912  a case for each command
        for command in told:
            match command:
                case commands.Connect(session):
                    self._uplink.begin(session)
                case commands.Tell(event):
                    self._uplink.tell(event)
                case commands.Offer(push):
                    self._relay_tensors.push(push.push_id)
                    self._uplink.tell(of_parent.Offer(push))
                case commands.Feed(event):
                    self._executor.feed(event)
                case commands.HandUp(pushes, held):
                    self._relay_tensors.hand_up(pushes)
                    self._relay_tensors.hold(held)
                case commands.Settle(released, counted):
                    self._relay_tensors.residuals.settle(
                        released.version, released.fragment, counted
                    )
                case commands.Abandon(push_id):
                    self._relay_tensors.residuals.abandoned(push_id)
                case commands.Forget(push_id):
                    self._relay_tensors.residuals.forget(push_id)
                case commands.Begin(site, layout, wire_dtype):
                    reply = site.state.config.reply_dtype
                    self._relay_tensors.begin_anew(layout, wire_dtype, reply)
                    self._follow(site)
                case commands.Answer(route, message):
                    self.send(effects.Send(route, message))
                case commands.Disconnect(route):
                    self.sockets.shut(route)
                case commands.Say(text, is_trouble):
                    logger.log(logging.WARNING if is_trouble else logging.INFO, "%s", text)
                case commands.End(reason, is_over):
                    self.failure = None if is_over else reason
                    self.request_stop(reason, restarting=not is_over)
