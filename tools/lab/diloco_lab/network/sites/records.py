"""What was measured of sites, and the file that keeps it: `tools/lab/sites.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from diloco_lab.driver.records import read_document

WAYS = ("star", "whole", "relays")


@dataclass(frozen=True)
class Measurement:
    """Rounds in one configuration. Bytes are those of all WAN lines in a round, headers included."""

    # "star": all workers at the hub. "whole": the same, but the hub counts only complete pushes, as
    # it does with those of relays. "relays": one at each site.
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
    # From its end to the next round that the others made; None: no other worker waited.
    others_s: float | None
    all_s: float | None  # from its return to the next round with all workers in it
    rounds: int  # that the run made in the meantime
    at: str


@dataclass(frozen=True)
class Trained:
    """The loss of a model that was trained over two sites in one way."""

    way: str
    seed: int
    steps: int  # of each worker
    loss: float  # of the global parameters, on held-out text
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

    def with_older(self, _: SitesFile) -> SitesFile:
        """All of it is measured again each time."""
        return self


def read(path: Path) -> SitesFile:
    """Raises BadFile."""
    kinds = {"rounds": Measurement, "losses": Loss, "trained": Trained}
    return read_document(path, SitesFile, kinds)
