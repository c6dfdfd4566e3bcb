"""Sends control actions to a broker, for the command line, the terminal and the web page."""

from __future__ import annotations

import getpass
import math
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from diloco_protocol.addresses import DEFAULT_CONTROL_ADDRESS, several
from diloco_protocol.clients.address_file import check_address, resolved
from diloco_protocol.clients.dealer import Dealer
from diloco_protocol.clients.keys import Keys
from diloco_protocol.clients.mistaken_address import unknown_name
from diloco_protocol.errors import Code, DilocoError, ProtocolError, Unreachable, UsageError
from diloco_protocol.messages import Control, Error, Result

LONGEST_WHO = 200  # characters
ANSWER_WITHIN_S = 5.0  # far longer than the longest turn of a broker's loop
# Seconds for each of several addresses to reply before the next is tried.
PLACE_WITHIN_S = 1.5


@dataclass(frozen=True)
class Answer:
    """The result of one request, as a sentence."""

    ok: bool  # success; False if the broker refused or did not reply
    text: str
    error: DilocoError | None = None  # why the broker did not reply; None if it did


# Claims of brokers that do not own the run, the weakest first; see `claim_of`.
REPLACED, PASSIVE = -2.0, -1.0
# Actions that may be sent to any broker.
READING = frozenset({"status", "manifest", "checkpoint", "piece"})


def claim_of(status: Result) -> float:
    """How certain it is that the broker with this status owns the run; infinite if it is certain.

    A broker that refuses to report its status counts as the owner: its reply to the action has the
    reason. A hub with a standby may have been replaced without knowing it, so the higher term wins.
    """
    if "hears_hub" in status.data:
        return PASSIVE
    standby = status.data.get("standby")
    if not isinstance(standby, Mapping):
        return math.inf
    term = status.data.get("term")
    return REPLACED if standby.get("is_replaced") else float(term if isinstance(term, int) else 0)


# The function by which displays send an action (address, action, arguments); tests replace it.
Ask = Callable[[str, str, Mapping[str, object]], Answer]


def ask_once(
    address: str,
    action: str,
    arguments: Mapping[str, object],
    *,
    timeout: float = ANSWER_WITHIN_S,
    who: str | None = None,
    keys: Keys | None = None,
) -> Answer:
    """Connect, send an action, and wait for the reply. Blocks; returns errors, raises none of ours."""
    try:
        with Operator(address, timeout=timeout, who=who, keys=keys) as operator:
            result = operator.ask(action, **arguments)
    except DilocoError as error:
        return Answer(False, str(error), error)
    return Answer(result.ok, result.text)


S = TypeVar("S", bound="Operator")


class Operator:
    """Sends control actions to one broker, one at a time. Not thread-safe.

        with Operator("tcp://127.0.0.1:8512") as operator:
            print(operator.ask("set", outer_lr=0.5).text)

    Args:
        address: the control address that `diloco-broker serve` printed; tcp:// may be omitted. Of
            several, separated by commas, the broker that has the run is used.
        timeout: seconds to wait for a reply.
        who: name in the log of control actions; default: user and host of this process. It is not
            verified; with a key the log has the name of the key instead.
        keys: the key of an operator, if the broker requires keys (`find_keys`).

    Raises:
        UsageError: the address or the timeout is invalid.
    """

    def __init__(
        self,
        address: str = DEFAULT_CONTROL_ADDRESS,
        *,
        timeout: float = ANSWER_WITHIN_S,
        who: str | None = None,
        keys: Keys | None = None,
    ) -> None:
        check_address("The control address", address)
        self._places = tuple(map(resolved, several(address)))
        self._keys = keys
        self.address = self._places[0]
        self.timeout = timeout
        self.who = (this_user() if who is None else who)[:LONGEST_WHO]
        self._request = 0
        if not (timeout > 0 and math.isfinite(timeout)):
            raise UsageError(f"timeout must be positive and finite, got {timeout:g} s.")
        self._dealer = Dealer(self.address, keys)
        self._refusal = ""  # code of the last reply if it was an error

    def ask(self, action: str, **arguments: Any) -> Result:
        """Send an action. If the broker refuses, the result has `ok` False and a reason.

        Raises:
            Unreachable: no reply in time. The action may have been executed, or may still be.
            UsageError: an argument cannot be sent, or the broker requires a key or rejects this one.
        """
        if len(self._places) > 1:
            self._find(action)
        return self._ask(action, self.timeout, arguments)

    def find(self) -> str:
        """Find the address of the broker that has the run. Raises as `ask` does."""
        if len(self._places) > 1:
            self._find("status")
        return self.address

    def _find(self, action: str) -> None:
        """Of several addresses, select the broker that has the run; in doubt the one with higher term.

        A standby that has not taken over refuses actions that it cannot execute. A hub that was replaced
        would execute them without effect.
        """
        found: list[tuple[float, str]] = []
        for place in self._places:
            self._turn_to(place)
            try:
                status = self._ask("status", min(self.timeout, PLACE_WITHIN_S), {})
            except Unreachable:
                continue
            if self._refusal == Code.STANDBY:
                continue
            claim = claim_of(status)
            if claim == math.inf:
                return
            found.append((claim, place))
        if not found:
            where = " and ".join(self._places)
            raise Unreachable(
                f"No broker answers at {where}; start diloco-broker serve, or give the address that it "
                "printed."
            )
        claim, place = max(found, key=lambda each: each[0])
        if claim == REPLACED and action not in READING:
            raise Unreachable(
                f"The hub at {place} was replaced by its standby, which has the run but does not "
                "answer; give the standby's address."
            )
        self._turn_to(place)

    def _turn_to(self, place: str) -> None:
        self._dealer.close()
        self.address, self._dealer = place, Dealer(place, self._keys)

    def _ask(self, action: str, timeout: float, arguments: Mapping[str, Any]) -> Result:
        self._request += 1
        self._refusal = ""
        try:
            self._dealer.send(Control(action, self._request, {"who": self.who, **arguments}))
        except (TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"The arguments of {action!r} cannot be sent: {error}.") from None
        until = time.monotonic() + timeout
        while True:
            try:
                found = self._dealer.receive(until)
            except ProtocolError:
                continue
            if found is None:
                break
            message, _ = found
            if isinstance(message, Error):  # it has no request number
                self._refusal = message.code
                return Result(self._request, False, message.text)
            if isinstance(message, Result) and message.request == self._request:
                return message
        if (problem := unknown_name(self.address)) is not None:
            raise Unreachable(f"No answer from {self.address}: {problem}")
        if self._dealer.failure is not None:
            raise Unreachable(
                f"No answer from {self.address} within {self.timeout:g} s. {self._dealer.failure}"
            )
        raise Unreachable(
            f"No answer from {self.address} within {self.timeout:g} s; check that it is the control "
            f"address of a running diloco-broker. A slow broker may still execute {action!r}."
            if action not in ("status", "manifest")
            else f"No answer from {self.address} within {self.timeout:g} s; start diloco-broker "
            "serve, or give the control address that it printed."
        )

    def close(self) -> None:
        """Close the socket; unsent messages are dropped. May be called more than once."""
        self._dealer.close()

    def __enter__(self: S) -> S:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def this_user() -> str:
    """user@host of this process; the user is "unknown" if it has no name."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in some containers
        user = "unknown"
    return f"{user}@{socket.gethostname()}"
