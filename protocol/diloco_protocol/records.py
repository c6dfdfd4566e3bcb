"""The codec of records: converts frozen dataclasses to and from plain values for msgpack or JSON.

A record becomes a map with one key for each field, and so do nested records. Unknown keys are ignored,
so that fields can be added; a missing key takes the field's default, or is an error without one. Types
are checked, and numbers and texts are validated by `ranges`. Values of other classes, such as tensors,
are passed through.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from diloco_protocol.errors import Code, ProtocolError
from diloco_protocol.printable import printable, printable_all
from diloco_protocol.ranges import fit_of

R = TypeVar("R")
# The `metadata` of a field that is not part of the plain form.
NOT_SENT = {"is_sent": False}
LONGEST_QUOTED = 40  # characters of a text that is quoted in a message

# Types that are sent unchanged. Most fields have them, and heartbeats of hundreds of workers add up.
_SCALARS = frozenset({str, int, float, bool, bytes})
_AS_THEY_ARE = _SCALARS - {str}  # types that are also read unchanged


def to_plain(value: Any, *, with_none: bool = False) -> Any:
    """Convert a record, or a structure of records, to maps, lists and scalars for msgpack or JSON.

    Without `with_none`, fields that are None are omitted.
    """
    kind = type(value)
    if kind in _SCALARS:
        return value
    if hasattr(kind, "__dataclass_fields__"):
        return plain_fields(value, with_none=with_none)
    if isinstance(value, tuple):
        return [to_plain(item, with_none=with_none) for item in value]
    if kind is dict or isinstance(value, Mapping):  # the check of an ABC is slower
        return {key: to_plain(item, with_none=with_none) for key, item in value.items()}
    if isinstance(value, Enum):
        return value.value
    return value


def plain_fields(record: Any, *, with_none: bool = False) -> dict[str, Any]:
    """The fields of a record by name; see `to_plain`."""
    # Speed matters for hundreds of heartbeats and feed entries: scalars are not inspected.
    kind: Any = type(record)
    nested, not_sent = _by_their_types(kind)
    own: dict[str, Any] = vars(record)
    if with_none:
        plain = own.copy()
    else:
        plain = {name: value for name, value in own.items() if value is not None}
    for name in nested:
        value = plain.get(name)
        if value is not None:
            plain[name] = to_plain(value, with_none=with_none)
    for name in not_sent:
        plain.pop(name, None)
    return plain


@cache
def _by_their_types(record: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the fields that may have nested values, and of those that are not sent."""
    hints = get_type_hints(record)
    names = field_names(record)
    nested = tuple(name for name in names if _without_none(hints[name]) not in _SCALARS)
    return nested, tuple(each.name for each in fields(record) if each.name not in names)


@cache
def field_names(record: type) -> tuple[str, ...]:
    """Names of the fields that are part of the plain form."""
    return tuple(field.name for field in _sent(record))


def _sent(record: type[Any]) -> list[Field[Any]]:
    return [field for field in fields(record) if field.metadata.get("is_sent", True)]


def from_plain(record: type[R], plain: Any, where: str = "value", *, lenient: bool = False) -> R:
    """Read a record from its plain form; raises ProtocolError if it does not fit.

    `lenient` reads JSON of another release: null takes the default as a missing key does, an integer may
    be written as 5.0, and numbers are only limited to 64 bits.
    """
    annotation: Any = record
    value = _reader(annotation, lenient=lenient)(plain, where)
    assert isinstance(value, record)
    return value


Reader = Callable[[Any, str], Any]
"""Takes a plain value and its location for messages; returns the typed value."""


@cache
def _reader(annotation: Any, *, lenient: bool) -> Reader:  # noqa: PLR0911  one for each kind of type
    """A function that converts a plain value to the annotated type or raises ProtocolError."""
    origin = get_origin(annotation)
    if annotation in (Any, object):
        return _anything
    if origin in (Union, types.UnionType):
        read = _reader(_without_none(annotation), lenient=lenient)
        return lambda value, where: None if value is None else read(value, where)
    if origin is tuple:
        return _array_reader(get_args(annotation)[0], lenient=lenient)
    if origin is not None and issubclass(origin, Mapping):
        read = _reader(get_args(annotation)[1], lenient=lenient)
        return lambda value, where: {
            printable(_expect(key, str, where)): read(item, where)
            for key, item in _expect(value, dict, where).items()
        }
    if is_dataclass(annotation):
        assert isinstance(annotation, type)
        return _record_reader(annotation, lenient=lenient)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return lambda value, where: _member(annotation, value, where)
    if annotation is int and lenient:
        return _whole
    if annotation is str:
        return lambda value, where: printable(_expect(value, str, where))
    if annotation is float:
        return _number if lenient else lambda value, where: float(_expect(value, _NUMBERS, where))
    return lambda value, where: _expect(value, annotation, where)


