"""Uploads: each push as chunks under credit, from its offer to its end. Pure.

A push survives a broken connection: the broker's next grant says what it holds of it. Without a session
nothing is sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from diloco_protocol import Bitmap, Ledger, ProtocolError, VersionId, messages
from diloco_worker.session import effects
from diloco_worker.session.connection import Connection, Lanes
from diloco_worker.session.downloads import Held

# Standings in which chunks may be sent.
SENDING = (messages.Standing.NEW, messages.Standing.RESUME)
# Seconds before a push is offered again after "not now".
OFFER_AGAIN_S = 1.0


@dataclass
class Upload:
    """A push in flight."""

    push: messages.Push  # as it was frozen; its session is filled in on sending
    lanes: Lanes = field(default_factory=Lanes)
    is_prepared: bool = True  # its chunks are laid out; for seeding that may take long
    held: Bitmap = field(init=False)  # acknowledged chunks
    # By lane: chunks still to be sent on this connection, and the credit.
    queues: list[deque[int]] = field(init=False)
    credits: list[int] = field(init=False)
    standing: messages.Standing | None = None  # of the last grant on this connection
    committed: bool = False  # `commit` was sent since that grant
    offers: int = 0

    def __post_init__(self) -> None:
        self.held = Bitmap(self.push.chunks)
        self._void_credit()

    @property
    def is_gradient(self) -> bool:
        return self.push.purpose is messages.Purpose.GRADIENT

    @property
    def is_sending(self) -> bool:
        """Chunks are still to be sent or acknowledged."""
        return self.standing is not messages.Standing.COUNTED and not self.held.is_full

    @property
    def is_in(self) -> bool:
        """The broker has every chunk, by its answer on this connection."""
        return self.standing is not None and not self.is_sending

    @property
    def is_put_off(self) -> bool:
        """The broker accepts no chunk of it yet."""
        return self.standing is messages.Standing.WAIT

    @property
    def under_way(self) -> int:
        """Chunks sent on this connection and not acknowledged."""
        if self.standing not in SENDING:
            return 0
        return self.push.chunks - sum(map(len, self.queues)) - len(self.held)

    def offered(self, session: bytes) -> messages.Push:
        """The message that offers this push on a new connection: all credit is void."""
        self.offers += 1
        self.detach()
        return replace(self.push, session=session)

    def detach(self) -> None:
        self._void_credit()
        self.standing = None
        self.committed = False

    def _void_credit(self) -> None:
        self.queues = [deque() for _ in range(self.lanes.count)]
        self.credits = [0] * self.lanes.count

    def granted(self, grant: messages.Grant) -> None:
        """Apply a grant, which replaces an earlier one; raises ProtocolError on a bitmap that does not
        fit.
        """
        # `wait` after `new` revokes the grant: the broker has dropped received chunks, too.
        held = Bitmap(self.push.chunks)
        if grant.standing is messages.Standing.RESUME and grant.held is not None:
            held = Bitmap.from_bytes(grant.held, self.push.chunks)
        elif grant.standing is messages.Standing.COUNTED:
            held = Bitmap.full(self.push.chunks)
        self.detach()
        self.held, self.standing = held, grant.standing
        if grant.standing in SENDING:
            for index in held.missing():
                self.queues[self._lane_of(index)].append(index)
            self.credits = [grant.credit] * self.lanes.count

    def _lane_of(self, index: int) -> int:
        return self.lanes.of(self.push.fragment, index)

    def acknowledged(self, ack: messages.Ack) -> None:
        """Chunks are at the broker; each returns one credit, and there may be more."""
        if self.standing not in SENDING:
            return  # it is of an older grant
        if 0 <= ack.lane < self.lanes.count:
            self.credits[ack.lane] += max(0, ack.credit)
        for index in ack.chunks:
            if 0 <= index < self.push.chunks:
                self.credits[self._lane_of(index)] += 1
                self.held.add(index)

    def next_chunks(self) -> Iterator[tuple[int, int]]:
        """Take the chunks off the queues that may be sent now: each with its lane."""
        for lane, queue in enumerate(self.queues):
            while self.credits[lane] > 0 and queue:
                self.credits[lane] -= 1
                yield queue.popleft(), lane

    def may_commit(self) -> bool:
        return self.standing in SENDING and not any(self.queues) and not self.committed


class Uploads:
    """All pushes in flight."""

    def __init__(self, connection: Connection, lanes: Lanes) -> None:
        self._connection = connection
        self._lanes = lanes
        self.by_id: dict[int, Upload] = {}  # at most one pseudo-gradient for each fragment
        self.retries = 0  # offers of a push after its first
        self._offer_at: dict[int, float] = {}
        # By fragment, the last seeding push: a broken one resumes under its push id.
        self._seeded: dict[int, tuple[VersionId | None, int]] = {}

    def __contains__(self, push_id: int | None) -> bool:
        return push_id in self.by_id

    def __iter__(self) -> Iterator[Upload]:
        return iter(list(self.by_id.values()))

    @property
    def is_sending(self) -> bool:
        return any(upload.is_sending for upload in self.by_id.values())

    @property
    def times(self) -> list[float]:
        """The deadlines of `tick`."""
        return list(self._offer_at.values())

    def gradient(self, fragment: int) -> Upload | None:
        """The pseudo-gradient of this fragment in flight."""
        return next((u for u in self._of(fragment) if u.is_gradient), None)

    def is_seeding(self, fragment: int) -> bool:
        return any(not upload.is_gradient for upload in self._of(fragment))

    def _of(self, fragment: int) -> list[Upload]:
        return [upload for upload in self.by_id.values() if upload.push.fragment == fragment]

    @property
    def waits_for_acks(self) -> bool:
        """Whether chunks in flight are not acknowledged."""
        return any(upload.under_way for upload in self.by_id.values())

    def begin(self, push: messages.Push) -> Iterator[effects.Effect]:
        """Add a push. Another pseudo-gradient of the same fragment is abandoned."""
        other = self.gradient(push.fragment) if push.purpose == "gradient" else None
        if other is not None:
            yield from self.drop(other.push.push_id)
        self.by_id[push.push_id] = Upload(push, self._lanes)

    def offer(self, push_id: int) -> Iterator[effects.Effect]:
        """Offer a push on this connection; voids earlier grants."""
        if (token := self._connection.live_token) is not None:
            upload = self.by_id[push_id]
            yield effects.Send(upload.offered(token))
            self.retries += upload.offers > 1

    def seed(
        self, fragment: int, chunks: int, held: Held | None, draw: Callable[[], int]
    ) -> Iterator[effects.Effect]:
        """Upload the held version of a fragment, or the model's own values, to seed the run."""
        version = held.version if held else None
        earlier = self._seeded.get(fragment)
        if earlier is None or earlier[0] != version:
            earlier = self._seeded[fragment] = version, draw()
        push_id = earlier[1]  # the same for the same values
        push = messages.Push(
            session=b"",
            push_id=push_id,
            fragment=fragment,
            chunks=chunks,
            wire_dtype="fp32",
            base=version,
            purpose=messages.Purpose.SEEDING,
            ledger=held.ledger if held else None,
        )
        yield effects.Say("The broker has no parameters yet; uploading ours.")
        yield from self.begin(push)
        self.by_id[push_id].is_prepared = False
        # The offer first: copying a large model takes long, and the broker would ask another worker.
        yield from self.offer(push_id)
        yield effects.PrepareSeeding(push_id, fragment)

    def prepared(self, push_id: int) -> Iterator[effects.Effect]:
        """The chunks of a seeding push are laid out."""
        upload = self.by_id.get(push_id)
        if upload is not None:
            upload.is_prepared = True
            yield from self._send(upload)

    def granted(self, grant: messages.Grant) -> Iterator[effects.Effect]:
        upload = self.by_id.get(grant.push_id)
        if upload is None or not self._connection.is_joined:
            return  # nothing was offered on this connection
        try:
            upload.granted(grant)
        except ProtocolError as error:
            yield effects.Say(str(error), trouble=True)
            return
        if upload.is_gradient:
            yield effects.Told(replace(grant, fragment=upload.push.fragment))
        yield from self._send(upload)

    def acknowledged(self, ack: messages.Ack) -> Iterator[effects.Effect]:
        upload = self.by_id.get(ack.push_id)
        if upload is not None and self._connection.is_joined:
            upload.acknowledged(ack)
            yield from self._send(upload)

    def _send(self, upload: Upload) -> Iterator[effects.Effect]:
        push_id, fragment = upload.push.push_id, upload.push.fragment
        token = self._connection.live_token
        if token is None or not upload.is_prepared:
            return
        for index, lane in upload.next_chunks():
            yield effects.SendChunk(token, push_id, fragment, index, lane)
        if upload.may_commit():
            upload.committed = True
            yield effects.Send(messages.Commit(token, push_id, fragment))
        if not upload.is_sending and not upload.is_gradient:
            yield from self.drop(push_id)

    def refused(
        self, upload: Upload, error: messages.Error, now: float
    ) -> Iterator[effects.Effect]:
        """The broker answers a push, or a chunk of it, with an error."""
        push_id = upload.push.push_id
        if error.retry:  # "not now" does not reject the delta
            upload.detach()
            self._offer_at[push_id] = now + OFFER_AGAIN_S
            yield effects.Say(error.text, trouble=True)
            return
        self._forget(push_id)
        if upload.is_gradient:
            counted = None  # any chunk may
            if error.counted is not None:
                try:
                    counted = Bitmap.from_bytes(error.counted, upload.push.chunks)
                except ProtocolError as malformed:
                    yield effects.Say(str(malformed), trouble=True)
            yield effects.PushOver(push_id, error.code, error.text, counted)
        else:
            yield effects.PushOver(push_id)
            yield effects.Say(error.text, trouble=True)

    def counted(self, worker_id: str, fragment: int, ledger: Ledger) -> int | None:
        """The push in flight that a complete version contains, if any; it is over."""
        upload = self.gradient(fragment)
        if upload is None or not ledger.names_whole(worker_id, upload.push.push_id):
            return None
        self._forget(upload.push.push_id)
        return upload.push.push_id

    def drop(self, push_id: int) -> Iterator[effects.Effect]:
        """Abandon a push."""
        self._forget(push_id)
        yield effects.PushOver(push_id)

    def tick(self, now: float) -> Iterator[effects.Effect]:
        for push_id in [p for p, at in self._offer_at.items() if now >= at]:
            del self._offer_at[push_id]
            yield from self.offer(push_id)

    def disconnected(self) -> Iterator[effects.Effect]:
        """All credit is void. Pseudo-gradients wait; the broker asks again for seeding."""
        self._offer_at.clear()
        for upload in self:
            upload.detach()
            if not upload.is_gradient:
                yield from self.drop(upload.push.push_id)

    def _forget(self, push_id: int) -> None:
        del self.by_id[push_id]
        self._offer_at.pop(push_id, None)

    def check_invariants(self, *, joined: bool) -> None:
        """Raise AssertionError when an invariant is broken; for tests."""
        gradients = [u.push.fragment for u in self if u.is_gradient]
        assert len(gradients) == len(set(gradients)), "two pseudo-gradients of one fragment"
        assert set(self._offer_at) <= set(self.by_id)
        for push_id, upload in self.by_id.items():
            assert push_id == upload.push.push_id
            assert joined or not any(upload.credits), "a credit outlived its connection"
