"""Admission at a relay that has no parameters yet.

The first worker of the site brings the description of the model, and the relay joins its parent with it.
The workers wait until the parameters arrive. If the parent has none, it asks one of its members to
upload its own. A relay has none, so it opens the gate, asks a worker of its site as any broker would,
and passes the upload on. The workers then wait for the first version, which may come from another
member. The site learns of a new run only after the parent has begun it.

If a worker holds a version of a run that the parent has lost, the relay adopts that version and rejoins
its parent as a member that holds it.
"""

from __future__ import annotations

from dataclasses import dataclass

from diloco_protocol.errors import Code, ProtocolError
from diloco_protocol.manifest import Manifest, differences, summarise


@dataclass
class Gate:
    """Decides which workers are admitted before the relay has parameters.

    Attributes:
        parent: the parent's address, for messages.
        is_open: workers are admitted, and one of them uploads its parameters.
        plan: the fragment of each tensor, as the parent splits the model; empty: as the options say.
        brought: the model that the relay joins its parent with; None before the first worker.
        turned_away: a model that the parent rejected, and its message.
    """

    parent: str
    is_open: bool = False
    plan: tuple[int, ...] = ()
    brought: Manifest | None = None
    turned_away: tuple[Manifest, str] | None = None

    @property
    def wait(self) -> str:
        """The message for workers that have to wait."""
        return (
            f"The relay waits for its parent at {self.parent}; it lets workers in once it has the "
            "parameters."
        )

    def check(self, manifest: Manifest) -> None:
        """Raise ProtocolError for a worker that cannot be admitted here."""
        if self.turned_away is not None and manifest == self.turned_away[0]:
            raise ProtocolError(Code.MODEL_DIFFERS, self.turned_away[1])
        if not self.is_open:
            return
        if self.brought is not None and manifest != self.brought:
            clauses = summarise(differences(self.brought, manifest))
            text = f"The worker's model differs from the run's: {clauses}."
            raise ProtocolError(Code.MODEL_DIFFERS, text)

    def brings(self, manifest: Manifest) -> None:
        """Take the first worker's model as the one to join the parent with."""
        if self.brought is None:
            self.brought = manifest

    def is_refused(self, text: str) -> None:
        """The parent rejected this model; another worker may bring one that fits."""
        if self.brought is not None:
            self.turned_away, self.brought = (self.brought, text), None
        self.is_open, self.plan = False, ()
