"""What was measured of sites, and the file that it is kept in: `tools/lab/sites.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

WAYS = ("star", "whole", "relays")


class BadFile(Exception):
    """A file is none of ours; the message says what is wrong with it."""


@dataclass(frozen=True)
class Measurement:
    """Rounds in one configuration. Bytes are those of all WAN lines in a round, headers included."""

    # "star": all workers at the hub. "whole": the same, where the hub takes a push whole or not at
    # all, as it takes those of relays. "relays": one at each site.
    way: str
    parameters: int
    sites: int
    workers: int  # of all sites
    wire_dtype: str  # over the WAN
    reply_dtype: str
    wan_bits_per_s: float  # of each site's line, each way
    delay_s: float  # each way
    seconds: tuple[float, ...]  # of each round: until the new version is in all models
    bytes_up: float
    bytes_down: float
    averaged: int  # workers in the last round
    load: float  # processes that wanted a core in the minute before
    at: str

    @property
    def median_s(self) -> float:
        return median(self.seconds)

    @property
    def pair(self) -> str:
        return f"{self.wire_dtype}/{self.reply_dtype}"


@dataclass(frozen=True)
class Loss:
    """What happened when a part of the tree died, or was cut off."""

    what: str
    away_s: float | None  # until it was started again, or its line mended; None: it was not
    others_s: (
        float | None
    )  # from its end to the next round that the others made; None: nobody waited
    all_s: float | None  # from its return to the next round with all workers in it
    rounds: int  # that the run made in the meantime
    at: str


@dataclass(frozen=True)
class Trained:
    """What a model has come to, trained over two sites in one way."""

    way: str
    seed: int
    steps: int  # of each worker
    loss: float  # on text that nobody trains on, of the global parameters
    pushes: int  # of each site
    at: str


@dataclass(frozen=True)
class SitesFile:
    """All of it, with the machine."""

    command: str
    machine: Mapping[str, Any]
    rounds: tuple[Measurement, ...] = ()
    losses: tuple[Loss, ...] = ()
    trained: tuple[Trained, ...] = ()

    def text(self) -> str:
        """As it stands in the file: a line for each measurement, so that changes can be read."""
        head = json.dumps({"command": self.command, "machine": self.machine}, indent=2)[:-2]
        parts = [
            f'  "{name}": [\n    '
            + ",\n    ".join(json.dumps(_rounded(asdict(each))) for each in rows)
            + "\n  ]"
            for name, rows in (
                ("rounds", self.rounds),
                ("losses", self.losses),
                ("trained", self.trained),
            )
        ]
        return f"{head},\n" + ",\n".join(parts) + "\n}\n"


def read(path: Path) -> SitesFile:
    """Raises BadFile, with a sentence."""
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        return SitesFile(
            plain["command"],
            plain["machine"],
            tuple(_read(Measurement, each) for each in plain["rounds"]),
            tuple(_read(Loss, each) for each in plain["losses"]),
            tuple(_read(Trained, each) for each in plain.get("trained", [])),
        )
    except OSError as error:
        raise BadFile(f"{path} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError) as error:
        raise BadFile(f"{path} holds no measurements of this program ({error!r})") from None


T = TypeVar("T", Measurement, Loss, Trained)


def _read(kind: type[T], plain: Mapping[str, Any]) -> T:
    known = {each.name for each in fields(kind)}
    values: dict[str, Any] = {name: value for name, value in plain.items() if name in known}
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    return kind(**values)


def _rounded(value: Any) -> Any:
    """Numbers with as many digits as mean something."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value
