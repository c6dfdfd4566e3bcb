"""A relay whose site takes several rounds to one push: what is different from any other (experimental).

See `local_rounds`. Here a round of the site closes as at any broker, with a version of the site's own,
but for each K-th: its version is the parent's, once that has what the site has sent. Meanwhile the site
waits. Where the parent refuses it, the site goes on by itself, and sends the whole way after K rounds
more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from diloco_broker.config import BrokerConfig
from diloco_broker.core.versions.record import Resumption
from diloco_broker.relay.commands import Commands, Forget, GoOnFrom, Say, StepHere
from diloco_broker.relay.core import Relay
from diloco_broker.relay.local_rounds import Account
from diloco_protocol import messages
from diloco_protocol.errors import Code
from diloco_protocol.manifest import Manifest
from diloco_protocol.messages import RunConfig
from diloco_protocol.version import VersionId
from diloco_worker.session import effects as to_parent
from diloco_worker.session.compatibility import Terms


def run_of(run: str, site: str) -> str:
    """What a site's run is called: the same in each life of its relay, and nobody else's.

    Elsewhere its versions would pass for newer ones of the parent's run.
    """
    return hashlib.blake2b(f"{run} {site}".encode(), digest_size=8).hexdigest()


class LocalRelay(Relay):
    """See the head of this module; `every` is K, the others are as of `Relay`."""

    HAS_OWN_RUN = True

    def __init__(
        self,
        every: int,
        join: messages.Join,
        config: BrokerConfig,
        draw: Callable[[], int],
        now: float,
        *,
        parent: str,
        wire_dtype: str | None,
    ) -> None:
        super().__init__(join, config, draw, now, parent=parent, wire_dtype=wire_dtype)
        self._account = Account(every)

    def averaged(self) -> Commands:
        """The site has taken a step of its own; after each K-th it has gone far enough."""
        self._account.takes(self._push_of_closing())
        if self._account.is_due:
            assert self.session is not None and self.session.config is not None
            yield from self._sends(self._account.push(self.session.config.weight_by))
        else:
            yield StepHere()

    def _why_not_here(self, config: RunConfig) -> str | None:
        if config.mode != "sync" or config.num_fragments != 1:
            return "--local-rounds takes part in runs with rounds of one fragment only."
        return super()._why_not_here(config)

    def _has_gone_back(self, versions: Sequence[VersionId | None]) -> bool:
        return False  # the site's versions are its own

    def _delivered(self, effect: to_parent.Deliver, wires: Any, now: float) -> Commands:
        if not self.is_open or self._missing:
            yield from super()._delivered(effect, wires, now)
            return
        released, flight = effect.released, self._flights.get(effect.released.fragment)
        self._versions[released.fragment] = released, tuple(wires)
        if flight is None or effect.counted != flight.push_id:
            return  # one that others have made: the site is on its way
        del self._flights[released.fragment]
        self._account.begins(released.version)
        yield GoOnFrom(released.fragment, tuple(wires))

    def _is_refused(self, push_id: int, code: str, text: str, now: float) -> Commands:
        flight = next((each for each in self._flights.values() if each.push_id == push_id), None)
        if flight is None:
            return
        del self._flights[flight.fragment]
        self._unsettled.refused(flight)
        yield Forget(push_id)
        if code == Code.STALE:  # so it would be after more rounds
            yield Say(f"The parent refuses what the site has come to: {text}", True)
            yield from self._catch_up("what it has come to is too old for its parent")
            return
        yield Say(
            f"The parent refuses what the site has come to, which goes on by itself: {text}", True
        )
        yield StepHere()

    def _resumption(self, manifest: Manifest, terms: Terms) -> Resumption:
        """A run of the site's own, which begins with the parent's parameters."""
        found = super()._resumption(manifest, terms)
        run = run_of(found.record.run, self._join.worker_id)
        start = found.record.fragments[0].version
        self._account.begins(start)
        fragments = {
            number: replace(each, version=replace(each.version, run=run))
            for number, each in found.record.fragments.items()
        }
        record = replace(found.record, run=run, number=start.counter, fragments=fragments)
        return replace(found, record=record, parents=None)
