"""Joining a run: makes the session, the link, and the ports once the parameters have arrived."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from diloco_protocol import Manifest, Unreachable, UsageError, VersionId
from diloco_protocol.clients.mistaken_address import unknown_name
from diloco_protocol.messages import Join, Message, encode
from diloco_protocol.tensors.threads import thread_count
from diloco_worker.model.checksums import frozen_tag
from diloco_worker.model.flat_state import FlatState
from diloco_worker.ports import PORTS, LocalPorts, Participant
from diloco_worker.session.connection import Phase
from diloco_worker.session.events import Resume
from diloco_worker.session.news import Arrival
from diloco_worker.session.session import Session
from diloco_worker.sync.state import Patience
from diloco_worker.transport.link import Link

logger = logging.getLogger("diloco.worker")

# Seconds of waiting at joining before the first log line.
FIRST_LOG_S = 2.0


class Joining(Participant):
    """A worker that joins a run. Belongs to the training thread."""

    def begin(self) -> LocalPorts:
        """Join and put the run's parameters into the model; raises as `DiLoCoWorker.start`."""
        session = self.session()
        link = self.link(
            session, capture=self.tensors.capture, tag_of=partial(frozen_tag, self.tensors)
        )
        arrived = await_versions(link)
        assert link.layout is not None
        if link.has_forgotten:
            self.resumption = None
        self.tensors.set_layout(link.layout)
        make = PORTS.get(str(self.server), LocalPorts)
        ports = make(**vars(self), link=link, arrived=arrived)
        ports.begin()
        return ports

    def session(self, processes: int | None = None) -> Session:
        """The session of this worker; `processes`: of a group, else None."""
        own, resumption = self.settings, self.resumption
        session = new_session(
            self.worker_id,
            self.tensors.manifest,
            wants=own.wants,
            heartbeat_interval=own.heartbeat_interval,
            extra=own.extra,
            has_frozen=True,
            processes=processes,
        )
        if resumption is not None:
            session.handle(Resume(resumption.terms, resumption.held), time.monotonic())
        return session

    def link(self, session: Session | None, **arguments: Any) -> Link:
        """A started link; the arguments are those of `Link`."""
        link = None
        states: dict[int, dict[VersionId | None, FlatState]] = {}
        if self.resumption is not None:  # a session knows its version; a follower has to name it
            for fragment, state in self.resumption.states.items():
                held = None if session is not None else self.resumption.held[fragment].version
                states[fragment] = {held: state}
        try:
            link = Link(
                self.server,
                session,
                pinned=self.placement.is_pinned,
                states=states,
                welcomed=self.audit.joined,
                keys=self.keys,
                **arguments,
            )
            self.opened(link)
        except BaseException:  # once opened, the worker closes it
            if link is not None:
                link.close()
            raise
        link.start(thread_count(self.settings.tensor_threads))
        if self.settings.handle_signals is not False:
            self.termination.install()
        return link


def new_session(
    worker_id: str,
    manifest: Manifest,
    *,
    wants: Mapping[str, Any] | None = None,
    heartbeat_interval: float | None = None,
    extra: Mapping[str, Any] | None = None,
    has_frozen: bool = False,
    processes: int | None = None,
) -> Session:
    """A session of a worker in this process; the arguments are those of `Join` and `Session`."""
    join = Join(
        worker_id,
        manifest,
        wants=dict(wants or {}),
        host=socket.gethostname(),
        pid=os.getpid(),
        extra=dict(extra or {}),
        processes=processes or 1,
    )
    check_sendable(join, "This worker's description (wants, extra, names in the model)")
    return Session(
        join,
        lambda: secrets.randbits(64),
        heartbeat_interval,
        is_group=processes is not None,
        has_frozen=has_frozen,
    )


def check_sendable(message: Message, what: str) -> None:
    """Raise UsageError for values that do not fit into a message, before the I/O thread sends it."""
    try:
        encode(message)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"{what} cannot be sent: {error}.") from None


def await_model(
    link: Link, *, only_terms: bool = False, tick: Callable[[], object] = lambda: None
) -> None:
    """Wait without a limit until every fragment has arrived, and log that.

    Args:
        only_terms: wait for the terms of the run alone.
        tick: called repeatedly while waiting.

    Raises:
        Refused: the broker refuses this worker.
        Unreachable: the link has ended.
    """

    def settled() -> bool:
        if link.layout is None or link.refused_for_good or only_terms:
            has_terms = link.layout is not None and link.phase is Phase.JOINED
            return link.refused_for_good or (only_terms and has_terms)
        arrivals = [link.arrivals.get(p.fragment) for p in link.layout.all if p.chunks]
        # Fragments from before a broken connection may be of a run that the broker has lost.
        return all(arrivals) and len({each.version.run for each in arrivals if each}) == 1

    patience = Patience(time.monotonic, first=FIRST_LOG_S)
    while not link.wait_for(settled, patience.pause()):
        tick()
        if link.has_ended:
            raise Unreachable(f"Joining {link.address} failed: {link.last_error}")
        if not patience.is_due():
            continue
        # A warning, since most training scripts configure no logging.
        if link.phase is Phase.JOINED:
            logger.warning("Joined at %s; waiting for its parameters.", link.address)
        else:
            # A reason about keys is a sentence that says what to do.
            text = f"{link.describe().rstrip('.')}{_advice(link)}"
            logger.warning("Waiting to join the run: %s.", text)
    if link.refused_for_good:
        assert link.refusal is not None
        raise link.refusal


def await_versions(link: Link, *, tick: Callable[[], object] = lambda: None) -> dict[int, Arrival]:
    """`await_model`, then take a version of every fragment."""
    while True:
        await_model(link, tick=tick)
        arrived = link.take_all()  # None if the connection broke since and the run is lost
        if arrived is not None:
            return arrived


def _advice(link: Link) -> str:
    """Advice where the broker does not answer, or its host name is wrong; ends a sentence."""
    if (waits_for := link.waits_for_address) is not None:
        return waits_for
    if link.refused_key is not None or link.phase in (Phase.JOINING, Phase.JOINED):
        return ""
    if (problem := unknown_name(link.address)) is not None:
        return f" ({problem})"
    return "; start diloco-broker serve, or give the control address that it printed"
