"""One push on its way up and one version on its way down, as sets of chunks. Pure.

Both survive a broken connection: an upload is granted anew with what the broker holds, a download
goes on with `held_version` and `held`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from diloco_protocol import Bitmap, Ledger, VersionId
from diloco_protocol.messages import Grant, Pull, Purpose, Push, Released, Standing

# What a grant says when chunks may be sent.
SENDING = (Standing.NEW, Standing.RESUME)


@dataclass
class Upload:
    """A push in flight.

    Attributes:
        push: the offer as it was frozen; its session is filled in when it is sent.
        held: chunks that the broker has acknowledged.
        queue: chunks still to be sent on this connection.
        credit: chunks that may be sent now.
        standing: what the last grant on this connection said; None before one.
        committed: `commit` has been sent since that grant.
        offers: how often the push has been offered.
        is_prepared: its chunks are laid out; those of a donation may take a while.
    """

    push: Push
    is_prepared: bool = True
    held: Bitmap = field(init=False)
    queue: deque[int] = field(default_factory=deque)
    credit: int = 0
    standing: Standing | None = None
    committed: bool = False
    offers: int = 0

    def __post_init__(self) -> None:
        self.held = Bitmap(self.push.chunks)

    @property
    def is_gradient(self) -> bool:
        return self.push.purpose is Purpose.GRADIENT

    @property
    def is_sending(self) -> bool:
        """Chunks are still to be sent or acknowledged."""
        return self.standing is not Standing.COUNTED and not self.held.is_full

    @property
    def is_in(self) -> bool:
        """Every chunk is in at the broker, as its answer on this connection says."""
        return self.standing is not None and not self.is_sending

    @property
    def is_put_off(self) -> bool:
        """The broker takes nothing of it yet."""
        return self.standing is Standing.WAIT

    @property
    def under_way(self) -> int:
        """Chunks that were sent on this connection and are not acknowledged."""
        if self.standing not in SENDING:
            return 0
        return self.push.chunks - len(self.queue) - len(self.held)

    def offered(self, session: bytes) -> Push:
        """The message that offers this push on a new connection: all credit is void."""
        self.offers += 1
        self.detach()
        return replace(self.push, session=session)

    def detach(self) -> None:
        self.queue.clear()
        self.credit = 0
        self.standing = None
        self.committed = False

    def granted(self, grant: Grant) -> None:
        """Take up a grant. It replaces what an earlier one said; raises ProtocolError on a bitmap
        that does not fit."""
        held = Bitmap(self.push.chunks)
        if grant.standing is Standing.RESUME and grant.held is not None:
            held = Bitmap.from_bytes(grant.held, self.push.chunks)
        self.standing = grant.standing
        self.committed = False
        if grant.standing in SENDING:
            self.held = held
            self.queue = deque(held.missing())
            self.credit = grant.credit
        else:
            # `wait` after `new` takes the slot back: what was sent is forgotten at the other end too.
            self.queue.clear()
            self.credit = 0
            if grant.standing is Standing.COUNTED:
                self.held = Bitmap.full(self.push.chunks)
            else:
                self.held = held

    def acknowledged(self, chunks: tuple[int, ...], more: int = 0) -> None:
        """These chunks are in; each gives one credit back, and there are `more` on top.

        Without a grant it is of an older one.
        """
        if self.standing not in SENDING:
            return
        self.credit += len(chunks) + max(0, more)
        for index in chunks:
            if 0 <= index < self.push.chunks:
                self.held.add(index)

    def next_chunks(self) -> Iterator[int]:
        """The chunks that may be sent now, taken off the queue."""
        while self.credit > 0 and self.queue:
            self.credit -= 1
            yield self.queue.popleft()

    def may_commit(self) -> bool:
        return self.standing in SENDING and not self.queue and not self.committed


@dataclass
class Download:
    """The version of one fragment that is being assembled.

    Attributes:
        size: chunks of the fragment.
        wanted: a `pull` is outstanding, or will be after the next welcome.
        whatever: deliver the next whole version even if it lacks the push in flight.
        after: counter above which a version is asked for.
        version: what is being assembled, with `arrived` of its chunks here.
        released: the last `released`, which may come before, between or after the chunks.
        seen: the last version that was here whole.
        theirs: counter of the newest version that the broker is known to have; -1 = it has none, None =
            it has not said.
    """

    fragment: int
    size: int
    wanted: bool = False
    whatever: bool = False
    after: int = -1
    version: VersionId | None = None
    arrived: Bitmap = field(init=False)
    released: Released | None = None
    seen: VersionId | None = None
    theirs: int | None = None

    def __post_init__(self) -> None:
        self.arrived = Bitmap(self.size)

    @property
    def is_due(self) -> bool:
        """The version that is asked for is whole at the broker, and chunks of it are missing here."""
        released = self.released
        if not self.wanted or released is None or self.arrived.is_full:
            return False
        return self.version is None or self.version.counter <= released.version.counter

    def pull(self, session: bytes | None, credit: int) -> Pull:
        resume = self.version is not None and bool(self.arrived)
        return Pull(
            fragment=self.fragment,
            after=self.after,
            session=session,
            credit=credit,
            held_version=self.version if resume else None,
            held=self.arrived.to_bytes() if resume else None,
        )

    def expects_unchanged(self, version: VersionId) -> None:
        """Ask in a way that costs no chunk if `version`, which is held, is still the newest.

        A broker that went back has an older one, which is then the newest there is.
        """
        self.version = version
        self.arrived = Bitmap.full(self.size)
        self.released = None
        self.after = -1

    def begins(self, version: VersionId) -> bool:
        """True when a chunk of this version is the first one: another version is forgotten.

        `released` stays: it comes on another connection, and may be ahead of the chunks of an older
        version that are still under way.
        """
        if self.version == version:
            return False
        self.version = version
        self.arrived = Bitmap(self.size)
        return True

    @property
    def is_whole(self) -> bool:
        return (
            self.released is not None
            and self.released.version == self.version
            and self.arrived.is_full
        )

    def finish(self) -> Released:
        """Take the whole version off the table and be ready for the next."""
        released = self.released
        assert released is not None
        self.seen = released.version
        self.after = self.theirs = released.version.counter
        self.version = None
        self.arrived = Bitmap(self.size)
        self.released = None
        self.wanted = False
        self.whatever = False
        return released


@dataclass(frozen=True)
class Held:
    """A version that is here whole, with its ledger.

    `is_left_behind`: the run has gone on without it, so it must not be offered to any broker.
    """

    version: VersionId
    ledger: Ledger
    is_left_behind: bool = False
