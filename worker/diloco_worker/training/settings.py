"""DILOCO_* variables: what a keyword is when the script does not give it.

A keyword that is given wins over its variable. An empty variable counts as not set.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import cache, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from diloco_protocol import UsageError
from diloco_protocol.addresses import several
from diloco_protocol.clients import address_file
from diloco_protocol.clients.keys import Keys, find_keys
from diloco_protocol.dtypes import WIRE_DTYPES
from diloco_protocol.messages import LONGEST_WORKER_ID, is_worker_id
from diloco_protocol.ranges import MOST
from diloco_protocol.roles import Role
from diloco_worker.model.placement import PLACES
from diloco_worker.transport import own_log
from diloco_worker.transport.whereabouts import Given

logger = logging.getLogger("diloco.worker")

DEFAULT_RETRIES = 3
DEFAULT_TIMEOUT_S = 600.0
AUTO = "auto"  # fragment_sync_delay: replies are merged as soon as they are here

PREFIX = "DILOCO_"
# Variables of this project that are no keyword of a worker: of displays, tests.
OTHER_VARIABLES = (
    "DILOCO_FEED",
    "DILOCO_UPDATE_SNAPSHOTS",
    "DILOCO_SHARD_INDEX",
    "DILOCO_NUM_SHARDS",
    "DILOCO_END_FILE",
    own_log.VARIABLE,
    "DILOCO_SEED_OFFSET",
)
# What launchers (torchrun, Slurm, Open MPI, other MPI) call the number of a process.
RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


@dataclass(frozen=True)
class Kind:
    """What a keyword takes."""

    read: Callable[[str], Any]  # makes a value of a variable's text, or raises ValueError
    what: str  # the end of the sentence "NAME is VALUE; it must be ..."
    holds: Callable[[Any], bool]  # whether a value can work


def keyword(kind: Kind, default: Any = None) -> Any:
    """A field that is a keyword of a worker, with a variable behind it."""
    return field(default=default, metadata={"kind": kind})


def whole(least: int) -> Kind:
    """A whole number, at least this, that the wire has room for."""

    def holds(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and least <= value <= MOST

    return Kind(int, f"a whole number, {least} or more", holds)


def number(most: float = math.inf) -> Kind:
    """A finite number from 0 to this."""
    limits = ", 0 or more" if most == math.inf else f" from 0 to {most:g}"

    def holds(value: Any) -> bool:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and 0 <= value <= most and math.isfinite(value)

    return Kind(float, f"a number{limits}", holds)


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


def _is_small_dict(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(key, str) and _can_be_sent(key) and _can_be_sent(item)
        for key, item in value.items()
    )


def _can_be_sent(value: Any) -> bool:
    """Whether it is a text or a number that the wire has room for."""
    if isinstance(value, str):
        return not any("\ud800" <= each <= "\udfff" for each in value)  # halves of characters
    if isinstance(value, int):
        return abs(value) <= MOST
    return isinstance(value, float | None)


SWITCH = Kind(_truth, "True or False (in a variable 1 or 0)", lambda value: isinstance(value, bool))
ADDRESS = Kind(
    str,
    address_file.ADDRESS,
    lambda value: address_file.is_address(value) if isinstance(value, str) else callable(value),
)
_ID = Kind(
    str,
    f"1 to {LONGEST_WORKER_ID} printable characters",
    lambda value: isinstance(value, str) and is_worker_id(value),
)
_WIRE_DTYPE = Kind(str, f"one of {', '.join(WIRE_DTYPES)}", lambda value: value in WIRE_DTYPES)
_PLACE = Kind(str.lower, f"one of {', '.join(PLACES)}", lambda value: value in PLACES)
_DELAY = Kind(
    lambda text: AUTO if text.lower() == AUTO else int(text),
    f"{whole(0).what}, or 'auto'",
    lambda value: value == AUTO or whole(0).holds(value),
)
# Displays show it.
_EXTRA = Kind(
    _pairs,
    "a dict with text keys, and texts or numbers as values (in a variable pairs like "
    "gpu=a100,site=berlin)",
    _is_small_dict,
)
_FILE = Kind(str, "the path of a file", lambda value: isinstance(value, str | Path))


@dataclass(frozen=True)
class Settings:
    """What a worker asks for. None means: what the broker says."""

    server: Given | None = keyword(ADDRESS)  # noqa: RUF009  a field, as below
    sync_every: int | None = keyword(whole(1))
    worker_id: str | None = keyword(_ID)
    wire_dtype: str | None = keyword(_WIRE_DTYPE)
    num_fragments: int | None = keyword(whole(1))
    fragment_sync_delay: int | str | None = keyword(_DELAY)
    fragment_update_alpha: float | None = keyword(number(most=1))
    dylu: bool | None = keyword(SWITCH)
    heartbeat_interval: float | None = keyword(number())
    max_sync_retries: int = keyword(whole(0), DEFAULT_RETRIES)
    timeout: float = keyword(number(), DEFAULT_TIMEOUT_S)
    keys: str | Path | None = keyword(_FILE)  # noqa: RUF009  a field, as above
    extra: Mapping[str, Any] | None = keyword(_EXTRA)
    pin_memory: bool | None = keyword(SWITCH)
    keep_global_on: str | None = keyword(_PLACE)
    handle_signals: bool | None = keyword(SWITCH)
    audit: str | Path | None = keyword(_FILE)  # noqa: RUF009  a field, as above

    @property
    def wants(self) -> dict[str, Any]:
        """The fields of the run's configuration that this worker insists on."""
        names = ["sync_every", "wire_dtype", "num_fragments"]
        names += ["fragment_sync_delay", "fragment_update_alpha"]
        if self.dylu:  # False is this worker's own affair
            names.append("dylu")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


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


