"""Asking a broker to do something, as the command line, the terminal and the page do."""

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
ANSWER_WITHIN_S = 5.0  # a broker in the longest turn of its loop is back long before
# Of several addresses, how long each has to answer before the next is asked.
PLACE_WITHIN_S = 1.5


@dataclass(frozen=True)
class Answer:
    """What came of one request, in a sentence."""

    ok: bool  # it was done; not where the broker refused or did not answer
    text: str
    error: DilocoError | None = None  # why no broker answered; None where one did


# What the broker at an address has to do with the run, least first; see `claim_of`.
REPLACED, PASSIVE = -2.0, -1.0
# Actions that any broker may be asked.
READING = frozenset({"status", "manifest", "checkpoint", "piece"})


def claim_of(status: Result) -> float:
    """Whether a broker that answers so has the run: the greater the surer, infinite where it is sure.

    One that refuses to tell is taken at its place: it will say why. A hub with a standby may have been
    replaced and not know it yet: the higher term comes first.
    """
    if "hears_hub" in status.data:
        return PASSIVE
    standby = status.data.get("standby")
    if not isinstance(standby, Mapping):
        return math.inf
    term = status.data.get("term")
    return REPLACED if standby.get("is_replaced") else float(term if isinstance(term, int) else 0)


# Address, action, arguments: displays steer by it, and their tests replace it.
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
    """Connect, ask, and wait for the answer, in a thread that may wait; raises nothing of ours."""
    try:
        with Operator(address, timeout=timeout, who=who, keys=keys) as operator:
            result = operator.ask(action, **arguments)
    except DilocoError as error:
        return Answer(False, str(error), error)
    return Answer(result.ok, result.text)


S = TypeVar("S", bound="Operator")


class Operator:
    """Sends control actions to one broker, one at a time. Not for several threads.

        with Operator("tcp://127.0.0.1:8512") as operator:
            print(operator.ask("set", outer_lr=0.5).text)

    Args:
        address: the control address that `diloco-broker serve` printed; tcp:// may be left out. Of
            several, with commas in between, the one that has the run is asked.
        timeout: seconds to wait for an answer.
        who: written into the log of control actions; the user and host of this process by default. It
            is what the asker says of itself; with a key its name is written, which is proven.
        keys: the key of an operator, where the broker asks for one (`find_keys`).

    Raises:
        UsageError: the address is none.
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
            raise UsageError(f"The timeout must be positive and finite, got {timeout:g} s.")
        self._dealer = Dealer(self.address, keys)
        self._refusal = ""  # the code of the error that was the last answer, if it was one

    def ask(self, action: str, **arguments: Any) -> Result:
        """Have an action carried out. A broker that refuses answers with `ok` False and a reason.

        Raises:
            Unreachable: no answer in time. The action may have been carried out, or may still be.
            UsageError: an argument that cannot be sent, or the broker wants a key, or another one.
        """
        if len(self._places) > 1:
            self._find(action)
        return self._ask(action, self.timeout, arguments)

    def find(self) -> str:
        """The address of the broker that has the run. Raises as `ask` does."""
        if len(self._places) > 1:
            self._find("status")
        return self.address

    def _find(self, action: str) -> None:
        """Of several addresses, take that of the broker that has the run; in doubt the newer one.

        A standby that has not taken over refuses by itself what it cannot do. A hub that was replaced
        would do it, to no effect.
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
                f"No broker serves at {where}: start diloco-broker serve, or give the address that it "
                "printed."
            )
        claim, place = max(found, key=lambda each: each[0])
        if claim == REPLACED and action not in READING:
            raise Unreachable(
                f"The hub at {place} was replaced by its standby, which has the run and does not "
                "answer; give the address of that."
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
            if isinstance(message, Error):  # it answers no request by number
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
            f"No answer from {self.address} within {self.timeout:g} s: is this the control address "
            f"of a diloco-broker that runs? One that is only slow may still carry out {action!r}."
            if action not in ("status", "manifest")
            else f"No answer from {self.address} within {self.timeout:g} s: start diloco-broker "
            "serve, or give the control address that it printed."
        )

    def close(self) -> None:
        """Close the socket; what has not been sent is dropped. Again does no harm."""
        self._dealer.close()

    def __enter__(self: S) -> S:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def this_user() -> str:
    """user@host of this process, as far as the system knows."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in some containers
        user = "unknown"
    return f"{user}@{socket.gethostname()}"
