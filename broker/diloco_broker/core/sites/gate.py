"""Who is let in at a relay before the parameters of its run are there.

The first worker of the site brings the description of the model, with which the relay asks its parent
to take part. Until the parameters come down its workers wait. Where nobody has any, the parent asks one
of those that take part to give its own; a relay has none, so it opens the gate, asks the first of its
workers as any broker would, keeps what that one sends, and hands it up. Then they wait again, for what
the run begins with, which may be another one's. The site hears of a new run only once the parent has
begun it.

Where a worker holds a version of a run that the parent has lost, the relay takes that one, and comes
back to its parent as one that holds it.
"""

from __future__ import annotations

from dataclasses import dataclass

from diloco_protocol.errors import Code, ProtocolError
from diloco_protocol.manifest import Manifest, differences, summarise
from diloco_protocol.messages import Join


@dataclass
class Gate:
    """See the head of this module.

    Attributes:
        parent: where that is, for people.
        is_open: workers are let in, and one of them gives its parameters.
        has_own_run: what workers hold is of the site alone, and nothing for the parent.
        plan: the fragment of each tensor, as the parent has cut the model; empty: as the options say.
        brought: the model that the relay takes part with, once one is known.
        turned_away: one that the parent does not take, and why.
    """

    parent: str
    is_open: bool = False
    has_own_run: bool = False
    plan: tuple[int, ...] = ()
    brought: Manifest | None = None
    turned_away: tuple[Manifest, str] | None = None

    @property
    def wait(self) -> str:
        """What workers hear meanwhile."""
        return (
            f"The relay waits for its parent at {self.parent}; it lets workers in once it has the "
            "parameters."
        )

    def check(self, join: Join, manifest: Manifest) -> None:
        """Raise ProtocolError for a worker that cannot be let in through this gate."""
        if self.turned_away is not None and manifest == self.turned_away[0]:
            raise ProtocolError(Code.MODEL_DIFFERS, self.turned_away[1])
        if not self.is_open:
            return
        if self.brought is not None and manifest != self.brought:
            clauses = summarise(differences(self.brought, manifest))
            text = f"The worker's model differs from the run's: {clauses}."
            raise ProtocolError(Code.MODEL_DIFFERS, text)
        if self.has_own_run and any(join.versions):
            raise ProtocolError(
                Code.NO_MODEL,
                "The worker holds a version that only its site has, and the parent of the relay has no "
                "parameters; start the parent with its checkpoint, or the workers afresh.",
            )

    def brings(self, manifest: Manifest) -> None:
        """A worker comes with this model: the first one is what the relay takes part with."""
        if self.brought is None:
            self.brought = manifest

    def is_refused(self, text: str) -> None:
        """The parent does not take this model; another worker may bring a better one."""
        if self.brought is not None:
            self.turned_away, self.brought = (self.brought, text), None
        self.is_open, self.plan = False, ()
