"""Getting the first parameters: placing the model file, asking workers, taking in a donation."""

from __future__ import annotations

from collections.abc import Iterator

from diloco_broker import sequence
from diloco_broker.bootstrap import Donation
from diloco_broker.events import Effect, Log, Place, Placed, PlaceRefused, Send
from diloco_broker.membership import Member
from diloco_broker.state import State
from diloco_broker.transfer import Upload, upload_window
from diloco_protocol.chunks import Bitmap
from diloco_protocol.errors import Code, ProtocolError
from diloco_protocol.messages import Ack, Error, Grant, Notice, Push, Standing
from diloco_protocol.version import RUN_PATTERN, Ledger, VersionId

# More outer steps than any run takes; keeps counters within 64 bits.
MAX_COUNTER = 1 << 48


def seek(state: State, now: float) -> Iterator[Effect]:
    """Get parameters if there are none: from the model file, else from a worker.

    Workers that hold a version are those of a broker that died. They come back within seconds of each
    other, so the broker waits for all of them, or `recover_wait`, and takes the newest.
    """
    boot = state.bootstrap
    if boot.is_done or boot.is_loading or boot.manifest is None:
        return
    if boot.initial is not None:
        yield from _load_file(state)
        return
    if boot.donor is None:
        member = boot.choose_donor(state.members)
        if member is None:
            return
        if any(member.versions) and len(state.members) < state.config.workers:
            if boot.offered_at is None:
                boot.offered_at = now
                yield Log("info", f"{member.worker_id} holds a version of an earlier run.")
            if now - boot.offered_at < state.config.recover_wait:
                return
        boot.donor = member.worker_id
        yield Log("info", f"Asking {member.worker_id} for its parameters.")
    donor = state.members.named(boot.donor)
    assert donor is not None
    if boot.asked != donor.session:
        boot.asked = donor.session
        for fragment in boot.wanted(state.shelf):
            text = "The broker has no parameters yet; send yours."
            yield Send(donor.control, Notice("donate", text, fragment))


def _load_file(state: State) -> Iterator[Effect]:
    boot = state.bootstrap
    boot.is_loading = True
    boot.run = f"{state.draw():016x}"
    for stock in state.shelf.stocks:
        if stock.layout.chunks:
            state.shelf.make(stock.layout.fragment, VersionId(boot.run, 0, state.draw()))
            for index in range(stock.layout.chunks):
                yield Place(stock.layout.fragment, index)


def begin_donation(state: State, member: Member, push: Push) -> Iterator[Effect]:
    """The donor offers a fragment; a donation that broke off goes on where it stopped."""
    boot = state.bootstrap
    stock = state.shelf.stocks[push.fragment]
    if boot.donor != member.worker_id or stock.version is not None:
        raise ProtocolError(
            Code.NOT_ALLOWED,
            f"Parameters of {member.worker_id} are not wanted: the run has others.",
        )
    _check_provenance(push)
    run = push.base.run if push.base else boot.run
    if boot.run is not None and boot.run != run:
        raise ProtocolError(Code.BAD_PUSH, "The fragments donated are of different runs.")
    known = boot.donations.get(push.fragment)
    if known is not None and known.push.push_id != push.push_id:
        state.shelf.unmake(push.fragment)
        known = None
    if known is None:
        boot.run = run or f"{state.draw():016x}"
        known = boot.donations[push.fragment] = Donation(push, Bitmap(push.chunks))
        version = push.base or VersionId(boot.run, 0, state.draw())
        state.shelf.make(push.fragment, version)
    window = upload_window(1)
    member.uploads[push.fragment] = Upload(push, window)
    held = known.arrived.to_bytes() if known.arrived else None
    standing = Standing.RESUME if held else Standing.NEW
    yield Send(member.control, Grant(push.push_id, push.fragment, standing, held, window))


def _check_provenance(push: Push) -> None:
    """Version and ledger of a donation become the run's own: they must be sound."""
    base = push.base
    if base is not None and not (
        RUN_PATTERN.fullmatch(base.run)
        and 0 <= base.counter <= MAX_COUNTER
        and 0 <= base.tag < 1 << 64
    ):
        raise ProtocolError(Code.BAD_PUSH, "The donated version has no sound name.")
    for pushes in (push.ledger or Ledger()).pushes.values():
        for counted in pushes:
            if counted.chunks is not None:
                Bitmap.from_bytes(counted.chunks, push.chunks)


def arrived(state: State, push: Push) -> Bitmap:
    """The chunks received of a donation."""
    return state.bootstrap.donations[push.fragment].arrived


def placed(state: State, event: Placed, now: float) -> Iterator[Effect]:
    """A chunk of the first version is in place; with the last of all the first round opens."""
    work, boot = event.work, state.bootstrap
    if not boot.accepts(work):
        return
    stock = state.shelf.stocks[work.fragment]
    yield from state.shelf.chunk_ready(work.fragment, work.index, event.wire)
    donor = state.members.named(work.worker_id)
    if donor is not None and work.fragment in donor.uploads:
        donor.uploads[work.fragment].credit += 1
        yield Send(donor.control, Ack(work.push_id, work.fragment, (work.index,)))
    if stock.making is not None and not stock.making.left:
        yield from state.shelf.release(work.fragment, boot.ledger_of(work.fragment), 0, 0)
        if donor is not None and work.fragment in donor.uploads:
            donor.uploads[work.fragment].is_void = True
    if state.shelf.is_complete:
        source = work.worker_id or "the model file"
        boot.finish()
        yield Log("info", f"Run {boot.run} begins with the parameters of {source}.")
        stocks = state.shelf.stocks[:-1]
        number = sum(stock.version.counter for stock in stocks if stock.version)
        yield from sequence.open_round(state, number, now)


def place_refused(state: State, event: PlaceRefused, now: float) -> Iterator[Effect]:
    """A donation has values that are not finite: ask another worker."""
    work = event.work
    if not state.bootstrap.accepts(work):
        return
    text = f"The parameters of {work.worker_id} are not all finite; they cannot begin a run."
    yield Log("error", text)
    donor = state.members.named(work.worker_id)
    if donor is not None:
        state.bootstrap.rejected_donors.add(donor.worker_id)
        error = Error(Code.NON_FINITE, text, push_id=work.push_id, about="push")
        yield Send(donor.control, error)
    yield from abandon_donation(state, now)


def abandon_donation(state: State, now: float) -> Iterator[Effect]:
    """The donor cannot go on: forget what came from it and ask the next."""
    donor = state.members.named(state.bootstrap.donor or "")
    if donor is not None:
        donor.uploads.clear()
    for stock in state.shelf.stocks:
        state.shelf.unmake(stock.layout.fragment)
        stock.version, stock.wires = None, ()
    state.bootstrap.abandon()
    yield from seek(state, now)
