"""The question: a model, its workers, their links, and the settings of the run."""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass

from diloco_protocol.dtypes import REPLY_DTYPES, WIRE_DTYPES, check_wire_dtype, is_quantized
from diloco_protocol.errors import UsageError
from diloco_protocol.fragments import longest_delay
from diloco_protocol.quantities import parse_duration, parse_parameters
from diloco_tools.options import option
from diloco_tools.plan import quantities

# Limits that keep a simulation within a minute or two.
MOST_WORKERS, MOST_PARAMETERS, MOST_FRAGMENTS = 1000, 10**12, 256
# The payload's share of a link's rate: 1448 of the 1514 bytes of an Ethernet frame; measured through
# `tc tbf` as well.
USABLE = 0.95
# Headings of `--help`.
MOST_USED, RUN, SITES, FAILURES = "Most used", "The run", "Sites", "Failures"


@dataclass(frozen=True)
class Question:
    """Rates are bits a second each way, delays are seconds of a round trip.

    Fields declared as options are those of `diloco-plan`.

    Attributes:
        links, delays: of the workers, in turn if there are fewer than workers.
        links_down: of the workers, if they differ from `links`.
        step_s: seconds of an inner step.
        delay_steps: tau, steps from sending a fragment to merging the reply; None (`auto`): at the first
            step after it is complete.
        is_whole: pushes of rounds count only when complete (a quorum, `--deterministic`, an aggregate).
        sites: places with equally many workers; the broker is at the first.
        site_link: the link of a site to the others, shared by its workers; None: unlimited.
        has_relays: a relay at each site sends one sum for its workers.
        lan_link, lan_delay: of a worker within its own site.
        cores: shared by all processes, on one machine; None: each has its own machine.
        fails_every_s: mean seconds between two failures of one worker; None: none.
        back_after_s: seconds until it is restarted.
        dies_unnoticed: its machine or link fails, so that the broker waits for `heartbeat_timeout`
            seconds; it notices the end of a process at once.
    """

    parameters: int = option(
        MISSING, "Size of the model: 124M, 7B.", value="N", panel=MOST_USED, parse=parse_parameters
    )
    workers: int = option(2, "Workers that train.", value="N", panel=MOST_USED)
    broker_link: float = option(
        "1G", "The broker's link, each way.", value="RATE", panel=MOST_USED, parse=quantities.rate
    )
    links: tuple[float, ...] = (1e9,)
    links_down: tuple[float, ...] | None = None
    delays: tuple[float, ...] = option(
        "1ms",
        "Round trip from a worker to the broker, as ping shows it.",
        "--delay",
        value="TIME[,TIME]",
        panel=MOST_USED,
        parse=quantities.several(parse_duration),
    )
    step_s: float = option(
        "1s",
        "Duration of an inner step.",
        "--step-time",
        value="TIME",
        panel=MOST_USED,
        parse=parse_duration,
    )
    sync_every: int = option(
        500, "Inner steps between two pushes.", "--sync-every", "-H", value="H", panel=MOST_USED
    )
    fragments: int = option(
        1,
        "Fragments of the model.",
        "--num-fragments",
        "--fragments",
        "-P",
        value="P",
        panel=MOST_USED,
    )
    delay_steps: int | None = 0
    wire_dtype: str = option(
        "bf16",
        "Codec of pushes: bf16, fp32, int8, int4, int4z, sparse.",
        value="CODEC",
        panel=MOST_USED,
    )
    reply_dtype: str = option("fp32", "Codec of replies.", value="CODEC", panel=RUN)
    mode: str = option("sync", "Synchronous or asynchronous.", value="sync|async", panel=RUN)
    is_whole: bool = option(
        False,
        "Pushes count only when complete: --deterministic, an aggregate, a quorum.",
        "--whole",
        panel=RUN,
    )
    has_keys: bool = option(False, "Everything is encrypted.", "--keys", panel=RUN)
    sites: int = option(
        1, "Sites of equally many workers; the broker is at the first.", value="N", panel=SITES
    )
    site_link: float | None = option(
        None,
        "Link of a site, shared by its workers.",
        value="RATE",
        panel=SITES,
        parse=quantities.rate,
    )
    has_relays: bool = option(
        False,
        "A relay at each site sends one sum for its workers: diloco-broker relay.",
        "--relays",
        panel=SITES,
    )
    lan_link: float = option(
        "10G", "A worker's link within its site.", value="RATE", panel=SITES, parse=quantities.rate
    )
    lan_delay: float = 0.0005
    cores: float | None = None
    fails_every_s: float | None = option(
        None,
        "Mean time between failures of a worker.",
        "--fails-every",
        value="TIME",
        panel=FAILURES,
        parse=parse_duration,
    )
    back_after_s: float = option(
        "5min",
        "Time until it is restarted.",
        "--back-after",
        value="TIME",
        panel=FAILURES,
        parse=parse_duration,
    )
    dies_unnoticed: bool = option(
        False,
        "The machine or link fails, so the broker notices only after its timeout.",
        "--dies-unnoticed",
        panel=FAILURES,
    )
    heartbeat_timeout: float = 120.0

    def __post_init__(self) -> None:
        _within("--parameters", self.parameters, 1, MOST_PARAMETERS)
        _within("--workers", self.workers, 1, MOST_WORKERS)
        _within("--num-fragments", self.fragments, 1, min(MOST_FRAGMENTS, self.parameters))
        _within("--sync-every", self.sync_every, 1, 10**9)
        for name, rate in (
            ("--broker-link", self.broker_link),
            *(("--link", each) for each in (*self.links, *(self.links_down or ()))),
            ("--site-link", self.site_link or 1.0),
            ("--lan-link", self.lan_link),
        ):
            if not 0 < rate < 1e18:
                raise UsageError(
                    f"{name} is {rate:g} bits a second; use a rate such as 100M or 1G."
                )
        for name, seconds in (
            *(("--delay", each) for each in self.delays),
            ("--lan-delay", self.lan_delay),
        ):
            if not 0 <= seconds <= 60:
                raise UsageError(f"{name} is {seconds:g} s; use 0 to 60 seconds, such as 20ms.")
        every = math.inf if self.fails_every_s is None else self.fails_every_s
        for name, seconds, is_valid in (
            ("--fails-every", every, every >= 1),
            ("--back-after", self.back_after_s, 0 <= self.back_after_s <= 1e9),
            ("--step-time", self.step_s, 0 < self.step_s <= 1e6),
        ):
            if not is_valid:
                raise UsageError(f"{name} is out of range: {seconds:g} s.")
        check_wire_dtype(self.wire_dtype, WIRE_DTYPES)
        check_wire_dtype(self.reply_dtype, REPLY_DTYPES)
        if self.mode not in ("sync", "async"):
            raise UsageError(f"--mode is {self.mode!r}; choose sync or async.")
        fewest = self.fragments * ((self.delay_steps or 0) + 1)
        if self.sync_every < fewest:
            raise UsageError(
                f"--sync-every {self.sync_every} is too small: {self.fragments} fragments with "
                f"tau = {self.delay_steps or 0} need at least H = P (tau + 1) = {fewest} steps. Use "
                "more steps, fewer fragments or a smaller tau."
            )
        if not 1 <= self.sites <= self.workers or self.workers % self.sites:
            raise UsageError(
                f"{self.workers} workers cannot be distributed evenly over {self.sites} sites; --sites "
                "must divide --workers."
            )
        if self.has_relays and self.sites == 1:
            raise UsageError("--relays needs several sites: give --sites 4, for example.")
        if self.has_relays and self.mode == "async":
            raise UsageError("--relays works only in synchronous mode: omit --mode async.")

    @property
    def waits_after(self) -> int:
        """Steps after a push at which training waits for the reply."""
        if self.delay_steps is None:
            return longest_delay(self.sync_every, self.fragments)
        return self.delay_steps

    @property
    def counts_whole(self) -> bool:
        """A push counts only when complete, so that no reply starts before then."""
        return self.is_whole or self.mode == "async"

    @property
    def has_replica(self) -> bool:
        """The broker keeps a copy of the workers' replicas, since replies are quantized."""
        return is_quantized(self.reply_dtype)

    def link(self, worker: int) -> float:
        return self.links[worker % len(self.links)]

    def link_down(self, worker: int) -> float:
        links = self.links_down or self.links
        return links[worker % len(links)]

    def delay(self, worker: int) -> float:
        return self.delays[worker % len(self.delays)]

    def site(self, worker: int) -> int:
        """The site of a worker; workers of a site have consecutive numbers."""
        return worker * self.sites // self.workers

    @property
    def at_a_site(self) -> int:
        return self.workers // self.sites


def _within(name: str, number: int, least: int, most: int) -> None:
    if not least <= number <= most:
        raise UsageError(f"{name} must be between {least:,} and {most:,}, got {number:,}.")
