"""Hostile messages: records with any values, or sound ones with a change."""

import dataclasses
import types
from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgpack

from diloco_protocol.errors import ProtocolError
from diloco_protocol.messages import KINDS, PROTOCOL_VERSION, Message, decode, encode
from fuzz.draws import Draws

R = TypeVar("R")

WHOLE = [0, 1, 2, 3, 7, 99, 255, 2**31, 2**32, 2**48, 2**53, 2**63, 2**64 - 1, -1, -(2**63)]
REAL = [0.0, 1.0, 0.5, -1.0, 5e-324, 1e-30, 1e30, 1e300, 1.7e308, float("inf"), float("nan")]
TEXTS = [
    *("a", "b", "c", "", "fp32", "bf16", "training", "status", "\x1b[2J", "z" * 300, "\U0001f98a")
]
BYTES = [b"", b"\x00", b"\x05", b"\xff", b"\xff" * 9, b"x" * 16]
LONGEST_ARRAY = 3


class Words:
    """What a conversation has been about: values that its later messages may use again, by type."""

    def __init__(self) -> None:
        self.known: dict[type, list[Any]] = {int: WHOLE, float: REAL, str: TEXTS, bytes: BYTES}

    def learn(self, *values: Any) -> None:
        """A session, the id of a worker, a version: whatever a message may name."""
        for value in values:
            of_type = self.known.get(type(value), [])
            if value not in of_type:
                self.known[type(value)] = [value, *of_type][:40]

    def value(self, draws: Draws, annotation: Any, depth: int = 0) -> Any:
        """Any value of an annotated type."""
        origin = get_origin(annotation)
        if origin in (Union, types.UnionType):
            (bare,) = (each for each in get_args(annotation) if each is not type(None))
            return self.value(draws, bare, depth) if draws.below(4) else None
        if annotation is Any:
            return self.value(draws, draws.one_of([int, float, str, bytes]), depth)
        if annotation is bool:
            return draws.is_so()
        if origin is tuple:
            count = draws.below(LONGEST_ARRAY + 1)
            return tuple(
                self.value(draws, get_args(annotation)[0], depth + 1) for _ in range(count)
            )
        if origin is not None and issubclass(origin, Mapping):
            of = get_args(annotation)[1]
            count = draws.below(LONGEST_ARRAY + 1)
            return {self.value(draws, str): self.value(draws, of, depth + 1) for _ in range(count)}
        if issubclass(annotation, Enum):
            return draws.one_of(list(annotation))
        if annotation in self.known and (annotation in (int, float, str, bytes) or draws.below(4)):
            return draws.one_of(self.known[annotation])
        return annotation(**self._fields(draws, annotation, depth))

    def _fields(self, draws: Draws, record: type, depth: int) -> dict[str, Any]:
        hints = get_type_hints(record)
        return {
            each.name: self.value(draws, hints[each.name], depth)
            for each in dataclasses.fields(record)
            if each.metadata.get("is_sent", True)
        }

    def message(self, draws: Draws, kinds: list[str]) -> Message:
        """A message of one of these kinds with any values."""
        made: Message = self.value(draws, KINDS[draws.one_of(kinds)])
        return made

    def changed(self, draws: Draws, record: R) -> R:
        of: Any = record
        hints = get_type_hints(type(of))
        name = draws.one_of([each.name for each in dataclasses.fields(of)])
        changed: R = dataclasses.replace(of, **{name: self.value(draws, hints[name])})
        return changed


def as_received(message: Message) -> Message | None:
    """What the other end makes of it; None where the wire refuses it."""
    try:
        return decode(encode(message))
    except (
        ProtocolError,
        OverflowError,
        UnicodeEncodeError,
    ):  # no msgpack has such a number or text
        return None


def header(draws: Draws) -> bytes:
    """A header frame with any plain values under the names that some kind of message has."""
    kind = draws.one_of(sorted(KINDS))
    names = [each.name for each in dataclasses.fields(KINDS[kind])]
    plain: dict[Any, Any] = {"v": PROTOCOL_VERSION, "kind": kind}
    for _ in range(draws.below(8)):
        plain[draws.one_of(names) if names and draws.below(8) else draws.one_of(TEXTS)] = _any(
            draws
        )
    return bytes(msgpack.packb(plain))


def _any(draws: Draws, depth: int = 0) -> Any:
    match draws.below(8 if depth < 4 else 5):
        case 0:
            return None
        case 1:
            return draws.one_of(WHOLE)
        case 2:
            return draws.one_of(REAL)
        case 3:
            return draws.one_of(TEXTS)
        case 4:
            return draws.one_of(BYTES)
        case 5:
            return [_any(draws, depth + 1) for _ in range(draws.below(5))]
        case 6:
            return {draws.one_of(TEXTS): _any(draws, depth + 1) for _ in range(draws.below(5))}
        case _:
            return msgpack.ExtType(draws.below(128), draws.bytes(draws.below(14)))
