"""Where the broker is: at given addresses, or where a file or a function says, asked again until it
answers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Literal

from diloco_protocol.addresses import several, with_scheme
from diloco_protocol.clients.address_file import NoAddress, file_of, leads_somewhere, read_address

# tcp://host:port, several of these separated by commas, file:///path, or a function that returns one.
Given = str | Callable[[], str]
# Seconds between two reads of the file, and between two calls of the function.
LOOK_S = 1.0
# Seconds between two checks whether the function has answered.
ANSWER_S = 0.05


class BrokerAddress:
    """The address of a broker. Belongs to one thread."""

    def __init__(self, given: Given) -> None:
        self._ask: Callable[[], str] | None = None  # raises NoAddress
        self._answers: _Answers | None = None
        self.places: tuple[str, ...] = ()  # the given addresses
        self.address: str | None = None  # None: not known yet
        self.problem: str | None = None  # why it is unknown or stale; ends a sentence
        self.advice = ""  # added to the problem
        self._next_look = 0.0
        if callable(given):
            self._answers = _Answers(given)
            self._ask = self._answers.latest
        elif (file := file_of(given)) is not None:
            self._ask = lambda: read_address(file)
            self.advice = "; waiting for diloco-broker serve --address-file"
        else:
            self.places = several(given)
            self.address = self.places[0]

    @property
    def count(self) -> int:
        """How many addresses to try."""
        return max(1, len(self.places))

    def turn_to(self, place: int) -> None:
        """Try this address now."""
        if self.places:
            self.address = self.places[place]

    def names(self, address: str) -> str:
        """The addresses for a message; `address` where there is only one."""
        return " and ".join(self.places) if len(self.places) > 1 else address

    def next_look(self) -> float | None:
        """When to ask again; None where addresses were given."""
        return None if self._ask is None else self._next_look

    def look(self, now: float) -> bool:
        """Ask the file or the function. Returns whether the address changed; a bad answer keeps the
        last one.
        """
        if self._ask is None:
            return False
        former = self.address
        try:
            self.address, self.problem = self._ask(), None
        except NoAddress as error:
            self.problem = str(error)
        is_asking = self._answers is not None and self._answers.is_asking
        self._next_look = now + (ANSWER_S if is_asking else LOOK_S)
        return self.address != former


class _Answers:
    """Calls a function in a separate thread, once at a time, since it may block."""

    def __init__(self, ask: Callable[[], str]) -> None:
        self._function = ask
        self._said: str | NoAddress = NoAddress("server() has not answered yet")
        self._state: Literal["idle", "asking", "answered"] = "idle"

    @property
    def is_asking(self) -> bool:
        return self._state != "idle"

    def latest(self) -> str:
        """The last answer; asks again, unless a call is running or its answer is new."""
        if self._state == "answered":
            self._state = "idle"
        elif self._state == "idle":
            self._state = "asking"
            threading.Thread(target=self._call, name="diloco-address", daemon=True).start()
        if isinstance(self._said, NoAddress):
            raise self._said
        return self._said

    def _call(self) -> None:
        try:
            said: object = self._function()
        except Exception as error:  # noqa: BLE001  of the script
            self._said = NoAddress(f"server() failed: {error!r:.200}")
        else:
            address = with_scheme(said.strip()) if isinstance(said, str) else ""
            self._said = (
                address
                if leads_somewhere(address)
                else NoAddress(
                    f"server() returned {said!r:.80}, no address like tcp://10.0.0.1:8512"
                )
            )
        self._state = "answered"
