"""What an earlier life of this worker may have sent, and how a restarted one finds out. Pure.

A worker that goes on from a checkpoint of its script has steps in its model which its earlier life may
have pushed after that checkpoint was written. Such a push has an id that this life does not know: it is
a *stranger*. Where a ledger names one, those steps are in that version, and must not be sent again.

To look once, at joining, is not enough: a stranger may lie at the broker, whole, and wait for its round.
So a fragment is *in doubt* until a push of this life is in a version of it:

- On each connection a push of it is offered only when the broker's current version is here, and the next
  one has been asked for. From then on `released` comes before any grant that follows from it.
- A `released` that names a stranger ends the push under way before a chunk of it is sent; the version
  is delivered as one that takes the place of what is in the model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from diloco_protocol import Ledger, VersionId
from diloco_protocol.chunks import FragmentLayout
from diloco_protocol.messages import Push, Released
from diloco_worker.core.downloads import Pulls
from diloco_worker.core.events import Deliver, Effect
from diloco_worker.core.uploads import Pushes

SENT_BEFORE = "an earlier life of this worker has sent them"
FORGOTTEN = (
    "What the worker's checkpoint holds of run {run} cannot be used here: {why}. Training begins with "
    "the broker's parameters, as that of a new worker does."
)


def names_stranger(ledger: Ledger, worker_id: str, known: Collection[int]) -> bool:
    """Whether a version contains any of a push of this worker that is not among those known."""
    return any(counted.push_id not in known for counted in ledger.pushes.get(worker_id, ()))


class FormerLife:
    """See the head of this module.

    Args:
        uncompared: fragments of a checkpoint whose versions are to be compared with the broker's.
    """

    def __init__(self, uncompared: Iterable[int] = ()) -> None:
        self._uncompared = set(uncompared)
        self._known: dict[int, set[int]] = {}  # by fragment in doubt, push ids
        self._held_back: set[int] = set()  # push ids not offered on this connection
        self._superseded: set[int] = set()  # fragments with a stranger in the version under way

    # Comparing.

    def keep(
        self, pulls: Pulls, part: FragmentLayout, theirs: VersionId | None
    ) -> Iterator[Effect]:
        """At a welcome: what needs no answer of the broker. It is behind, and may be about to ask
        for what is held; or these are frozen parameters, which never change."""
        fragment = part.fragment
        held = pulls.held.get(fragment)
        if held is None or fragment not in self._uncompared:
            return
        is_frozen = fragment == len(pulls.downloads) - 1
        if is_frozen or (theirs is not None and theirs.counter < held.version.counter):
            self._uncompared.discard(fragment)
            pulls.want_nothing(fragment)
            yield Deliver(Released(fragment, held.version, held.ledger), None, unchanged=True)

    def delivers(self, fragment: int) -> bool:
        """A version of this fragment is delivered; returns whether it supersedes what is here."""
        self._uncompared.discard(fragment)
        superseding = fragment in self._superseded
        self._superseded.discard(fragment)
        return superseding

    # Doubt.

    def doubts(self, fragment: int) -> bool:
        """Whether an earlier life may have sent what is in the model of this fragment."""
        return fragment in self._known

    def doubt(self, fragment: int, known: Iterable[int]) -> None:
        """From now on this fragment is in doubt; these pushes are no strangers."""
        self._known[fragment] = set(known)

    def forget(self, fragment: int) -> None:
        """Whatever the earlier life has sent, this one stands on a version of its own."""
        self._known.pop(fragment, None)

    def holds_back(self, push: Push) -> bool:
        """Whether a push that is about to be offered has to wait until `let_go`."""
        if push.fragment not in self._known:
            return False
        self._known[push.fragment].add(push.push_id)
        self._held_back.add(push.push_id)
        return True

    def let_go(self, fragment: int, pushes: Pushes, token: bytes | None) -> Iterator[Effect]:
        """The broker's current version is here, and the next one asked for: offer what was held back."""
        upload = pushes.gradient(fragment)
        if upload is not None and upload.push.push_id in self._held_back:
            self._held_back.discard(upload.push.push_id)
            yield from pushes.offer(upload.push.push_id, token)

    def look(
        self, worker_id: str, released: Released, pulls: Pulls, pushes: Pushes
    ) -> Iterator[Effect]:
        """The broker tells of a version: is there a stranger in it? Then what is under way ends."""
        fragment, ledger = released.fragment, released.ledger
        known = self._known.get(fragment)
        if known is None or not pulls.of(fragment).wanted:
            return
        upload = pushes.gradient(fragment)
        counts = upload is not None and ledger.names_whole(worker_id, upload.push.push_id)
        if counts or not names_stranger(ledger, worker_id, known):
            return
        del self._known[fragment]
        self._superseded.add(fragment)
        pulls.want_whatever(fragment)
        if upload is not None:
            self._held_back.discard(upload.push.push_id)
            yield from pushes.drop(upload.push.push_id)