def _array_reader(element: Any, *, lenient: bool) -> Reader:
    read = _reader(element, lenient=lenient)
    exact = element if element in _AS_THEY_ARE and not (element is int and lenient) else None

    def read_all(value: Any, where: str) -> tuple[Any, ...]:
        items = _expect(value, _ARRAYS, where)
        if exact is not None and all(type(item) is exact for item in items):
            return tuple(items)
        return tuple(read(item, f"{where}[{index}]") for index, item in enumerate(items))

    return read_all


def _record_reader(record: type[Any], *, lenient: bool) -> Reader:
    hints = get_type_hints(record)
    readers = {}
    for each in _sent(record):
        hint = hints[each.name]
        bare = _without_none(hint)
        fit = None
        if bare in (int, float, str) and not lenient:
            fit = fit_of(record, each.name, bare)
        # A value of exactly this type needs no further check.
        is_exact = bare in _AS_THEY_ARE or (bare is str and fit is not None)
        exact = bare if is_exact and not (bare is int and lenient) else None
        readers[each.name] = (exact, _reader(hint, lenient=lenient), fit)
    required = [each.name for each in _sent(record) if _is_required(each)]

    def read(value: Any, where: str) -> Any:
        if type(value) is not dict:
            _expect(value, dict, where)
        found = {}
        for name, plain in value.items():
            if name not in readers or (lenient and plain is None):
                continue
            exact, read_field, fit = readers[name]
            item = plain if type(plain) is exact else read_field(plain, f"{where}.{name}")
            found[name] = item if fit is None or item is None else fit(item, where, name)
        for name in required:
            if name not in found:
                raise ProtocolError(Code.BAD_HEADER, f"{where}.{name} is missing.")
        return record(**found)

    return read


def _without_none(annotation: Any) -> Any:
    """X for `X | None`; other annotations unchanged."""
    if get_origin(annotation) in (Union, types.UnionType):
        (annotation,) = (a for a in get_args(annotation) if a is not type(None))
    return annotation


def _is_required(a_field: Field[Any]) -> bool:
    return a_field.default is MISSING and a_field.default_factory is MISSING


_NUMBERS = (int, float)
_ARRAYS = (tuple, list)  # from msgpack and from JSON
_WORDS: dict[type | tuple[type, ...], str] = {
    int: "a whole number",
    str: "a text",
    bytes: "bytes",
    bool: "true or false",
    dict: "a map",
    _NUMBERS: "a number",
    _ARRAYS: "an array",
}


def _expect(value: Any, wanted: type | tuple[type, ...], where: str) -> Any:
    # bool is a subclass of int in Python, but not a number here.
    if isinstance(value, wanted) and not (isinstance(value, bool) and wanted is not bool):
        return value
    words = _WORDS.get(wanted) or f"a {getattr(wanted, '__name__', wanted)}"
    raise _misfit(value, words, where)


def _misfit(value: Any, wanted: str, where: str) -> ProtocolError:
    is_short = isinstance(value, int | float | None) or (
        isinstance(value, str) and len(value) <= LONGEST_QUOTED
    )
    shown = repr(value) if is_short else f"of type {type(value).__name__}"
    return ProtocolError(Code.BAD_HEADER, f"{where} is {shown:.80}; it must be {wanted}.")


def _anything(value: Any, where: str) -> Any:
    try:
        return printable_all(value)
    except ValueError as error:
        raise ProtocolError(Code.BAD_HEADER, f"{where} cannot be read: {error}.") from None


def _number(value: Any, where: str) -> float:
    number = _expect(value, _NUMBERS, where)
    if isinstance(number, int) and abs(number) >= 1 << 63:
        raise _misfit(value, "a number of 64 bits", where)
    return float(number)


def _whole(value: Any, where: str) -> int:
    number = _expect(value, _NUMBERS, where)
    if (isinstance(number, float) and not number.is_integer()) or abs(number) >= 1 << 63:
        raise _misfit(value, "a whole number of 64 bits", where)
    return int(number)


def _member(members: type[Enum], value: Any, where: str) -> Enum:
    try:
        return members(value)
    except ValueError:
        known = ", ".join(str(member.value) for member in members)
        raise ProtocolError(
            Code.BAD_HEADER, f"{where} is {value!r:.60}, it must be one of {known}."
        ) from None
