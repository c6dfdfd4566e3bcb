"""The answer: the share of time in training, and the load of the broker.

Time, waiting and CPU are simulated. Memory and the cost of failures are computed: failures are rare, so
that they would take days of simulated time, and the effect of one is simple.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean

from diloco_protocol.dtypes import SIZES, whole_dtype
from diloco_tools.plan.question import USABLE, Question
from diloco_tools.plan.simulated.costs import Costs
from diloco_tools.plan.simulated.run import Measured, simulate

DAY_S = 86400.0
# Bytes of the broker: parameters, momentum and accumulator in fp32, the copy of the workers' replicas,
# the interpreter with torch, and each worker (docs/deploying.md).
STATE, REPLICA, PROCESS, A_WORKER = 12, 4, 500e6, 5e6
STAGING_SLOTS = 2  # asynchronous submissions in progress at a time, by default


@dataclass(frozen=True)
class Failures:
    """The cost of failures, if each worker has one every `every_s` seconds.

    Attributes:
        lost_s: time lost by the worker itself per failure: half a cycle of lost steps, the restart, and
            the download of the parameters.
        others_wait_s: time that each other worker waits if the broker does not notice the failure.
        utilisation: including both.
    """

    every_s: float
    lost_s: float
    others_wait_s: float
    utilisation: float


@dataclass(frozen=True)
class Answer:
    """Bytes and CPU are those of all workers in a cycle of H steps.

    Attributes:
        measured: the simulated run; with relays, between these and the root broker.
        site: with relays, the simulated run between one relay and its workers.
    """

    question: Question
    measured: Measured
    site: Measured | None = None

    # Time.

    @property
    def _shares(self) -> list[float]:
        """The share of time in inner steps, 0 to 1, of each worker."""
        return [t / c for t, c in zip(self.measured.trains_s, self.measured.cycle_s, strict=True)]

    @property
    def utilisation(self) -> float:
        """The mean share of time in inner steps, 0 to 1."""
        return fmean(self._shares)

    @property
    def least_utilisation(self) -> float:
        """The lowest share of a worker."""
        return min(self._shares)

    @property
    def cycle_s(self) -> float:
        return fmean(self.measured.cycle_s)

    @property
    def trains_s(self) -> float:
        return fmean(self.measured.trains_s)

    @property
    def waits_s(self) -> float:
        """Seconds in a cycle in which training waits."""
        return max(0.0, self.cycle_s - self.trains_s)

    @property
    def hidden(self) -> float:
        """Share of the exchanges' time during which training continues."""
        exchanges = self.question.fragments * self.measured.exchange_s
        return max(0.0, 1.0 - self.waits_s / exchanges) if exchanges else 1.0

    # Bytes.

    @property
    def pushers(self) -> int:
        """The number of workers, or of relays, that push to the broker."""
        return self.question.sites if self.question.has_relays else self.question.workers

    @property
    def bytes_in(self) -> float:
        return self.pushers * self.measured.bytes_up

    @property
    def bytes_out(self) -> float:
        return self.pushers * self.measured.bytes_down

    @property
    def bytes_wan(self) -> float:
        """Both ways between sites: all but the traffic within the broker's own."""
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
        if question.has_replica:
            held += n * REPLICA
        elif question.reply_dtype != "fp32":  # replies are a converted copy
            held += n * SIZES[question.reply_dtype].element
        whole = STAGING_SLOTS if question.mode == "async" else self.pushers
        if question.counts_whole:
            held += whole * n * SIZES[question.wire_dtype].element
        return held + PROCESS + A_WORKER * self.pushers

    @property
    def broker_cores(self) -> float:
        """Busy cores on average."""
        return self.measured.broker_cpu_s / self.cycle_s

    @property
    def line_in(self) -> float:
        """Average utilisation of the broker's link, inbound."""
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
        # It dies at a random moment of a cycle; others wait for the rest of the timeout when they reach
        # the end of their own cycle.
        timeout, waits = question.heartbeat_timeout, 0.0
        if question.dies_unnoticed and question.mode == "sync" and question.workers > 1:
            early = min(timeout, self.cycle_s)
            waits = early * (timeout - early / 2) / self.cycle_s
        others = question.workers - 1
        share = self.utilisation / (1 + (lost + others * waits) / every)
        return Failures(every, lost, waits, share)


def answer(question: Question, costs: Costs | None = None, pieces: int | None = None) -> Answer:
    """Simulate the question, with this number of `pieces` per fragment; see `run.pieces_of`."""
    costs = costs or Costs()
    if not question.has_relays:
        return Answer(question, simulate(question, costs, pieces))
    site, hub = simulate(at_a_site(question), costs, pieces), between_sites(question)
    found = simulate(hub, costs, pieces)
    # Chunks stream through a relay, so a round takes as long as its slower side.
    slower = site.exchange_s - found.exchange_s
    if slower > 0:
        found = simulate(hub, costs, pieces, before_offer=slower)
    return Answer(question, found, site)


def at_a_site(question: Question) -> Question:
    """The exchange between a relay and its workers, as a separate run."""
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
    """The relays as the workers of the root broker at the first site."""
    of_sites = replace(question, workers=question.sites, site_link=None, has_relays=False)
    if question.site_link is None:
        return of_sites
    return replace(of_sites, links=(question.site_link,), links_down=None)
