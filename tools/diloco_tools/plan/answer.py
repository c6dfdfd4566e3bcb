"""What a simulated run comes to: how much of the time is training, and what the broker needs for it.

Time, waiting and CPU are simulated. Memory and what failures cost are arithmetic: failures would have to
be simulated for days to be seen often enough, and what follows from one is plain.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from diloco_protocol.dtypes import SIZES, whole_dtype
from diloco_tools.plan.question import USABLE, Question
from diloco_tools.plan.simulated.costs import Costs
from diloco_tools.plan.simulated.run import Measured, simulate

DAY_S = 86400.0
# Bytes of the broker: parameters, momentum and accumulator in fp32, the shadow of what workers hold, the
# interpreter with torch, and what each worker takes (docs/deploying.md).
STATE, SHADOW, PROCESS, A_WORKER = 12, 4, 500e6, 5e6
STAGING_SLOTS = 2  # asynchronous submissions under way at a time, by default


@dataclass(frozen=True)
class Failures:
    """What failures cost, of one worker that has one every `every_s` seconds.

    Attributes:
        lost_s: its own time for each: half a cycle of steps that nobody has, until it is started again,
            and until it has the parameters.
        others_wait_s: what each other worker waits for it, where nobody tells the broker.
        utilisation: with all of that.
    """

    every_s: float
    lost_s: float
    others_wait_s: float
    utilisation: float


@dataclass(frozen=True)
class Answer:
    """See the head of this module. Bytes and CPU are of a cycle of H steps of all workers.

    Attributes:
        measured: the simulated run; with relays, what goes between these and the hub.
        site: with relays, what goes between one and its workers.
    """

    question: Question
    measured: Measured
    site: Measured | None = None

    # Time.

    @property
    def utilisation(self) -> float:
        """Share of the time that inner steps have, 0 to 1: the mean of the workers."""
        return _mean(
            [t / c for t, c in zip(self.measured.trains_s, self.measured.cycle_s, strict=True)]
        )

    @property
    def least_utilisation(self) -> float:
        """The same of the worker that has least."""
        return min(
            t / c for t, c in zip(self.measured.trains_s, self.measured.cycle_s, strict=True)
        )

    @property
    def cycle_s(self) -> float:
        return _mean(list(self.measured.cycle_s))

    @property
    def trains_s(self) -> float:
        return _mean(list(self.measured.trains_s))

    @property
    def waits_s(self) -> float:
        """What training stands still in a cycle."""
        return max(0.0, self.cycle_s - self.trains_s)

    @property
    def hidden(self) -> float:
        """Share of the exchanges' time in which training went on."""
        exchanges = self.question.fragments * self.measured.exchange_s
        return max(0.0, 1.0 - self.waits_s / exchanges) if exchanges else 1.0

    # Bytes.

    @property
    def pushers(self) -> int:
        """Who pushes to the broker: workers, or the relay of each site."""
        return self.question.sites if self.question.has_relays else self.question.workers

    @property
    def bytes_in(self) -> float:
        return self.pushers * self.measured.bytes_up

    @property
    def bytes_out(self) -> float:
        return self.pushers * self.measured.bytes_down

    @property
    def bytes_wan(self) -> float:
        """Both ways between sites: all but what stays at the broker's own."""
        sites = self.question.sites
        return (self.bytes_in + self.bytes_out) * (1 if sites == 1 else (sites - 1) / sites)

    @property
    def cycles_a_day(self) -> float:
        return DAY_S / self.cycle_s

    # The broker.

    @property
    def broker_memory(self) -> float:
        question, n = self.question, self.question.parameters
        held: float = n * STATE
        if question.has_shadow:
            held += n * SHADOW
        elif question.reply_dtype != "fp32":  # what is handed out is a copy
            held += n * SIZES[question.reply_dtype].element
        whole = STAGING_SLOTS if question.mode == "async" else self.pushers
        if question.counts_whole:
            held += whole * n * SIZES[question.wire_dtype].element
        return held + PROCESS + A_WORKER * self.pushers

    @property
    def broker_cores(self) -> float:
        """That are busy on average."""
        return self.measured.broker_cpu_s / self.cycle_s

    @property
    def line_in(self) -> float:
        """Share of the broker's line that is used on average, on the way in."""
        return self.bytes_in / self.cycle_s / self._line

    @property
    def line_out(self) -> float:
        return self.bytes_out / self.cycle_s / self._line

    @property
    def _line(self) -> float:
        return self.question.broker_link * USABLE / 8

    # Failures.

    @property
    def failures(self) -> Failures | None:
        question, every = self.question, self.question.fails_every_s
        if every is None:
            return None
        whole = SIZES[whole_dtype(question.reply_dtype)].element * question.parameters
        downs = question.links_down or question.links
        line = min(question.broker_link, *downs) * USABLE / 8
        lost = self.cycle_s / 2 + question.back_after_s + whole / line
        # It dies at any moment of a cycle; others wait only for what is left of the time-out when they
        # come to the end of theirs.
        timeout, waits = question.heartbeat_timeout, 0.0
        if question.dies_unnoticed and question.mode == "sync" and question.workers > 1:
            early = min(timeout, self.cycle_s)
            waits = early * (timeout - early / 2) / self.cycle_s
        others = question.workers - 1
        share = self.utilisation / (1 + (lost + others * waits) / every)
        return Failures(every, lost, waits, share)


def answer(question: Question, costs: Costs | None = None, pieces: int | None = None) -> Answer:
    """Simulate what is asked; `pieces` of each fragment, by default as many as take no time."""
    costs = costs or Costs()
    if not question.has_relays:
        return Answer(question, simulate(question, costs, pieces))
    site, hub = simulate(at_a_site(question), costs, pieces), between_sites(question)
    found = simulate(hub, costs, pieces)
    # Chunks stream through a relay, so a round takes as long as the slower side of it.
    slower = site.exchange_s - found.exchange_s
    if slower > 0:
        found = simulate(hub, costs, pieces, before_offer=slower)
    return Answer(question, found, site)


def at_a_site(question: Question) -> Question:
    """What goes between a relay and its own workers, as a run of its own."""
    return replace(
        question,
        workers=question.at_a_site,
        broker_link=question.lan_link,
        links=(question.lan_link,),
        links_down=None,
        delays=(question.lan_delay,),
        delay_steps=0,
        sites=1,
        has_relays=False,
    )


def between_sites(question: Question) -> Question:
    """The relays as the workers of a hub, which is at the first site."""
    of_sites = replace(question, workers=question.sites, site_link=None, has_relays=False)
    if question.site_link is None:
        return of_sites
    return replace(of_sites, links=(question.site_link,), links_down=None)


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)
