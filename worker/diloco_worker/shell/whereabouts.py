"""Where the broker is: one address for good, or what a file says, read again while nobody answers."""

from __future__ import annotations

from diloco_protocol.clients.address_file import NoAddress, file_of, read_address

# Seconds between two looks into the file.
LOOK_S = 1.0


class Whereabouts:
    """Of a broker, by the address that was given. Belongs to one thread."""

    def __init__(self, given: str) -> None:
        self._file = file_of(given)
        self.address: str | None = given if self._file is None else None  # None: not known yet
        self.problem: str | None = None  # why it is not known, or not read again; ends a sentence
        self._next_look = 0.0

    def next_look(self) -> float | None:
        """When the file is to be read again; None where there is none."""
        return None if self._file is None else self._next_look

    def look(self, now: float) -> bool:
        """Read the file, if there is one. Returns whether there is another address than before.

        What was known is kept where the file has nothing that can be used.
        """
        if self._file is None:
            return False
        self._next_look = now + LOOK_S
        former = self.address
        try:
            self.address, self.problem = read_address(self._file), None
        except NoAddress as error:
            self.problem = str(error)
        return self.address != former
