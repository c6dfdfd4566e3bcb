"""What is asked: a model, its workers, their lines, and how the run is to be trained."""

from __future__ import annotations

from dataclasses import MISSING, dataclass

from diloco_protocol.dtypes import REPLY_DTYPES, WIRE_DTYPES, check_wire_dtype, in_few_bits
from diloco_protocol.errors import UsageError
from diloco_protocol.fragments import longest_delay
from diloco_protocol.quantities import parse_duration, parse_parameters
from diloco_tools.options import option
from diloco_tools.plan import quantities

# What a worker may train alone at most, and what is still simulated in a minute or two.
MOST_WORKERS, MOST_PARAMETERS, MOST_FRAGMENTS = 1000, 10**12, 256
# A line never carries its whole rate: a frame of Ethernet has 1514 bytes, 1448 of which are ours. That
# share was also measured through `tc tbf`.
USABLE = 0.95
# Headings of `--help`.
MOST_USED, RUN, SITES, FAILURES = "Most used", "The run", "Sites", "Failures"


@dataclass(frozen=True)
class Question:
    """See the head of this module. Rates are bits a second each way, delays seconds there and back.

    A field that is an option of `diloco-plan` is declared as one, with its help.

    Attributes:
        links, delays: of the workers; where there are fewer than workers, they are taken in turn.
        links_down: of the workers, where a line is another one on the way down; else as `links`.
        step_s: seconds of an inner step.
        delay_steps: tau, steps from sending a fragment to merging the reply; None: `auto`, at the first
            step at which it is all there.
        is_whole: pushes of rounds count whole (a quorum, `--deterministic`, an aggregate).
        sites: places that the workers are at, as many at each; the broker is at the first.
        site_link: the line of a site to the others, shared by its workers; None: as wide as need be.
        has_relays: a relay at each site sends one sum for its workers.
        lan_link, lan_delay: of a worker to what is at its own site.
        cores: that everything shares, on one machine; None: each has a machine of its own.
        fails_every_s: mean seconds between two failures of one worker; None: it never fails.
        back_after_s: until it is started again.
        dies_unnoticed: it goes without a word (a machine, a line), so that the broker waits for
            `heartbeat_timeout` seconds; a process that is killed is noticed at once.
    """

    parameters: int = option(
        MISSING, "Size of the model: 124M, 7B.", value="N", panel=MOST_USED, parse=parse_parameters
    )
    workers: int = option(2, "Workers that train.", value="N", panel=MOST_USED)
    broker_link: float = option(
        "1G", "The broker's line, each way.", value="RATE", panel=MOST_USED, parse=quantities.rate
    )
    links: tuple[float, ...] = (1e9,)
    links_down: tuple[float, ...] | None = None
    delays: tuple[float, ...] = option(
        "1ms",
        "From a worker to the broker and back, as ping shows.",
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
        "Parts that the model travels in.",
        "--num-fragments",
        "--fragments",
        "-P",
        value="P",
        panel=MOST_USED,
    )
    delay_steps: int | None = 0
    wire_dtype: str = option(
        "bf16", "Codec of pushes: bf16, fp32, int8, int4, int4z.", value="CODEC", panel=MOST_USED
    )
    reply_dtype: str = option("fp32", "Codec of replies.", value="CODEC", panel=RUN)
    mode: str = option("sync", "Rounds, or each worker by itself.", value="sync|async", panel=RUN)
    is_whole: bool = option(
        False,
        "Pushes count whole: --deterministic, an aggregate, a quorum.",
        "--whole",
        panel=RUN,
    )
    has_keys: bool = option(False, "Everything is encrypted.", "--keys", panel=RUN)
    sites: int = option(
        1, "Places with as many workers each; the broker is at one.", value="N", panel=SITES
    )
    site_link: float | None = option(
        None,
        "Line of a site, which its workers share.",
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
        "10G", "A worker's line within its site.", value="RATE", panel=SITES, parse=quantities.rate
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
        "Time until it is started again.",
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
                raise UsageError(f"{name} is {rate:g} bits a second; give a rate as 100M or 1G.")
        for name, seconds in (
            *(("--delay", each) for each in self.delays),
            ("--lan-delay", self.lan_delay),
        ):
            if not 0 <= seconds <= 60:
                raise UsageError(f"{name} is {seconds:g} s; give 0 to 60 seconds, as 20ms.")
        self._check_failures()
        if not 0 < self.step_s <= 1e6:
            raise UsageError(f"--step-time is {self.step_s:g} s; give what one inner step takes.")
        check_wire_dtype(self.wire_dtype, WIRE_DTYPES)
        check_wire_dtype(self.reply_dtype, REPLY_DTYPES)
        if self.mode not in ("sync", "async"):
            raise UsageError(f"--mode is {self.mode!r}; choose sync or async.")
        fewest = self.fragments * ((self.delay_steps or 0) + 1)
        if self.sync_every < fewest:
            raise UsageError(
                f"--sync-every {self.sync_every} is too little: {self.fragments} fragments with "
                f"tau = {self.delay_steps or 0} take at least H = P (tau + 1) = {fewest} steps. Give "
                "more steps, fewer fragments or a smaller tau."
            )
        if not 1 <= self.sites <= self.workers or self.workers % self.sites:
            raise UsageError(
                f"{self.workers} workers cannot be shared out evenly to {self.sites} sites; give "
                "--sites a number that divides --workers."
            )
        if self.has_relays and self.sites == 1:
            raise UsageError(
                "--relays puts a relay at each of several sites; say how many: --sites 4."
            )
        if self.has_relays and self.mode == "async":
            raise UsageError("--relays is for rounds: leave out --mode async.")

    def _check_failures(self) -> None:
        if self.fails_every_s is not None and not 1 <= self.fails_every_s < 1e12:
            raise UsageError(
                f"--fails-every is {self.fails_every_s:g} s; give the time between two failures of a "
                "worker, as 24h."
            )
        if not 0 <= self.back_after_s <= 1e9:
            raise UsageError(
                f"--back-after is {self.back_after_s:g} s; give how long it is away, as 10min."
            )

    # What follows.

    @property
    def waits_after(self) -> int:
        """Steps behind a push after which training waits for the reply."""
        if self.delay_steps is None:
            return longest_delay(self.sync_every, self.fragments)
        return self.delay_steps

    @property
    def counts_whole(self) -> bool:
        """A push counts whole or not at all, so that nothing comes back before all of it is there."""
        return self.is_whole or self.mode == "async"

    @property
    def has_shadow(self) -> bool:
        """The broker keeps what workers hold beside what it has, since replies are in few bits."""
        return in_few_bits(self.reply_dtype)

    def link(self, worker: int) -> float:
        return self.links[worker % len(self.links)]

    def link_down(self, worker: int) -> float:
        links = self.links_down or self.links
        return links[worker % len(links)]

    def delay(self, worker: int) -> float:
        return self.delays[worker % len(self.delays)]

    def site(self, worker: int) -> int:
        """Workers of a site are numbered one after the other."""
        return worker * self.sites // self.workers

    @property
    def at_a_site(self) -> int:
        return self.workers // self.sites


def _within(name: str, number: int, least: int, most: int) -> None:
    if not least <= number <= most:
        raise UsageError(f"{name} is {number:,}; give {least:,} to {most:,}.")
