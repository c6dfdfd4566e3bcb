"""The settings of a worker: keywords, options, and the DILOCO_* variables behind them.

Each keyword of `DiLoCoWorker` and each field of `WorkerOptions` has the variable DILOCO_<NAME>. A value
in the script wins over its variable; an empty variable counts as not set.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import os
import secrets
import socket
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from diloco_protocol import RunConfig, UsageError
from diloco_protocol.addresses import several
from diloco_protocol.clients import address_file
from diloco_protocol.clients.keys import Keys, find_keys
from diloco_protocol.dtypes import WIRE_DTYPES
from diloco_protocol.errors import check_names, did_you_mean
from diloco_protocol.messages import LONGEST_WORKER_ID, is_worker_id
from diloco_protocol.ranges import MOST
from diloco_protocol.roles import Role
from diloco_worker.transport import own_log
from diloco_worker.transport.broker_address import Given

logger = logging.getLogger("diloco.worker")

PREFIX = "DILOCO_"
SHARD_INDEX, NUM_SHARDS = "DILOCO_SHARD_INDEX", "DILOCO_NUM_SHARDS"
# Variables of displays, launchers and tests, which are not keywords of a worker.
OTHER_VARIABLES = (
    "DILOCO_FEED",
    "DILOCO_UPDATE_SNAPSHOTS",
    SHARD_INDEX,
    NUM_SHARDS,
    "DILOCO_END_FILE",
    own_log.VARIABLE,
    "DILOCO_KERNELS",
    "DILOCO_SEED_OFFSET",
)
# The rank of a process, as torchrun, Slurm, Open MPI and other MPI launchers name it.
RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
# `handle_signals`: SIGTERM ends the script at once.
EXIT = "exit"


@dataclass(frozen=True)
class Kind:
    """The values that a keyword takes."""

    read: Callable[[str], Any]  # parses a variable, or raises ValueError
    what: str  # ends the sentence "NAME is VALUE; it must be ..."
    holds: Callable[[Any], bool]  # whether a value is valid


def keyword(kind: Kind, default: Any = None) -> Any:
    """A field with a variable. `default` holds where neither is set."""
    return field(default=None, metadata={"kind": kind, "default": default})


def whole(least: int) -> Kind:
    """A whole number, at least this, that fits on the wire."""
    return Kind(
        int,
        f"a whole number, {least} or more",
        lambda value: type(value) is int and least <= value <= MOST,
    )


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


def _plain(text: str) -> Any:
    """The text as a number or a truth value, if it is one."""
    for read in (int, float, _truth):
        with contextlib.suppress(ValueError):
            return read(text)
    return text


def _is_small_dict(value: Any) -> bool:
    """Whether it maps texts to texts and numbers that fit on the wire."""

    def can_be_sent(value: Any) -> bool:
        if isinstance(value, str):
            return not any("\ud800" <= each <= "\udfff" for each in value)  # surrogates
        return isinstance(value, float | None) or (isinstance(value, int) and abs(value) <= MOST)

    return isinstance(value, Mapping) and all(
        isinstance(key, str) and can_be_sent(key) and can_be_sent(item)
        for key, item in value.items()
    )


SWITCH = Kind(_truth, "True or False (in a variable 1 or 0)", lambda value: isinstance(value, bool))
SECONDS = Kind(
    float,
    "a number, 0 or more",
    lambda value: (
        isinstance(value, int | float) and type(value) is not bool and 0 <= value < math.inf
    ),
)
ADDRESS = Kind(
    str,
    address_file.ADDRESS,
    lambda value: address_file.is_address(value) if isinstance(value, str) else callable(value),
)
LOCAL = "local"  # a server that is this process; see `local`
_SERVER = Kind(
    str,
    f"{ADDRESS.what}; or {LOCAL!r}, for an outer optimizer in this process",
    lambda value: value == LOCAL or ADDRESS.holds(value),
)
_ID = Kind(
    str,
    f"1 to {LONGEST_WORKER_ID} printable characters",
    lambda value: isinstance(value, str) and is_worker_id(value),
)
_WIRE_DTYPE = Kind(str, f"one of {', '.join(WIRE_DTYPES)}", lambda value: value in WIRE_DTYPES)
PLACES = ("cpu", "cuda")  # of the global parameters
_PLACE = Kind(str.lower, f"one of {', '.join(PLACES)}", lambda value: value in PLACES)
_FILE = Kind(str, "the path of a file", lambda value: isinstance(value, str | Path))
_SIGNALS = Kind(
    lambda text: EXIT if text.lower() == EXIT else _truth(text),
    f"True, False or {EXIT!r} (in a variable 1, 0 or {EXIT})",
    lambda value: isinstance(value, bool) or value == EXIT,
)
_EXTRA = Kind(
    _pairs,
    "a dict with text keys, and texts or numbers as values (in a variable pairs like "
    "gpu=a100,site=berlin)",
    _is_small_dict,
)
_EXPECT = Kind(
    lambda text: {name: _plain(value) for name, value in _pairs(text).items()},
    "a dict of the run's configuration (in a variable pairs like num_fragments=4,mode=sync)",
    _is_small_dict,
)
_TIED = Kind(
    lambda text: [[name.strip() for name in group.split("=")] for group in text.split(",")],
    "groups of names like [['embed.weight', 'head.weight']] (in a variable "
    "embed.weight=head.weight)",
    lambda value: isinstance(value, list | tuple) and not any(isinstance(v, str) for v in value),
)


_LOCAL = Kind(
    lambda text: {name: float(value) for name, value in _pairs(text).items()},
    "a dict of outer_lr, above 0, and outer_momentum, from 0 to below 1 (in a variable pairs like "
    "outer_lr=0.4,outer_momentum=0.9)",
    lambda value: (
        isinstance(value, Mapping)
        and value.keys() <= {"outer_lr", "outer_momentum"}
        and all(SECONDS.holds(each) for each in value.values())
        and value.get("outer_lr", 1) > 0
        and value.get("outer_momentum", 0) < 1
    ),
)


P = ParamSpec("P")
T = TypeVar("T")


def suggesting(function: Callable[P, T]) -> Callable[P, T]:
    """Raise UsageError for an unknown keyword of this function, with the nearest known one.

    Keywords that moved to `options` are put there first, where the function has them.
    """
    known = sorted(inspect.signature(function).parameters.keys() - {"self"})
    owner = function.__qualname__.removesuffix(".__init__")

    @wraps(function)
    def checked(*arguments: P.args, **keywords: P.kwargs) -> T:
        if "options" in known:
            _move_old_keywords(keywords)
        check_names(owner, "keyword", keywords, known)
        return function(*arguments, **keywords)

    return checked


def _suggesting_class(cls: type[T]) -> type[T]:
    setattr(cls, "__init__", suggesting(getattr(cls, "__init__")))  # noqa: B009, B010  for mypy
    return cls


@_suggesting_class
@dataclass(frozen=True)
class WorkerOptions:
    """Rarely used settings: `DiLoCoWorker(..., options=WorkerOptions(audit="audit.jsonl"))`.

    A field that is None takes the value of its variable DILOCO_<FIELD>, else the default named here.

    Attributes:
        heartbeat_interval: seconds, 0: none. Default: 30, or a third of what the broker tolerates if
            that is less.
        max_sync_retries: how often the connection may break at one boundary before training goes on with
            the delta in flight. Default: 3.
        dylu: False takes no part in Dynamic Local Updates and keeps the run's H. Default: True.
        tied: with a `process_group`, groups of names of one tensor that several parts of a pipeline
            have. Default: none.
        extra: a small dict, shown in displays. Default: empty.
        pin_memory: False: host memory that is copied to or from a CUDA device is not pinned.
            Default: pinned where the model is on one.
        keep_global_on: where the global parameters are kept in fp32: "cpu", the default, or "cuda", on
            the model's device.
        handle_signals: what SIGTERM does. True, the default: `should_stop` becomes True, boundaries no
            longer wait, and SystemExit is raised after the second step from then on. "exit": SystemExit
            at once, for scripts that never read `should_stop` and have long steps. False: SIGTERM is not
            handled.
        audit: a file that gets a JSON line for each push. Default: none.
        tensor_threads: threads that encode quantized deltas on the host, the sending one among
            them, to the same bits. Default: one less than there are cores, from 1 to 4.
        local: outer_lr and outer_momentum of server="local"; not used with a broker. Default: 0.4, and a
            momentum that rises from 0.5 to 0.9 in 200 outer steps.
    """

    heartbeat_interval: float | None = keyword(SECONDS)
    max_sync_retries: int | None = keyword(whole(0), 3)
    dylu: bool | None = keyword(SWITCH)
    tied: Sequence[Sequence[str]] | None = keyword(_TIED)
    extra: Mapping[str, Any] | None = keyword(_EXTRA)
    pin_memory: bool | None = keyword(SWITCH)
    keep_global_on: str | None = keyword(_PLACE)
    handle_signals: bool | str | None = keyword(_SIGNALS)
    audit: str | Path | None = keyword(_FILE)  # noqa: RUF009  a field, as the others
    tensor_threads: int | None = keyword(whole(1))
    local: Mapping[str, float] | None = keyword(_LOCAL)


@dataclass(frozen=True)
class Settings(WorkerOptions):
    """All settings of a worker: the keywords of `DiLoCoWorker` and its options."""

    server: Given | None = keyword(_SERVER)  # noqa: RUF009  a field
    sync_every: int | None = keyword(whole(1))
    worker_id: str | None = keyword(_ID)
    keys: str | Path | None = keyword(_FILE)  # noqa: RUF009  a field
    wire_dtype: str | None = keyword(_WIRE_DTYPE)
    timeout: float = keyword(SECONDS, 600.0)
    expect: Mapping[str, Any] | None = keyword(_EXPECT)

    @property
    def is_local(self) -> bool:
        return self.server == LOCAL

    @property
    def has_broker(self) -> bool:
        return self.server is not None and not self.is_local

    @property
    def wants(self) -> dict[str, Any]:
        """What the broker compares with its configuration at joining."""
        own = {"sync_every": self.sync_every, "wire_dtype": self.wire_dtype}
        asked = {**own, **(self.expect or {})}
        return {name: value for name, value in asked.items() if value is not None}


OPTIONS = [each.name for each in fields(WorkerOptions)]
# Keywords of `DiLoCoWorker` besides model and optimizer.
KEYWORDS = {each.name for each in fields(Settings)} - {*OPTIONS} | {"process_group", "options"}
# Keys of `expect`. H and the wire dtype may differ from the run's, by keywords.
EXPECTABLE = {each.name for each in fields(RunConfig)} - KEYWORDS


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """A sentence for each DILOCO_* variable that is set and unknown."""
    ours = [PREFIX + each.name.upper() for each in fields(Settings)]
    known = {*ours, *OTHER_VARIABLES, *(PREFIX + name.upper() for name in MOVED_TO_EXPECT)}
    return [
        f"{name} is set, but unknown{did_you_mean(name.upper(), ours)} "
        "docs/training-script.md has the list."
        for name in sorted(environ.keys() - known)
        if name.startswith(PREFIX) and environ[name].strip()
    ]


def warn_of_silence(server: Given | None) -> None:
    """Warn about silent misconfiguration: unknown variables, and training alone without a server."""
    for sentence in unknown_variables(os.environ):
        warn_once(sentence)
    if server is None:
        warn_once(
            "Without server= or DILOCO_SERVER this worker trains alone; give the broker's address, "
            "tcp://HOST:PORT, to take part in a run."
        )


def warn_once(sentence: str) -> None:
    """Warn once in a process, and only in the first process of a launcher."""
    rank = next((os.environ[name] for name in RANKS if os.environ.get(name)), "0")
    say_once(sentence, logging.WARNING if rank == "0" else logging.DEBUG)


@cache
def say_once(sentence: str, level: int) -> None:
    """Log a sentence once in this process."""
    logger.log(level, "%s", sentence)


def resolve(given: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Settings:
    """Merge keywords (None where not given) with the environment, and check each value.

    Args:
        given: keywords of `DiLoCoWorker`; those that `Settings` lacks are ignored.

    Raises:
        UsageError: an invalid value, naming where it came from.
    """
    environ = os.environ if environ is None else environ
    given = {**vars(options_of(given)), **given}
    values: dict[str, Any] = {}
    for each in fields(Settings):
        kind: Kind = each.metadata["kind"]
        value, source = given.get(each.name), each.name
        if value is None:
            source = PREFIX + each.name.upper()
            text = environ.get(source, "").strip()
            if not text:
                values[each.name] = each.metadata["default"]
                continue
            try:
                value = kind.read(text)
            except ValueError:
                raise _wrong(source, text, kind) from None
        check(value, kind, source)
        is_address = isinstance(value, str) and kind is _SERVER and value != LOCAL
        values[each.name] = ",".join(several(value)) if is_address else value
    expect = values["expect"] = {**_old_variables(environ), **(values["expect"] or {})}
    if own := sorted(KEYWORDS & expect.keys()):
        raise UsageError(f"{own[0]} is a keyword: DiLoCoWorker(..., {own[0]}=...), not in expect.")
    check_names("expect", "key", expect, EXPECTABLE)
    return Settings(**values)


def handed_on(owner: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords that a callback passes to its `DiLoCoWorker`; raises UsageError for unknown ones."""
    keywords = dict(given)
    _move_old_keywords(keywords)
    check_names(owner, "keyword", keywords, KEYWORDS)
    return keywords


