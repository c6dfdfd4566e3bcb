"""Examines the connection from this machine to its broker, in the order in which it can fail.

Joins nothing and changes nothing.
"""

from __future__ import annotations

import socket
import time
from contextlib import closing
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

import zmq

from diloco_protocol import feed
from diloco_protocol.addresses import can_be_reached, several
from diloco_protocol.clients.address_file import resolved, wrong_address
from diloco_protocol.clients.dealer import Dealer
from diloco_protocol.clients.greeting import greeting_of, requires_keys
from diloco_protocol.clients.keys import Keys, find_keys
from diloco_protocol.clients.mistaken_address import is_a_feed
from diloco_protocol.errors import (
    Code,
    DilocoError,
    ProtocolError,
    Refused,
    Unreachable,
    UsageError,
)
from diloco_protocol.messages import Control, Error, Result
from diloco_protocol.outer_advice import rate_far_off, small_h
from diloco_protocol.roles import Role
from diloco_worker.doctor import line

# Status requests; the quickest one compares the clocks.
ASKS = 3
CLOCKS_MAY_DIFFER_S = 5.0


class Fault(IntEnum):
    """Exit codes of `diloco-worker doctor`: that of the first fault found."""

    USAGE = 2  # an invalid option or address
    NAME = 3  # the host name cannot be resolved
    PORT = 4  # the port does not answer
    NOT_A_BROKER = 5  # something else answers there
    NO_KEY = 6  # the broker requires a key, and none was given
    KEY_FILE = 7  # the key file cannot be read, may be read by others, or is not a key
    WRONG_KEY = 8  # the broker rejects this key, or the key is for another broker
    UNWANTED_KEY = 9  # a key was given, but the broker uses none
    VERSION = 10  # the broker speaks another version of the protocol
    SILENT = 11  # the port is open, but the broker does not answer
    CLOCK = 12  # the clocks of the two machines differ
    LINE = 13  # the link could not be measured


@dataclass(eq=False)
class Wrong(Exception):
    """A fault and its remedy, as a sentence. Raised where it ends the examination."""

    fault: Fault
    text: str


@dataclass(frozen=True)
class Clocks:
    """How far the broker's clock is ahead of ours, and the error of that, in seconds."""

    ahead: float
    error: float


@dataclass
class Findings:
    """The results; None where the examination did not get so far.

    Attributes:
        wrong: faults; the first gives the exit code.
        notes: remarks that are not faults.
        with_keys: the broker requires keys.
    """

    server: str
    wrong: list[Wrong] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    with_keys: bool | None = None
    keys: Keys | None = None
    status: feed.Snapshot | None = None
    clocks: Clocks | None = None
    trips: line.RoundTrips | None = None
    up: line.Rate | None = None
    down: line.Rate | None = None


def examine(server: str, key_file: Path | None, within_s: float) -> Findings:
    """Examine the first of several addresses at which a broker answers.

    Returns faults instead of raising them. `within_s`: seconds to wait for each answer.
    """
    found = []
    for place in several(server):
        findings = _examined(place, key_file, within_s)
        if findings.status is not None:
            return findings
        found.append(findings)
    return found[0]


def _examined(place: str, key_file: Path | None, within_s: float) -> Findings:
    findings = Findings(place)
    try:
        _examine(findings, key_file, within_s)
    except Wrong as wrong:
        findings.wrong.append(wrong)
    return findings


def _examine(findings: Findings, key_file: Path | None, within_s: float) -> None:
    try:
        findings.server = resolved(findings.server)
    except UsageError as error:
        raise Wrong(Fault.USAGE, str(error)) from None
    host, port = _place(findings.server)
    findings.with_keys = asks_for_keys(host, port, within_s)
    try:
        findings.keys = keys = find_keys(key_file, Role.WORKER, Role.OPERATOR, Role.MONITOR)
    except UsageError as error:
        raise Wrong(Fault.KEY_FILE, str(error)) from None
    if findings.with_keys and keys is None:
        raise Wrong(
            Fault.NO_KEY,
            "The broker requires a key; give the file that diloco-broker keygen made for this machine "
            "(--keys FILE or DILOCO_KEYS).",
        )
    if keys is not None and not findings.with_keys:
        raise Wrong(
            Fault.UNWANTED_KEY,
            "The broker uses no keys; leave out --keys and DILOCO_KEYS, or give the address of the "
            "broker that was started with --keys.",
        )
    if keys is not None and keys.peer.role is not Role.WORKER:
        findings.notes.append(
            f"The key of {keys.peer} cannot train; training needs a worker's key."
        )
    with closing(Dealer(findings.server, keys)) as dealer:
        _ask_status(findings, dealer, within_s)
        _measure(findings, dealer, within_s)


def _place(server: str) -> tuple[str, int]:
    """Host and port of an address."""
    host, _, port = server.removeprefix("tcp://").rpartition(":")
    if not server.startswith("tcp://") or not host or not can_be_reached(server):
        raise Wrong(Fault.USAGE, str(wrong_address("The address", server)))
    return host, int(port)


