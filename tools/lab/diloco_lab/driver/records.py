"""Files of results: documents with a line for each record, and logs by which runs resume."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

T = TypeVar("T")
Record = Mapping[str, Any]


class BadFile(Exception):
    """A file does not contain results of this program; the message says why."""


def text_of(document: Any) -> str:
    """A dataclass as JSON; its tuples contain records (dataclasses), one on each line."""
    values = {each.name: getattr(document, each.name) for each in fields(document)}
    records = {name: value for name, value in values.items() if isinstance(value, tuple)}
    head = {name: value for name, value in values.items() if name not in records}
    lists = [
        f'  "{name}": [\n    ' + ",\n    ".join(map(_line, rows)) + "\n  ]"
        for name, rows in records.items()
    ]
    return ",\n".join([json.dumps(head, indent=2)[:-2], *lists]) + "\n}\n"


def read_document(path: Path, kind: type[T]) -> T:
    """Read a document that `text_of` has written.

    Raises:
        BadFile: it cannot be read, or is something else.
    """
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        values = {each.name: plain[each.name] for each in fields(kind) if each.name in plain}  # type: ignore[arg-type]
        for name, hint in get_type_hints(kind).items():
            (of, *_) = get_args(hint) or [None]
            if isinstance(of, type) and is_dataclass(of):  # a tuple of records
                values[name] = tuple(record_of(of, each) for each in values.get(name, ()))
        return kind(**values)
    except OSError as error:
        raise BadFile(f"{path} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError) as error:
        raise BadFile(f"{path} contains no measurements of this program ({error!r})") from None


def record_of(kind: type[T], plain: Record) -> T:
    """A record from JSON; unknown keys, of a newer version say, are ignored."""
    known = {each.name for each in fields(kind)} & plain.keys()  # type: ignore[arg-type]
    values = {name: plain[name] for name in known}
    return kind(**{n: tuple(v) if isinstance(v, list) else v for n, v in values.items()})


def _line(record: Any) -> str:
    return json.dumps(_rounded(asdict(record)))


def _rounded(value: Any) -> Any:
    """Floats with their significant digits."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value


@dataclass
class Results:
    """A log with a line of JSON for each finished run, by which an interrupted experiment resumes.

    Attributes:
        key_of: identifies the run of a record.
    """

    file: Path
    key_of: Callable[[Record], str]
    _found: dict[str, dict[str, Any]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        text = self.file.read_text() if self.file.exists() else ""
        self._is_cut_off = text != "" and not text.endswith("\n")  # the machine was switched off
        for line in text.splitlines()[: -1 if self._is_cut_off else None]:
            if line:
                result = json.loads(line)
                self._found[self.key_of(result)] = dict(result)

    def __contains__(self, key: str) -> bool:
        return key in self._found

    def __getitem__(self, key: str) -> dict[str, Any]:
        return self._found[key]

    def add(self, result: Mapping[str, Any]) -> None:
        """Append a record at once; it replaces a line that was cut off."""
        self._found[self.key_of(result)] = dict(result)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        if self._is_cut_off:
            whole = self.file.read_text().rpartition("\n")[0]
            self.file.write_text(f"{whole}\n" if whole else "")
            self._is_cut_off = False
        with self.file.open("a") as opened:
            opened.write(json.dumps(result, allow_nan=False) + "\n")

    def missing(self, keys: Iterable[str]) -> list[str]:
        """Those without a record, each once, in order."""
        return [key for key in dict.fromkeys(keys) if key not in self]
