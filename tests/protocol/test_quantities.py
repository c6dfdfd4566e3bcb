"""Quantities as people write and read them."""

from collections.abc import Callable, Iterator
from dataclasses import fields
from math import inf, nan
from typing import Any, get_type_hints

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_protocol import quantities
from diloco_protocol.errors import ProtocolError
from diloco_protocol.messages import KINDS, PROTOCOL_VERSION, RunConfig, decode
from diloco_protocol.printable import DEEPEST, LONGEST_TEXT, printable
from diloco_protocol.quantities import FORMATS, NONE
from diloco_protocol.records import from_plain


@pytest.mark.parametrize(
    ("written", "values", "shown"),
    [
        (
            quantities.byte_size,
            (0, 9, 999, 1000, 9_960, 38_000_000, 999_600_000, 1_500_000_000_000),
            ["0 B", "9 B", "999 B", "1.0 kB", "10 kB", "38 MB", "1.0 GB", "1.5 TB"],
        ),
        (
            quantities.duration,
            (0.04, 0.44, 9.94, 9.96, 41.4, 99.6, 3600 * 1.9, 3600 * 50, 86400 * 400),
            ["0.0 s", "0.4 s", "9.9 s", "10 s", "41 s", "2 min", "2 h", "50 h", "400 d"],
        ),
        (quantities.duration, (inf, nan, -1.0, 1e79), [NONE] * 4),
        (quantities.clock, (8000, 266_400), ["02:13:20", "3 d 02:00"]),
        (quantities.scaled, (0, 0.41, 5.23, 1500, 820_000), ["0", "0.41", "5.2", "1.5k", "820k"]),
        (quantities.figure, (0.0, 2.4131, 1234.5, nan), ["0.000", "2.413", "1.23e+03", NONE]),
        (quantities.percent, (0.0, 0.012, 0.12), ["0%", "1.2%", "12%"]),
        (quantities.parameters, (9_930_000, 1_300_000_000, 2), ["9.93M", "1.3B", "2"]),
        (quantities.estimate_s, (0.02, 1.23, 750, 8e3), ["20 ms", "1.23 s", "12.5 min", "2.22 h"]),
    ],
)
def test_quantities_take_few_characters(
    written: Callable[[Any], str], values: tuple[Any, ...], shown: list[str]
) -> None:
    assert [written(value) for value in values] == shown


@pytest.mark.parametrize(
    "name", [name for name in FORMATS if name not in ("text", "names", "setting")]
)
@pytest.mark.parametrize("value", [None, inf, nan])
def test_every_format_writes_an_unknown_value_as_none(name: str, value: float | None) -> None:
    assert FORMATS[name](value) == NONE


def test_durations_have_units() -> None:
    seconds = {"20ms": 0.02, "0.5s": 0.5, "30m": 1800, "2min": 120, "36h": 129_600, "90": 90}
    assert {text: quantities.parse_duration(text) for text in seconds} == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "soon", "5 parsecs", "-1s", None, 5])
def test_malformed_duration_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="5min"):
        quantities.parse_duration(text)


# A line break, a command to a terminal, a mark of direction, a separator, a byte that rings.
NASTY = "a\n12:00:00 INFO all is well\r\x1b[2J\x1b]0;title\x07\u202eb\u2028\u200f\x9b\x00"


def texts(value: Any) -> Iterator[str]:
    """Each text in a value, and each key."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from (*texts(key), *texts(item))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from texts(item)


def with_nasty_texts(kind: str) -> dict[str, Any]:
    """A message of this kind in which each text is one, and each map and array of anything has some."""
    hints = get_type_hints(KINDS[kind])
    plain: dict[str, Any] = {"v": PROTOCOL_VERSION, "kind": kind}
    for each in fields(KINDS[kind]):
        hint = str(hints[each.name])
        if "Mapping" in hint:
            plain[each.name] = {NASTY: [NASTY, {NASTY: NASTY}]}
        elif hint in ("<class 'str'>", "str | None"):
            plain[each.name] = "w0" if each.name == "worker_id" else NASTY
        elif hint in ("<class 'int'>", "<class 'float'>"):
            plain[each.name] = 1
        elif hint == "<class 'bytes'>":
            plain[each.name] = b"0"
        elif hint == "<class 'bool'>":
            plain[each.name] = True
    return plain


@pytest.mark.parametrize("kind", ["join", "leave", "heartbeat", "control", "notice", "rejoin",
                                  "error", "result"])  # fmt: skip
def test_every_text_of_a_message_is_printable(kind: str) -> None:
    plain = with_nasty_texts(kind)
    found = list(texts(vars(decode(msgpack.packb(plain)))))
    assert any("INFO all is well" in each for each in found), "the test has sent some"
    assert all(each.isprintable() for each in found)


@pytest.mark.parametrize("field", ["name", "dtype"])
def test_names_are_refused_instead_of_changed(field: str) -> None:
    entry = {"name": "w", "shape": [1], "dtype": "float32", "kind": "trainable"}
    join = with_nasty_texts("join")
    decode(msgpack.packb(join | {"manifest": {"entries": [entry]}}))
    with pytest.raises(ProtocolError, match="printable") as refused:
        decode(msgpack.packb(join | {"manifest": {"entries": [entry | {field: NASTY}]}}))
    assert str(refused.value).isprintable()
    with pytest.raises(ProtocolError, match="printable") as refused:
        decode(msgpack.packb(join | {"worker_id": NASTY}))
    assert str(refused.value).isprintable()


@given(st.text(max_size=60))
def test_printable_text_stays_as_it_is(text: str) -> None:
    clean = printable(text)
    assert clean.isprintable()
    assert len(clean) == len(text)
    assert all(a in (b, "?") for a, b in zip(clean, text, strict=True))
    assert (clean == text) == text.isprintable()


def test_long_text_is_cut_and_deep_nesting_refused() -> None:
    leave = {"v": PROTOCOL_VERSION, "kind": "leave", "session": b"s"}
    message = decode(msgpack.packb(leave | {"reason": "x" * (LONGEST_TEXT + 1)}))
    assert len(vars(message)["reason"]) == LONGEST_TEXT
    deep: Any = "x"
    for _ in range(DEEPEST + 1):
        deep = [deep]
    with pytest.raises(ProtocolError, match="levels"):
        decode(msgpack.packb(with_nasty_texts("control") | {"arguments": {"a": deep}}))


@pytest.mark.parametrize(
    ("field", "value"), [("session", NASTY), ("push_id", NASTY), (NASTY, NASTY), ("kind", NASTY),
                     ("v", NASTY), ("wire_dtype", [NASTY])]
)  # fmt: skip
def test_errors_about_malformed_fields_are_printable(field: str, value: Any) -> None:
    plain = {"v": PROTOCOL_VERSION, "kind": "push", "session": b"", "push_id": 1}
    with pytest.raises(ProtocolError) as refused:
        decode(msgpack.packb(plain | {field: value}))
    assert str(refused.value).isprintable()


def test_leniently_read_config_is_printable() -> None:
    config = from_plain(RunConfig, {"mode": NASTY, "sync_every": 1}, "config", lenient=True)
    assert config.mode == printable(NASTY)
