"""DILOCO_* variables: what a keyword is when the script does not give it.

A keyword that is given wins over its variable. An empty variable counts as not set.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from diloco_protocol import UsageError
from diloco_protocol.addresses import with_scheme
from diloco_protocol.dtypes import check_wire_dtype
from diloco_protocol.messages import LONGEST_WORKER_ID, is_worker_id

logger = logging.getLogger("diloco.worker")

DEFAULT_RETRIES = 3
DEFAULT_TIMEOUT_S = 600.0
AUTO = "auto"  # fragment_sync_delay: replies are merged as soon as they are here

PREFIX = "DILOCO_"
# Variables of this project that are no keyword of a worker: of displays, the demo's tuning, tests.
OTHER_VARIABLES = ("DILOCO_FEED", "DILOCO_GRID", "DILOCO_UPDATE_SNAPSHOTS")
# What launchers (torchrun, Slurm, Open MPI, other MPI) call the number of a process.
RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")

T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """What a worker asks for. None means: what the broker says."""

    server: str | None = None
    sync_every: int | None = None
    worker_id: str | None = None
    wire_dtype: str | None = None
    num_fragments: int | None = None
    fragment_sync_delay: int | str | None = None
    fragment_update_alpha: float | None = None
    dylu: bool | None = None
    heartbeat_interval: float | None = None
    max_sync_retries: int = DEFAULT_RETRIES
    timeout: float = DEFAULT_TIMEOUT_S
    keys: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    handle_signals: bool | None = None
    audit: str | Path | None = None

    @property
    def wants(self) -> dict[str, Any]:
        """The fields of the run's configuration that this worker insists on."""
        names = (
            "sync_every",
            "wire_dtype",
            "num_fragments",
            "fragment_sync_delay",
            "fragment_update_alpha",
        )
        asked = {name: getattr(self, name) for name in names}
        asked["dylu"] = self.dylu or None  # False is this worker's own affair
        return {name: value for name, value in asked.items() if value is not None}


def variable(keyword: str) -> str:
    """The variable behind a keyword."""
    return PREFIX + keyword.upper()


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """A sentence for each DILOCO_* variable that is set and that nothing in this project reads."""
    keywords = {each.name.upper() for each in fields(Settings)}
    known = {PREFIX + keyword for keyword in keywords} | set(OTHER_VARIABLES)
    sentences = []
    for name in sorted(environ.keys() - known):
        if name.startswith(PREFIX) and environ[name].strip():
            near = get_close_matches(name.removeprefix(PREFIX).upper(), sorted(keywords), n=1)
            advice = (
                f"did you mean {PREFIX}{near[0]}?" if near else "worker/README.md has the list."
            )
            sentences.append(f"{name} is set, but there is no such variable; {advice}")
    return sentences


def warn_of_silence(server: str | None, environ: Mapping[str, str] | None = None) -> None:
    """Say what would go wrong without a word: unknown variables, and training alone without a server.

    Each sentence once in a process, and as a warning (which is seen without logging being set up) only
    in the first of the processes that a launcher has started.
    """
    environ = os.environ if environ is None else environ
    rank = next((environ[name] for name in RANKS if environ.get(name)), "0")
    level = logging.WARNING if rank == "0" else logging.DEBUG
    for sentence in unknown_variables(environ):
        say_once(sentence, level)
    if server is None:
        say_once(
            "There is no server= and no DILOCO_SERVER, so this worker trains alone; give the broker's "
            "address, tcp://HOST:PORT, to take part in a run.",
            level,
        )


@cache
def say_once(sentence: str, level: int) -> None:
    """Log a sentence, unless this process has done so before."""
    logger.log(level, "%s", sentence)


