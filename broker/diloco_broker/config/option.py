"""The definition of an option: default, validation rule, and help text."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import Field, dataclass, field
from typing import Any

from diloco_broker.config.schedule import CONSTANT, MOST_ROUNDS, Schedule
from diloco_protocol.errors import UsageError
from diloco_protocol.quantities import parse_duration

_KEY = "option"
LONGEST_WORD = 16  # characters of a placeholder; a longer list of choices is in the help text


@dataclass(frozen=True)
class Rule:
    """The requirement on a value, independent of other options."""

    what: str  # the end of the sentence "--name is VALUE; it must be ..."
    holds: Callable[[Any], bool]
    show: Callable[[Any], str] = str  # formats a value in that sentence
    word: str = "X"  # placeholder of the value in `--help`


@dataclass(frozen=True)
class Option:
    """The metadata of an option besides its name, type and default."""

    rule: Rule
    panel: str  # its heading in `--help`; empty: not on the command line
    help: str  # one or two sentences
    if_none: str = ""  # the effective default of an option whose default is None
    reads: type | None = None  # type on the command line; None: the type of the field


@dataclass(frozen=True)
class Panel:
    """A group of options in `--help`."""

    title: str

    def option(
        self, default: Any, rule: Rule, text: str, *, if_none: str = "", reads: type | None = None
    ) -> Any:
        """Declare a dataclass field as an option; see `Option`. None is valid only as the default."""
        option = Option(rule, self.title, text, if_none, reads)
        return field(default=default, metadata={_KEY: option})


def option_of(declared: Field[Any]) -> Option:
    """The metadata of a declared field."""
    option = declared.metadata[_KEY]
    assert isinstance(option, Option)
    return option


def check_alone(declared: Field[Any], value: object) -> None:
    """Check a value by its own rule; raises UsageError if it breaks the rule."""
    rule = option_of(declared).rule
    if not (value is None and declared.default is None) and not rule.holds(value):
        raise refusal(declared.name, rule.show(value), rule.what)


def refusal(name: str, value: object, what: str) -> UsageError:
    """The error for an invalid value, with the option as on the command line."""
    return UsageError(f"--{name.replace('_', '-')} is {value}; it must be {what}.")


def one_of(*choices: str) -> Rule:
    *others, last = choices
    word = "|".join(choices)
    return Rule(
        f"{', '.join(others)} or {last}",
        lambda value: value in choices,
        word=word if len(word) <= LONGEST_WORD else "NAME",
    )


def whole(least: int, most: float = math.inf) -> Rule:
    """An integer in [least, most]."""
    limits = f"at least {least}" if most == math.inf else f"from {least} to {most}"

    def holds(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most

    return Rule(f"a whole number, {limits}", holds, word="N")


def word_or(word: str, rule: Rule) -> Rule:
    """One word, or a value that another rule accepts."""
    holds = rule.holds
    return Rule(
        f"{word}, or {rule.what}",
        lambda value: value == word or holds(value),
        word=f"{rule.word}|{word}",
    )


def _number(what: str, fits: Callable[[float], bool], unit: str = "") -> Rule:
    def holds(value: Any) -> bool:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and math.isfinite(value) and fits(value)

    return Rule(what, holds, word=unit.strip().upper() or "X")


def up_to(most: float, unit: str = "") -> Rule:
    """A number in [0, most]."""
    return _number(f"from 0 to {most:.12g}{unit}", lambda value: 0 <= value <= most, unit)


def above_0_up_to(most: float, unit: str = "") -> Rule:
    """A number in (0, most]."""
    return _number(f"above 0, at most {most:.12g}{unit}", lambda value: 0 < value <= most, unit)


def within(least: float, most: float, unit: str = "") -> Rule:
    """A number in [least, most]."""
    what = f"from {least:.12g} to {most:.12g}{unit}"
    return _number(what, lambda value: least <= value <= most, unit)


FINITE = _number("a finite number", lambda _: True)
BELOW_ONE = _number("in [0, 1)", lambda value: 0 <= value < 1)
BELOW_HALF = _number("in [0, 0.5)", lambda value: 0 <= value < 0.5)
UP_TO_ONE = _number("in [0, 1]", lambda value: 0 <= value <= 1)
SWITCH = Rule("True or False", lambda value: isinstance(value, bool), repr)


def schedule(value: str, bounds: str, fits: Callable[[Schedule], bool]) -> Rule:
    """The text of a schedule over rounds; `value` is the name of its third number."""

    def holds(text: Any) -> bool:
        try:
            return fits(Schedule.parse(text))
        except ValueError:
            return False

    what = f"{CONSTANT}, linear:R[:{value}] or cosine:R[:{value}], with R from 1 to {MOST_ROUNDS} rounds"
    return Rule(f"{what} and {value} {bounds}", holds, lambda text: str(text)[:60], "CURVE")


def _is_duration(text: Any) -> bool:
    try:
        return parse_duration(text) > 0
    except ValueError:
        return False


DURATION = Rule(
    "a duration like 90s, 30m, 36h or 7d", _is_duration, lambda text: f"{text!s:.60}", "TIME"
)


def path_of(what: str) -> Rule:
    """A nonempty path; `what` names the kind of file."""
    return Rule(
        f"the path of a {what}", lambda value: isinstance(value, str) and value != "", repr, "PATH"
    )


def _is_address(address: str) -> bool:
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme == "ipc":  # a path without a port
        return rest != ""
    if scheme != "tcp" or not host or "/" in rest or not (port == "*" or port.isdecimal()):
        return False
    if host.startswith("[") != host.endswith("]") or (":" in host and host[0] != "["):
        return False
    return port == "*" or int(port) <= 65535


ADDRESS = Rule(
    "an address like tcp://127.0.0.1:8512 (port * picks a free one)", _is_address, repr, "ADDR"
)
