"""A stay in a run from its beginning: a session, a link, and a driver once the parameters are here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from diloco_protocol.clients.keys import Keys
from diloco_worker.model.frozen_tag import frozen_tag
from diloco_worker.model.model_tensors import ModelTensors
from diloco_worker.model.placement import Placement
from diloco_worker.session.events import Resume
from diloco_worker.session.news import Arrival
from diloco_worker.session.session import Session
from diloco_worker.sync.metrics import SyncMetrics
from diloco_worker.sync.patience import Patience
from diloco_worker.training import start
from diloco_worker.training.driver import Driver
from diloco_worker.training.in_turn import RUNS, InTurnPorts, Turns
from diloco_worker.training.ports import LocalPorts
from diloco_worker.training.push_log import PushLog
from diloco_worker.training.reports import Reports
from diloco_worker.training.resumption import Resumption
from diloco_worker.training.settings import Settings
from diloco_worker.transport.link import Link
from diloco_worker.transport.sigterm import Termination
from diloco_worker.transport.whereabouts import Given

# Seconds of waiting before the first word about it at joining.
FIRST_WORD_S = 2.0


@dataclass(kw_only=True)
class Stay:
    """What a worker brings with it. Called in the order of its methods, by the training thread."""

    server: Given
    worker_id: str
    tensors: ModelTensors
    settings: Settings
    resumption: Resumption | None  # what to go on from
    keys: Keys | None
    placement: Placement
    audit: PushLog
    termination: Termination
    reports: Reports
    metrics: SyncMetrics
    publish: Callable[[bool], None]
    clock: Callable[[], float]
    step: int
    cycle_start: int
    # Told of the link before it is started: from then on it has to be closed.
    opened: Callable[[Any], None]

    def begin(self) -> Driver:
        """Join, and put the run's parameters into the model. Raises as `DiLoCoWorker.start`."""
        session = self.session()
        link = self.link(
            session, capture=self.tensors.capture, tag_of=partial(frozen_tag, self.tensors)
        )
        arrived = start.await_versions(link, self.patience())
        assert link.layout is not None
        if link.has_forgotten:
            self.resumption = None
        self.tensors.set_layout(link.layout)
        turns = RUNS.get(str(self.server))
        if turns is None:
            return self.driver(LocalPorts(**self.of_ports(link, arrived)))
        self.settings = turns.bounded(self.settings)
        return self.driver(InTurnPorts(**self.of_ports(link, arrived)), turns)

    def patience(self) -> Patience:
        return Patience(self.clock, first=FIRST_WORD_S)

    def session(self, processes: int | None = None) -> Session:
        """The session of this worker; `processes` of a group, None where it is not one."""
        own, resumption = self.settings, self.resumption
        session = start.new_session(
            self.worker_id,
            self.tensors.manifest,
            wants=own.wants,
            heartbeat_interval=own.heartbeat_interval,
            extra=own.extra,
            has_frozen=True,
            processes=processes,
        )
        if resumption is not None:
            session.handle(Resume(resumption.terms, resumption.held), self.clock())
        return session

    def link(self, session: Session, **arguments: Any) -> Link:
        """A link that has begun; the arguments are those of `Link`."""
        resumption, link = self.resumption, None
        try:
            link = Link(
                self.server,
                session,
                pinned=self.placement.is_pinned,
                states=resumption.states if resumption is not None else None,
                welcomed=self.audit.joined,
                keys=self.keys,
                **arguments,
            )
            self.opened(link)
        except BaseException:  # from then on it is closed where it was opened
            if link is not None:
                link.close()
            raise
        link.start()
        self.take_signals()
        return link

    def take_signals(self) -> None:
        if self.settings.handle_signals is not False:
            self.termination.install()

    def of_ports(self, link: Link, arrived: dict[int, Arrival]) -> dict[str, Any]:
        """The arguments of the ports of any process."""
        return {
            "tensors": self.tensors,
            "link": link,
            "reports": self.reports,
            "publish": self.publish,
            "audit": self.audit,
            "termination": self.termination,
            "clock": self.clock,
            "placement": self.placement,
            "arrived": arrived,
        }

    def driver(self, ports: LocalPorts, turns: Turns | None = None) -> Driver:
        """A driver that goes on from the checkpoint, if the run still knows it."""
        return Driver(
            worker_id=self.worker_id,
            ports=ports,
            settings=self.settings,
            metrics=self.metrics,
            step=self.step,
            cycle_start=self.cycle_start,
            resumption=self.resumption,
            turns=turns,
        )
