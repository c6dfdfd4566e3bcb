"""Joining a run: the session that describes this worker, and the wait for the run's parameters."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import replace

from diloco_protocol import Unreachable, UsageError
from diloco_protocol.clients.mistaken_address import unknown_name
from diloco_protocol.messages import Join, Message, encode
from diloco_worker.session.connection import Phase
from diloco_worker.session.news import Arrival
from diloco_worker.session.session import Session
from diloco_worker.sync.state import Patience
from diloco_worker.transport.link import Link

logger = logging.getLogger("diloco.worker")

# Seconds of waiting at joining before the first log line.
FIRST_LOG_S = 2.0


def new_session(join: Join, heartbeat_interval: float | None, **options: bool) -> Session:
    """A session that joins from this process; the options are those of `Session`."""
    join = replace(join, host=socket.gethostname(), pid=os.getpid())
    check_sendable(join, "This worker's description (wants, extra, names in the model)")
    return Session(join, lambda: secrets.randbits(64), heartbeat_interval, **options)


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