def options_of(given: Mapping[str, Any]) -> WorkerOptions:
    """The options among the keywords, also as a mapping of fields; raises UsageError otherwise."""
    options = given.get("options")
    if isinstance(options, Mapping):
        return WorkerOptions(**options)
    if not isinstance(options, WorkerOptions | None):
        raise UsageError(f"options is {options!r:.80}; it must be a WorkerOptions.")
    return options or WorkerOptions()


def check(value: object, kind: Kind, source: str) -> None:
    """Raise UsageError for an invalid value, naming where it came from."""
    if not kind.holds(value):
        raise _wrong(source, value, kind)


def _wrong(source: str, value: object, kind: Kind) -> UsageError:
    return UsageError(f"{source} is {value!r:.80}; it must be {kind.what}.")


# Moved keywords, and their variables: they work until release 1.0.

# Moved from `DiLoCoWorker` to its `expect`, as `dylu=True`. The others moved to `options`.
MOVED_TO_EXPECT = ("num_fragments", "fragment_sync_delay", "fragment_update_alpha")


def _move_old_keywords(given: dict[str, Any]) -> None:
    """Put moved keywords where they belong now, each with a DeprecationWarning."""
    for name in [each for each in given if each in (*MOVED_TO_EXPECT, *OPTIONS)]:
        value = given.pop(name)
        if name in MOVED_TO_EXPECT or (name == "dylu" and value):
            given["expect"] = {name: value, **(given.get("expect") or {})}
            now = f"expect={{{name!r}: {value!r:.40}}}"
        else:
            given["options"] = replace(options_of(given), **{name: value})
            now = f"options=WorkerOptions({name}={value!r:.40})"
        # Above this function and two of ours is the script.
        warnings.warn(f"{name} has moved; write {now}.", DeprecationWarning, stacklevel=4)


