"""What a relay knows of its run's model before the parameters are there, and where those come from.

The first worker of the site brings the description of the model, with which the relay asks its parent
to take part. Until the parameters come down its workers wait. Where nobody has any, the parent asks one
of those that take part to give its own; a relay has none, so it lets its workers join, asks the first of
them as any broker would, keeps what that one sends, and hands it up. Then they wait again, for what the
run begins with, which may be another one's. Nobody at the site hears of a new run before the parent has
begun it.

Where a worker holds a version of a run that the parent has lost, the relay takes that one, and comes
back to its parent as one that holds it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from diloco_broker.config import BrokerConfig
from diloco_broker.core.machine import Core
from diloco_protocol.errors import Code, ProtocolError
from diloco_protocol.fragments import FragmentPlan
from diloco_protocol.manifest import Manifest, differences, summarise
from diloco_protocol.messages import Join
from diloco_worker.core.compatibility import Terms
from diloco_worker.core.downloads import Held

_WAITS = "The relay waits for its parent at {}; it lets workers in once it has the parameters."


@dataclass
class FirstModel:
    """See the head of this module. `parent`: where that is, for people."""

    parent: str
    brought: Manifest | None = None  # the model that the relay takes part with, once one is known
    turned_away: tuple[Manifest, str] | None = None  # one that the parent does not take, and why
    has_own_run: bool = False  # what workers hold is of the site alone, and nothing for the parent
    is_asking: bool = False  # workers are let in, and one of them gives its parameters
    wanted: dict[int, int] = field(default_factory=dict)  # by fragment, the push that they go up in

    @property
    def wait(self) -> ProtocolError:
        """What workers hear meanwhile."""
        return ProtocolError(Code.NO_MODEL, _WAITS.format(self.parent))

    def admit(self, join: Join, manifest: Manifest) -> None:
        """Raise ProtocolError for a worker that cannot be let in yet; the first brings the model."""
        if self.turned_away is not None and manifest == self.turned_away[0]:
            raise ProtocolError(Code.MODEL_DIFFERS, self.turned_away[1])
        if self.brought is None:
            self.brought = manifest
        if not self.is_asking:
            raise self.wait
        if manifest != self.brought:
            clauses = summarise(differences(self.brought, manifest))
            raise ProtocolError(
                Code.MODEL_DIFFERS, f"The worker's model differs from the run's: {clauses}."
            )
        if self.has_own_run and any(join.versions):
            raise ProtocolError(
                Code.NO_MODEL,
                "The worker holds a version that only its site has, and the parent of the relay has no "
                "parameters; start the parent with its checkpoint, or the workers afresh.",
            )

    def is_refused(self, text: str) -> None:
        """The parent does not take this model; another worker may bring a better one."""
        assert self.brought is not None
        self.turned_away = self.brought, text
        self.brought = None

    def is_over(self, push_id: int) -> None:
        """Nobody waits for this donation any more."""
        self.wanted = {f: each for f, each in self.wanted.items() if each != push_id}

    def held_by(self, site: Core) -> dict[int, Held]:
        """By fragment, the versions of an earlier run that workers of the site have given whole."""
        versions = dict(enumerate(site.state.versions.fragments))
        return {
            fragment: Held(each.version, each.ledger)
            for fragment, each in versions.items()
            if each.version is not None
        }

    def core_that_asks(
        self, config: BrokerConfig, terms: Terms, draw: Callable[[], int], now: float
    ) -> Core:
        """A broker without parameters, for the model as the parent has cut it."""
        # Whoever may hold an earlier run was waited for by the parent.
        core = Core(replace(config, recover_wait=0.0), draw, now)
        pieces = terms.config.num_fragments
        if pieces > 1:
            core.state.own_split = lambda manifest: FragmentPlan.from_numbers(
                manifest, terms.plan, pieces
            )
        core.state.admit = self.admit
        self.is_asking = True
        return core