def resolve(given: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Settings:
    """Merge keywords with the environment and check each value.

    Args:
        given: keywords by name; None where the script is silent.
        environ: `os.environ` unless a test says otherwise.

    Raises:
        UsageError: a value that cannot be read or cannot work, naming where it came from.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    for keyword in (each.name for each in fields(Settings)):
        value, source = given.get(keyword), keyword
        if value is None:
            text = environ.get(variable(keyword), "").strip()
            if not text:
                continue
            source = variable(keyword)
            value = _parse(_PARSERS[keyword], text, source)
        _check(keyword, value, source)
        values[keyword] = with_scheme(value) if keyword == "server" else value
    return Settings(**values)


def _parse(parser: tuple[Callable[[str], T], str], text: str, source: str) -> T:
    read, what = parser
    try:
        return read(text)
    except ValueError:
        raise UsageError(f"{source} is {text!r}; it must be {what}.") from None


def _delay(text: str) -> int | str:
    return AUTO if text.lower() == AUTO else int(text)


def _truth(text: str) -> bool:
    known = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if text.lower() not in known:
        raise ValueError(text)
    return known[text.lower()]


def _pairs(text: str) -> dict[str, str]:
    parts = [part.partition("=") for part in text.split(",") if part.strip()]
    if not all(equals and key.strip() for key, equals, _ in parts):
        raise ValueError(text)
    return {key.strip(): value.strip() for key, _, value in parts}


_TEXT: tuple[Callable[[str], Any], str] = (str, "text")
_COUNT: tuple[Callable[[str], Any], str] = (int, "a whole number")
_NUMBER: tuple[Callable[[str], Any], str] = (float, "a number")
_PARSERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "server": _TEXT,
    "sync_every": _COUNT,
    "worker_id": _TEXT,
    "wire_dtype": _TEXT,
    "num_fragments": _COUNT,
    "fragment_sync_delay": (_delay, "a whole number, or auto"),
    "fragment_update_alpha": _NUMBER,
    "dylu": (_truth, "1 or 0"),
    "heartbeat_interval": _NUMBER,
    "max_sync_retries": _COUNT,
    "timeout": _NUMBER,
    "keys": _TEXT,
    "extra": (_pairs, "pairs like gpu=a100,site=berlin"),
    "handle_signals": (_truth, "1 or 0"),
    "audit": (str, "the path of a file"),
}

_LOWEST = {
    "sync_every": 1,
    "num_fragments": 1,
    "fragment_sync_delay": 0,
    "fragment_update_alpha": 0,
    "heartbeat_interval": 0,
    "max_sync_retries": 0,
    "timeout": 0,
}


def _check(keyword: str, value: Any, source: str) -> None:
    lowest = _LOWEST.get(keyword)
    may_be_auto = keyword == "fragment_sync_delay"
    if lowest is not None and not (may_be_auto and value == AUTO):
        whole = may_be_auto or _PARSERS[keyword] is _COUNT
        kind = int if whole else (int, float)
        if (
            isinstance(value, bool)
            or not isinstance(value, kind)
            or not lowest <= value < float("inf")
        ):
            what = "a whole number" if whole else "a number"
            else_auto = ", or 'auto'" if may_be_auto else ""
            raise UsageError(
                f"{source} is {value!r}; it must be {what}, {lowest} or more{else_auto}."
            )
    if _PARSERS[keyword] is _TEXT and not isinstance(value, str):
        raise UsageError(f"{source} is {value!r:.80}; it must be a text.")
    match keyword:
        case "server":
            check_address(value, source)
        case "worker_id":
            if not is_worker_id(value):
                raise UsageError(
                    f"{source} is {value!r:.80}; it must be 1 to {LONGEST_WORKER_ID} printable "
                    "characters."
                )
        case "wire_dtype":
            check_wire_dtype(value)
        case "extra":
            if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
                raise UsageError(f"{source} is {value!r:.80}; it must be a dict with text keys.")
            for key, item in value.items():
                if not isinstance(item, str | int | float | None):
                    raise UsageError(
                        f"{source}[{key!r}] is a {type(item).__name__}; displays show texts and "
                        "numbers, so give it as one."
                    )
        case "fragment_update_alpha" if value > 1:
            raise UsageError(f"{source} is {value!r}; it must be a number from 0 to 1.")
        case "dylu" | "handle_signals" if not isinstance(value, bool):
            raise UsageError(f"{source} is {value!r:.80}; it must be True or False.")
        case "audit" if not isinstance(value, str | Path):
            raise UsageError(f"{source} is {value!r:.80}; it must be the path of a file.")
        case "keys":
            raise _missing(source, "encryption with CURVE keys")
        case _:
            pass


def _missing(source: str, feature: str) -> UsageError:
    return UsageError(
        f"{source} asks for {feature}, which this release does not have; leave it out."
    )


def check_address(address: str, source: str = "server") -> None:
    """Raise UsageError unless the address looks like tcp://host:port, host:port or ipc://path."""
    scheme, _, rest = with_scheme(address).partition("://")
    _, colon, port = rest.rpartition(":")
    sound = scheme == "ipc" and rest != ""
    if (
        scheme == "tcp"
        and colon
        and not rest.startswith("*")
        and rest != colon + port
        and port.isdecimal()
    ):
        sound = 0 < int(port) < 65536
    if not sound:
        raise UsageError(
            f"{source} is {address!r}; it must be an address like tcp://10.0.0.1:8512."
        )


def default_worker_id() -> str:
    """Host name and eight random hexadecimal digits."""
    host = "".join(c for c in socket.gethostname() if c.isprintable())[:50] or "worker"
    return f"{host}-{secrets.token_hex(4)}"