def _old_variables(environ: Mapping[str, str]) -> dict[str, Any]:
    """The variables of keywords that moved to `expect`."""
    found = {}
    for name in MOVED_TO_EXPECT:
        variable = PREFIX + name.upper()
        if text := environ.get(variable, "").strip():
            found[name] = _plain(text)
            warn_once(
                f"{variable} is deprecated until release 1.0; set DILOCO_EXPECT={name}={text} instead."
            )
    return found


def chosen_shard(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Index and count of the data share in the environment; None where neither variable is set.

    Raises:
        UsageError: one of the variables is missing, or they are not a share.
    """
    texts = [environ.get(name, "").strip() for name in (SHARD_INDEX, NUM_SHARDS)]
    if not any(texts):
        return None
    with contextlib.suppress(ValueError):
        index, count = map(int, texts)
        if 0 <= index < count:
            return index, count
    raise UsageError(
        f"{SHARD_INDEX} is {texts[0]!r:.40} and {NUM_SHARDS} is {texts[1]!r:.40}; they must be an index "
        "from 0 and a number above it, or both be left out."
    )


def worker_keys(
    given: str | Path | None, chosen_id: str | None, *others: Role
) -> tuple[Keys | None, str | None]:
    """The key, and the worker id that belongs to it.

    Args:
        chosen_id: the worker id in the script.
        others: roles that are allowed besides that of a worker.

    Raises:
        UsageError: a key that cannot be read, has another role, or belongs to another worker.
    """
    keys = find_keys(given, Role.WORKER, *others)
    if keys is None:
        return None, chosen_id
    role, name = keys.peer.role, keys.peer.name
    if role not in (Role.WORKER, *others):
        raise UsageError(f"The key is that of {keys.peer}; training needs the key of a worker.")
    if role is Role.WORKER and chosen_id not in (None, name):
        raise UsageError(
            f"worker_id is {chosen_id!r:.80}, but the key is that of {keys.peer}; leave out worker_id, "
            "or use the other key."
        )
    return keys, name if role is Role.WORKER else chosen_id


def host_name() -> str:
    """The name of this machine, as part of a worker id."""
    return "".join(c for c in socket.gethostname() if c.isprintable())[:50] or "worker"


def default_worker_id() -> str:
    """Host name and eight random hexadecimal digits."""
    return f"{host_name()}-{secrets.token_hex(4)}"
