"""The codec of records: frozen dataclasses to and from plain values fit for msgpack or JSON.

A record is a map with one key for each field, nested records are maps as well. Unknown keys are
ignored, so that fields can be added; a missing key takes the field's default, and is an error where
there is none. Types are checked, and numbers are brought into the ranges of `ranges`.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from diloco_protocol.errors import Code, ProtocolError
from diloco_protocol.ranges import fit_of

R = TypeVar("R")

# What goes over the wire as it is. Most fields are such, and heartbeats of hundreds of workers add up.
_SCALARS = frozenset({str, int, float, bool, bytes})


def to_plain(value: Any) -> Any:
    """A record, or anything made of records, as maps, lists and scalars fit for msgpack or JSON."""
    if type(value) in _SCALARS:
        return value
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value):
        return plain_fields(value)
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    return value


def plain_fields(record: Any) -> dict[str, Any]:
    """Fields by name; those that are None are left out, since that is their default."""
    plain = {}
    for name in _field_names(record.__class__):
        value = getattr(record, name)
        if value is not None:
            plain[name] = value if type(value) in _SCALARS else to_plain(value)
    return plain


@cache
def _field_names(record: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(record))


def from_plain(record: type[R], plain: Any, where: str = "value") -> R:
    """Read a record from what `to_plain` made; raises ProtocolError when it does not fit."""
    value = _reader(record)(plain, where)
    assert isinstance(value, record)
    return value


Reader = Callable[[Any, str], Any]
_READERS: dict[Any, Reader] = {}


def _reader(annotation: Any) -> Reader:
    """A function that turns a plain value into the annotated type or raises ProtocolError."""
    reader = _READERS.get(annotation)
    if reader is None:
        reader = _READERS[annotation] = _make_reader(annotation)
    return reader


def _make_reader(annotation: Any) -> Reader:
    origin = get_origin(annotation)
    if annotation is Any:
        return lambda value, where: value
    if origin in (Union, types.UnionType):
        (inner,) = (a for a in get_args(annotation) if a is not type(None))
        read = _reader(inner)
        return lambda value, where: None if value is None else read(value, where)
    if origin is tuple:
        read = _reader(get_args(annotation)[0])
        return lambda value, where: tuple(
            read(item, where) for item in _expect(value, (tuple, list), where)
        )
    if origin is not None and issubclass(origin, Mapping):
        read = _reader(get_args(annotation)[1])
        return lambda value, where: {
            _expect(key, str, where): read(item, where)
            for key, item in _expect(value, dict, where).items()
        }
    if dataclasses.is_dataclass(annotation):
        assert isinstance(annotation, type)
        return _record_reader(annotation)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return lambda value, where: _member(annotation, value, where)
    if annotation is float:
        return lambda value, where: float(_expect(value, (int, float), where))
    return lambda value, where: _expect(value, annotation, where)


def _record_reader(record: type[Any]) -> Reader:
    hints = get_type_hints(record)
    readers = []
    for each in dataclasses.fields(record):
        hint = hints[each.name]
        exact = _exact(hint)
        fit = fit_of(record, each.name, is_whole=exact is int) if exact in (int, float) else None
        readers.append((each.name, exact, _reader(hint), fit, _required(each)))

    def read(value: Any, where: str) -> Any:
        plain = _expect(value, dict, where)
        fields = {}
        for name, exact, read_field, fit, required in readers:
            if name in plain:
                found = plain[name]
                is_so = type(found) is exact  # nothing to look at, no place to name
                found = found if is_so else read_field(found, f"{where}.{name}")
                fields[name] = found if fit is None or found is None else fit(found, where, name)
            elif required:
                raise ProtocolError(Code.BAD_HEADER, f"{where}.{name} is missing.")
        return record(**fields)

    return read


def _exact(annotation: Any) -> type | None:
    """The type of which every value fits the annotation, if it is one of the scalars."""
    if get_origin(annotation) in (Union, types.UnionType):
        (annotation,) = (a for a in get_args(annotation) if a is not type(None))
    return annotation if annotation in _SCALARS else None


def _required(a_field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return a_field.default is missing and a_field.default_factory is missing


# msgpack is read with arrays as tuples, JSON with arrays as lists.
_NAMES: dict[tuple[type, ...], str] = {(int, float): "number", (tuple, list): "tuple"}


def _expect(value: Any, wanted: type | tuple[type, ...], where: str) -> Any:
    # bool is an int to Python, but never to us.
    if isinstance(value, wanted) and not (isinstance(value, bool) and wanted is not bool):
        return value
    names = wanted.__name__ if isinstance(wanted, type) else _NAMES[wanted]
    raise ProtocolError(
        Code.BAD_HEADER, f"{where} is a {type(value).__name__}, it must be a {names}."
    )


def _member(members: type[Enum], value: Any, where: str) -> Enum:
    try:
        return members(value)
    except ValueError:
        known = ", ".join(str(member.value) for member in members)
        raise ProtocolError(
            Code.BAD_HEADER, f"{where} is {value!r:.60}, it must be one of {known}."
        ) from None