def asks_for_keys(host: str, port: int, within_s: float) -> bool:
    """Whether the broker at this address requires keys; raises Wrong where no broker answers.

    ZeroMQ retries in silence, so this exchanges the ZMTP greeting over a plain socket.
    """
    where = f"{host}:{port}"
    try:
        socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        text = f"The name {host} cannot be resolved; check the spelling, DNS or /etc/hosts."
        raise Wrong(Fault.NAME, text) from None
    try:
        connection = socket.create_connection((host.strip("[]"), port), within_s)
    except ConnectionRefusedError:
        raise Wrong(
            Fault.PORT,
            f"Nothing listens at {where}; start diloco-broker serve there, or give the control address "
            "that it printed.",
        ) from None
    except OSError as error:
        why = f"within {within_s:g} s" if isinstance(error, TimeoutError) else f"({error.strerror})"
        raise Wrong(
            Fault.PORT,
            f"{where} cannot be reached {why}; is the machine on, and does its firewall let port {port} "
            "through?",
        ) from None
    with closing(connection):
        greeting = greeting_of(connection, time.monotonic() + within_s)
    found = requires_keys(greeting)
    if found is None:
        said = "sent no greeting" if not greeting else "speaks another protocol"
        raise Wrong(
            Fault.NOT_A_BROKER,
            f"The server at {where} is not a diloco-broker: it {said}; give the control address that "
            "diloco-broker serve printed.",
        )
    return found


def _ask_status(findings: Findings, dealer: Dealer, within_s: float) -> None:
    quickest = None
    for number in range(ASKS):
        began, asked_at = time.monotonic(), time.time()
        status = _status(findings, dealer, number, began + within_s)
        took = time.monotonic() - began
        if status.unix_s is not None and (quickest is None or took / 2 < quickest.error):
            quickest = Clocks(status.unix_s - (asked_at + took / 2), took / 2)
    findings.status, findings.clocks = status, quickest
    findings.notes += _advice(status)
    if quickest is not None and abs(quickest.ahead) - quickest.error > CLOCKS_MAY_DIFFER_S:
        way = "ahead of" if quickest.ahead > 0 else "behind"
        findings.wrong.append(
            Wrong(
                Fault.CLOCK,
                f"The broker's clock is {abs(quickest.ahead):,.0f} s {way} this machine's; training "
                "works, but log times will not match: synchronise both with NTP.",
            )
        )


def _advice(status: feed.Snapshot) -> list[str]:
    """Remarks about the settings of Nesterov's outer optimizer."""
    outer, steps = status.outer, status.sync_every or 0
    if outer.optimizer != "nesterov" or not (outer.lr and outer.momentum and steps):
        return []
    workers = max(status.counts.alive, status.counts.due)
    return [said for said in (small_h(steps), rate_far_off(outer.lr, workers, steps)) if said]


def _status(findings: Findings, dealer: Dealer, number: int, until: float) -> feed.Snapshot:
    try:
        dealer.send(Control("status", number))
        while (found := dealer.receive(until)) is not None:
            message, _ = found
            if isinstance(message, Error):
                is_version = message.code == Code.PROTOCOL_VERSION.value
                raise Wrong(Fault.VERSION if is_version else Fault.SILENT, message.text)
            if isinstance(message, Result) and message.request == number:
                return feed.read_snapshot(message.data)
    except UsageError:
        if (mistake := is_a_feed(findings.server, findings.keys)) is not None:
            raise Wrong(Fault.NOT_A_BROKER, mistake.text) from None
        raise Wrong(
            Fault.WRONG_KEY if findings.with_keys else Fault.NOT_A_BROKER,
            "The broker rejects this key: it was revoked or replaced; diloco-broker keygen makes a new "
            "one."
            if findings.with_keys
            else f"{findings.server} is not the control address of a broker.",
        ) from None
    except (ProtocolError, feed.FeedError) as error:
        is_version = not isinstance(error, ProtocolError) or error.code is Code.PROTOCOL_VERSION
        raise Wrong(Fault.VERSION if is_version else Fault.NOT_A_BROKER, str(error)) from None
    if findings.with_keys and dealer.failure is not None:
        raise Wrong(
            Fault.WRONG_KEY,
            "This key was made for another broker; use a key from this broker's keygen, or give the "
            "other broker's address.",
        )
    raise Wrong(
        Fault.SILENT,
        f"{findings.server} accepts connections but does not answer; is it the control address (not "
        "the feed's), and is the broker running? Its log shows what it is doing.",
    )


def _measure(findings: Findings, dealer: Dealer, within_s: float) -> None:
    try:
        findings.trips = trips = line.round_trips(dealer, within_s)
        findings.up = line.rate_up(dealer, trips)
        findings.down = line.rate_down(dealer, trips)
    except Refused as error:
        findings.wrong.append(Wrong(Fault.LINE, f"The link was not measured: {error}"))
    except (DilocoError, zmq.ZMQError) as error:
        why = str(error) if isinstance(error, Unreachable) else repr(error)
        findings.wrong.append(Wrong(Fault.LINE, f"The link broke during the measurement: {why}"))
