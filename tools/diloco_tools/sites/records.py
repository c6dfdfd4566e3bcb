"""What was measured of sites, and the file that it is kept in: `tools/sites.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Measurement:
    """One configuration. Bytes are those of all WAN lines in one round, headers included."""

    way: str  # "star" or "relays"
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
