"""Every push of this worker that is not over: offering, sending under credit, ending. Pure.

A `token` names the session on the connection at hand. None: there is none, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from diloco_protocol import Ledger, ProtocolError, VersionId
from diloco_protocol.messages import Ack, Commit, Error, Grant, Purpose, Push
from diloco_worker.core.events import (
    Effect,
    Granted,
    PrepareDonation,
    PushOver,
    Say,
    Send,
    SendChunk,
)
from diloco_worker.core.transfers import Held, Upload

# Seconds before a push is offered again that the broker cannot take just now.
OFFER_AGAIN_S = 1.0


class Pushes:
    """See the head of this module.

    Attributes:
        uploads: by push id; at most one pseudo-gradient for each fragment.
        retries: offers of a push after its first.
    """

    def __init__(self) -> None:
        self.uploads: dict[int, Upload] = {}
        self.retries = 0
        self._offer_at: dict[int, float] = {}
        # By fragment, the last donation: a broken one goes on under its push id.
        self._donated: dict[int, tuple[VersionId | None, int]] = {}

    def __contains__(self, push_id: int | None) -> bool:
        return push_id in self.uploads

    def __iter__(self) -> Iterator[Upload]:
        return iter(list(self.uploads.values()))

    @property
    def is_sending(self) -> bool:
        return any(upload.is_sending for upload in self.uploads.values())

    @property
    def times(self) -> list[float]:
        """When `tick` has something to do."""
        return list(self._offer_at.values())

    def gradient(self, fragment: int) -> Upload | None:
        """The pseudo-gradient of this fragment that is in flight."""
        of_fragment = (u for u in self if u.is_gradient and u.push.fragment == fragment)
        return next(of_fragment, None)

    def donation(self, fragment: int) -> Upload | None:
        """The donation of this fragment that is in flight."""
        of_fragment = (u for u in self if not u.is_gradient and u.push.fragment == fragment)
        return next(of_fragment, None)

    @property
    def waits_for_acks(self) -> bool:
        """Whether chunks are under way that the broker has not acknowledged."""
        return any(upload.under_way for upload in self.uploads.values())

    def begin(self, push: Push) -> Iterator[Effect]:
        """Take on a push. Another pseudo-gradient of the same fragment is abandoned."""
        other = self.gradient(push.fragment) if push.purpose == "gradient" else None
        if other is not None:
            self._forget(other.push.push_id)
            yield PushOver(other.push.push_id)
        self.uploads[push.push_id] = Upload(push)

    def offer(self, push_id: int, token: bytes | None) -> Iterator[Effect]:
        """Offer a push on this connection; whatever was granted before is void."""
        if token is not None:
            upload = self.uploads[push_id]
            yield Send(upload.offered(token))
            self.retries += upload.offers > 1

    def donate(
        self,
        fragment: int,
        chunks: int,
        held: Held | None,
        draw: Callable[[], int],
        token: bytes | None,
    ) -> Iterator[Effect]:
        """Give the broker what is held of a fragment, or the model's own values."""
        version = held.version if held else None
        earlier = self._donated.get(fragment)
        if earlier is None or earlier[0] != version:
            earlier = self._donated[fragment] = version, draw()
        push_id = earlier[1]  # the same for the same values
        push = Push(
            session=b"",
            push_id=push_id,
            fragment=fragment,
            chunks=chunks,
            wire_dtype="fp32",
            base=version,
            purpose=Purpose.DONATION,
            ledger=held.ledger if held else None,
        )
        yield Say("The broker has no parameters yet and takes those of this worker.")
        yield from self.begin(push)
        self.uploads[push_id].is_prepared = False
        # First the offer: to copy a large model takes long, and the broker would ask somebody else.
        yield from self.offer(push_id, token)
        yield PrepareDonation(push_id, fragment)

    def prepared(self, push_id: int, token: bytes | None) -> Iterator[Effect]:
        """The chunks of a donation are laid out."""
        upload = self.uploads.get(push_id)
        if upload is not None:
            upload.is_prepared = True
            yield from self._send(upload, token)

    def granted(self, grant: Grant, token: bytes | None) -> Iterator[Effect]:
        upload = self.uploads.get(grant.push_id)
        if upload is None:
            return
        try:
            upload.granted(grant)
        except ProtocolError as error:
            yield Say(str(error), trouble=True)
            return
        if upload.is_gradient:
            yield Granted(grant.push_id, upload.push.fragment, grant.standing, grant.round)
        yield from self._send(upload, token)

    def acknowledged(self, ack: Ack, token: bytes | None) -> Iterator[Effect]:
        upload = self.uploads.get(ack.push_id)
        if upload is not None:
            upload.acknowledged(ack.chunks, ack.credit)
            yield from self._send(upload, token)

    def _send(self, upload: Upload, token: bytes | None) -> Iterator[Effect]:
        push_id, fragment = upload.push.push_id, upload.push.fragment
        if token is None or not upload.is_prepared:
            return
        for index in upload.next_chunks():
            yield SendChunk(token, push_id, fragment, index)
        if upload.may_commit():
            upload.committed = True
            yield Send(Commit(token, push_id, fragment))
        if not upload.is_sending and not upload.is_gradient:
            self._forget(push_id)
            yield PushOver(push_id)

    def refused(self, error: Error, now: float) -> Iterator[Effect]:
        """The broker answers a push, or a chunk of it, with an error."""
        assert error.push_id is not None
        if error.retry:  # "not now" is no verdict on the delta: it stays as it is
            self.uploads[error.push_id].detach()
            self._offer_at[error.push_id] = now + OFFER_AGAIN_S
            yield Say(error.text, trouble=True)
        elif self.uploads[error.push_id].is_gradient:
            self._forget(error.push_id)
            yield PushOver(error.push_id, error.code, error.text)
        else:
            self._forget(error.push_id)
            yield PushOver(error.push_id)
            yield Say(error.text, trouble=True)

    def counted(self, worker_id: str, fragment: int, ledger: Ledger) -> int | None:
        """The push in flight that a whole version contains, if it does. It is over then."""
        upload = self.gradient(fragment)
        if upload is None or not ledger.names_whole(worker_id, upload.push.push_id):
            return None
        self._forget(upload.push.push_id)
        return upload.push.push_id

    def drop(self, push_id: int) -> Iterator[Effect]:
        """A push that is not to be sent after all."""
        self._forget(push_id)
        yield PushOver(push_id)

    def tick(self, now: float, token: bytes | None) -> Iterator[Effect]:
        for push_id in [p for p, at in self._offer_at.items() if now >= at]:
            del self._offer_at[push_id]
            yield from self.offer(push_id, token)

    def disconnected(self) -> Iterator[Effect]:
        """All credit is void. Pseudo-gradients wait; of donations the broker asks again, or another."""
        self._offer_at.clear()
        for upload in self:
            upload.detach()
            if not upload.is_gradient:
                self._forget(upload.push.push_id)
                yield PushOver(upload.push.push_id)

    def _forget(self, push_id: int) -> None:
        del self.uploads[push_id]
        self._offer_at.pop(push_id, None)

    def check_invariants(self, *, joined: bool) -> None:
        """Raise AssertionError when the books do not balance; for tests."""
        gradients = [u.push.fragment for u in self if u.is_gradient]
        assert len(gradients) == len(set(gradients)), "two pseudo-gradients of one fragment"
        assert set(self._offer_at) <= set(self.uploads)
        for push_id, upload in self.uploads.items():
            assert push_id == upload.push.push_id
            assert joined or upload.credit == 0, "a credit outlived its connection"
