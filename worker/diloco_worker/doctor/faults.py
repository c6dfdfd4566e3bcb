"""What can be wrong, each with the exit code that scripts know it by."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Fault(IntEnum):
    """Exit codes of `diloco-worker doctor`; the first fault that is found gives its own."""

    USAGE = 2  # the command itself: an option or an address that cannot be
    NAME = 3  # the broker's host name is not known here
    PORT = 4  # nobody answers at the port
    NOT_A_BROKER = 5  # something else answers there
    NO_KEY = 6  # the broker asks for a key, none was given
    KEY_FILE = 7  # the key file cannot be read, may be read by others, or is no key
    WRONG_KEY = 8  # the broker does not let this key in, or the key is for another broker
    UNWANTED_KEY = 9  # a key was given, the broker asks for none
    VERSION = 10  # the broker speaks another version of the protocol
    SILENT = 11  # the port is open, but the broker does not answer
    CLOCK = 12  # the clocks of the two machines differ
    LINE = 13  # the broker did not let the line be measured to its end


@dataclass(frozen=True)
class Wrong:
    """One thing that is wrong, in a sentence with its remedy."""

    fault: Fault
    text: str


class Found(Exception):
    """Something so wrong that what comes after it cannot be looked at."""

    def __init__(self, fault: Fault, text: str) -> None:
        super().__init__(text)
        self.wrong = Wrong(fault, text)