P = ParamSpec("P")
T = TypeVar("T")


def suggesting(function: Callable[P, T]) -> Callable[P, T]:
    """Let this method raise a UsageError for an unknown keyword, with the nearest that it has."""
    known = sorted(inspect.signature(function).parameters.keys() - {"self"})
    owner = function.__qualname__.partition(".")[0]

    @wraps(function)
    def checked(*arguments: P.args, **keywords: P.kwargs) -> T:
        for name in keywords:
            if name not in known:
                near = get_close_matches(name, known, n=1)
                advice = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}."
                raise UsageError(f"{owner} has no keyword {name!r:.80}; {advice}")
        return function(*arguments, **keywords)

    return checked


def warn_of_silence(server: Given | None) -> None:
    """Warn about silent misconfiguration: unknown variables, and training alone without a server."""
    for sentence in unknown_variables(os.environ):
        warn_once(sentence)
    if server is None:
        warn_once(
            "There is no server= and no DILOCO_SERVER, so this worker trains alone; give the broker's "
            "address, tcp://HOST:PORT, to take part in a run."
        )


def warn_once(sentence: str) -> None:
    """Warn once in a process, and only in the first of the processes that a launcher has started.

    A warning is seen without logging being set up.
    """
    rank = next((os.environ[name] for name in RANKS if os.environ.get(name)), "0")
    say_once(sentence, logging.WARNING if rank == "0" else logging.DEBUG)


@cache
def say_once(sentence: str, level: int) -> None:
    """Log a sentence, unless this process has done so before."""
    logger.log(level, "%s", sentence)


def resolve(given: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Settings:
    """Merge keywords (None where the script is silent) with the environment, and check each value.

    Raises:
        UsageError: a value that cannot be read or cannot work, naming where it came from.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    for each in fields(Settings):
        kind: Kind = each.metadata["kind"]
        value, source = given.get(each.name), each.name
        if value is None:
            source = PREFIX + each.name.upper()
            text = environ.get(source, "").strip()
            if not text:
                continue
            try:
                value = kind.read(text)
            except ValueError:
                raise _wrong(source, text, kind) from None
        check(value, kind, source)
        values[each.name] = (
            ",".join(several(value)) if isinstance(value, str) and kind is ADDRESS else value
        )
    return Settings(**values)


def check(value: object, kind: Kind, source: str) -> None:
    """Raise UsageError for a value that cannot work, naming where it came from."""
    if not kind.holds(value):
        raise _wrong(source, value, kind)


def _wrong(source: str, value: object, kind: Kind) -> UsageError:
    return UsageError(f"{source} is {value!r:.80}; it must be {kind.what}.")


def worker_keys(
    given: str | Path | None, chosen_id: str | None, *others: Role
) -> tuple[Keys | None, str | None]:
    """The key that was given, and the worker id that goes with it.

    Args:
        chosen_id: what the script says.
        others: roles besides that of a worker that may do what is to be done.

    Raises:
        UsageError: a key that cannot be read, is no key of these, or belongs to another worker.
    """
    keys = find_keys(given, Role.WORKER, *others)
    if keys is None:
        return None, chosen_id
    role, name = keys.peer.role, keys.peer.name
    if role not in (Role.WORKER, *others):
        raise UsageError(f"The key is that of {keys.peer}; training takes the key of a worker.")
    if role is Role.WORKER and chosen_id not in (None, name):
        raise UsageError(
            f"worker_id is {chosen_id!r:.80}, but the key is that of {keys.peer}; leave worker_id out, "
            "or take the other key."
        )
    return keys, name if role is Role.WORKER else chosen_id


def default_worker_id() -> str:
    """Host name and eight random hexadecimal digits."""
    host = "".join(c for c in socket.gethostname() if c.isprintable())[:50] or "worker"
    return f"{host}-{secrets.token_hex(4)}"
