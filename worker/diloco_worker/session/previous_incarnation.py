"""What a previous incarnation of this worker may have pushed, and how this one finds out. Pure.

A worker that resumes from a checkpoint of its script has steps in its model that its previous
incarnation may have pushed after the checkpoint was written. This one does not know the id of such a
push: it is an *unknown push*. Where a ledger names one, those steps are in that version, and must not
be sent again.

One look at joining is not enough: an unknown push may be complete at the broker and wait for its round.
So a fragment is *unverified* until a push of this incarnation is in a version of it:

- On each connection a push of it is offered only after the broker's current version has arrived and the
  next one was requested. From then on `released` comes before any grant that follows from it.
- A `released` that names an unknown push ends the push in flight before a chunk of it is sent; the
  version is delivered as one that replaces the model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from diloco_protocol import Ledger, VersionId
from diloco_protocol.chunks import FragmentLayout
from diloco_protocol.messages import Push, Released
from diloco_worker.session import effects
from diloco_worker.session.downloads import Downloads
from diloco_worker.session.uploads import Uploads

SENT_BEFORE = "already pushed before this worker restarted"
FORGOTTEN = (
    "The worker's checkpoint of run {run} cannot be used here: {why}. Training begins with the broker's "
    "parameters, as in a new worker."
)


def names_unknown_push(ledger: Ledger, worker_id: str, known: Collection[int]) -> bool:
    """Whether a version contains any of a push of this worker that is not known."""
    return any(counted.push_id not in known for counted in ledger.pushes.get(worker_id, ()))


class PreviousIncarnation:
    """The unverified fragments, and the pushes that are held back for them."""

    def __init__(self, held: Iterable[int] = ()) -> None:
        # Fragments of a checkpoint, until the broker's version is known.
        self._uncompared = set(held)
        # By fragment, the ids of the pushes that are known.
        self.unverified: dict[int, set[int]] = {}
        self._held_back: set[int] = set()  # push ids not offered on this connection
        # Fragments with an unknown push in the version under way.
        self._superseded: set[int] = set()

    def keep(
        self, downloads: Downloads, part: FragmentLayout, theirs: VersionId | None
    ) -> Iterator[effects.Effect]:
        """At a welcome, deliver a held version that needs no answer of the broker.

        The broker is behind, and may be about to ask for it; or these are frozen parameters, which
        never change.
        """
        fragment = part.fragment
        download = downloads.by_fragment[fragment]
        held = download.held
        if held is None or fragment not in self._uncompared:
            return
        is_frozen = fragment == len(downloads.by_fragment) - 1
        if is_frozen or (theirs is not None and theirs.counter < held.version.counter):
            self._uncompared.discard(fragment)
            download.wanted = download.takes_any = False
            released = Released(fragment, held.version, held.ledger)
            yield effects.Deliver(released, None, unchanged=True)

    def delivers(self, fragment: int) -> bool:
        """A version of this fragment is delivered; returns whether it supersedes the model."""
        self._uncompared.discard(fragment)
        superseding = fragment in self._superseded
        self._superseded.discard(fragment)
        return superseding

    def holds_back(self, push: Push) -> bool:
        """Whether a push that is about to be offered has to wait until `let_go`."""
        if push.fragment not in self.unverified:
            return False
        self.unverified[push.fragment].add(push.push_id)
        self._held_back.add(push.push_id)
        return True

    def let_go(self, fragment: int, uploads: Uploads) -> Iterator[effects.Effect]:
        """The broker's current version is here, and the next one requested: offer the held push."""
        upload = uploads.gradient(fragment)
        if upload is not None and upload.push.push_id in self._held_back:
            self._held_back.discard(upload.push.push_id)
            yield from uploads.offer(upload.push.push_id)

    def look(
        self, worker_id: str, released: Released, downloads: Downloads, uploads: Uploads
    ) -> Iterator[effects.Effect]:
        """The broker announced a version: end the push in flight if it contains an unknown push."""
        fragment, ledger = released.fragment, released.ledger
        known = self.unverified.get(fragment)
        if known is None or not downloads.of(fragment).wanted:
            return
        upload = uploads.gradient(fragment)
        counts = upload is not None and ledger.names_whole(worker_id, upload.push.push_id)
        if counts or not names_unknown_push(ledger, worker_id, known):
            return
        del self.unverified[fragment]
        self._superseded.add(fragment)
        downloads.by_fragment[fragment].takes_any = True
        if upload is not None:
            self._held_back.discard(upload.push.push_id)
            yield from uploads.drop(upload.push.push_id)
