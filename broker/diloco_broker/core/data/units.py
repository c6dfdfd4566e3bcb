"""The work queue: units are handed out, counted with the pushes that contain them, or given back.

See `core.data.data_sets` for the life of a unit. A worker says with each request which units it stands
for: what it does not name any more is given back, what it names and the broker does not know of (one of
them was away) it keeps while nobody else has it. A push names the units that count with it. It is
refused where another worker has been given one of them, so that no unit counts twice.

A worker that is gone gives back all but what is in pushes that may still count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from diloco_broker.core import effects
from diloco_broker.core.data.data_sets import MOST_DATA_SETS, DataSet, PendingLot
from diloco_broker.core.members.members import Member
from diloco_broker.core.rounds.modes import rules_of
from diloco_broker.core.state import RunState
from diloco_protocol.data.spans import LARGEST, MOST_RANGES, Spans
from diloco_protocol.errors import Code, ProtocolError
from diloco_protocol.messages import Lot, Push, Result, Take, is_data_set_name
from diloco_protocol.version import Ledger

MOST_AT_A_TIME = 4096  # units in one answer
# Of one worker that are not settled: each push in flight has one, and some that were given up.
MOST_LOTS = 256
# And the rows of units in all of these: those of one request, which names them once.
MOST_ROWS = 4 * MOST_RANGES


def take(state: RunState, member: Member, message: Take) -> effects.Effects:
    """A worker says what it stands for, and may ask for more."""
    who, data = member.worker_id, state.data.sets.get(message.name)
    try:
        holds = Spans.read(message.holds)
        lots = [_units(lot) for lot in message.lots[:MOST_LOTS]]
        if data is None:
            data = _begin(state, message)
            yield effects.info(
                f"{who} begins the data set {message.name!r} of {message.size} units."
            )
        _check_same(data, message)
    except ValueError as error:
        yield member.tell(Result(message.request, False, f"{error}."))
        return
    is_ready = state.is_running  # before that, a worker may still bring a newer version
    stands_for = holds
    for units, lot in zip(lots, message.lots, strict=False):
        spans = units.get(message.name, Spans())
        if not is_ready:
            stands_for = stands_for | spans  # nobody else gets them until it is known
        elif len(lot.pushes) == state.config.num_fragments and not _uncounted(
            state, who, dict(enumerate(lot.pushes))
        ):
            data.count(who, spans)
    _give_back(state, who, message.name, keeps=stands_for)
    data.claim(who, stands_for)
    lost = holds - data.of(who)
    count = min(message.count, MOST_AT_A_TIME) if is_ready else 0
    found = data.take(who, count) if count else Spans()
    yield member.tell(
        Result(
            message.request,
            True,
            "",
            {
                "units": found.flat,
                "lost": lost.flat,
                "is_over": data.is_over,
                "waits": not is_ready,
            },
        )
    )


def _begin(state: RunState, message: Take) -> DataSet:
    """Raises ValueError for what is no data set."""
    if not is_data_set_name(message.name):
        raise ValueError(
            f"a data set cannot be called {message.name!r:.80}; take 1 to 64 printable characters"
        )
    whole = message.size * max(1, message.epochs)
    if message.size < 1 or message.epochs < 0 or whole >= LARGEST:
        raise ValueError(f"a data set cannot have {message.size} units in {message.epochs} epochs")
    if len(state.data.sets) >= MOST_DATA_SETS:
        raise ValueError(f"this run has {MOST_DATA_SETS} data sets already, which is the most")
    data = DataSet(message.size, message.epochs, message.seed)
    return state.data.begin(message.name, data)


def _check_same(data: DataSet, message: Take) -> None:
    for name in ("size", "epochs", "seed"):
        ours, theirs = getattr(data, name), getattr(message, name)
        if ours != theirs:
            what = "units" if name == "size" else name
            raise ValueError(
                f"the data set {message.name!r} has {what}={ours} in this run, and this worker says "
                f"{theirs}; give all workers the same, or another name"
            )


def _units(lot: Lot) -> dict[str, Spans]:
    """Raises ValueError for what are no ranges."""
    return {name: Spans.read(flat) for name, flat in lot.units.items()}


def _all_units(push: Push) -> dict[str, Spans]:
    found: dict[str, Spans] = {}
    for lot in push.lots or ():
        for name, spans in _units(lot).items():
            found[name] = found.get(name, Spans()) | spans
    return found


def _uncounted(state: RunState, worker_id: str, pushes: Mapping[int, int]) -> dict[int, int]:
    """Of these push ids by fragment, those that no version contains whole.

    One that is being saved, before anybody is told of it, is a version: with it units have counted.
    """
    trained = state.versions.trained
    ledgers = {number: each.ledger for number, each in enumerate(trained) if each.current}
    if state.unreleased is not None:
        ledgers[state.unreleased.ended.fragment] = state.unreleased.record.ledger
    return {
        fragment: push_id
        for fragment, push_id in pushes.items()
        if fragment not in ledgers or not ledgers[fragment].names_whole(worker_id, push_id)
    }


# Pushes.


def check(state: RunState, member: Member, push: Push) -> bool:
    """Has this push units that come with it? Raises ProtocolError where it cannot have them."""
    who = member.worker_id
    if not push.lots or state.data.has_lot(who, push):
        return False
    if not _uncounted(state, who, {push.fragment: push.push_id}):
        return False  # it has counted, and is told so
    under_way = state.data.lots.get(who, ())
    if len(under_way) + len(push.lots) > MOST_LOTS:
        raise ProtocolError(
            Code.BAD_PUSH, f"{who} has {MOST_LOTS} lots of units under way already."
        )
    rows = sum(spans.ranges for lot in under_way for spans in lot.units.values())
    pieces = state.config.num_fragments
    for lot in push.lots:
        try:
            units = _units(lot)
        except ValueError as error:
            raise ProtocolError(Code.BAD_PUSH, f"The units of this push: {error}.") from None
        if len(lot.pushes) != pieces or lot.pushes[push.fragment] != push.push_id:
            text = (
                f"Units count with a push of each of {pieces} fragments, and this is one of them."
            )
            raise ProtocolError(Code.BAD_PUSH, text)
        rows += sum(spans.ranges for spans in units.values())
    if rows > MOST_ROWS:
        text = (
            f"{who} has {rows} rows of units under way, and {MOST_ROWS} may be; make units larger."
        )
        raise ProtocolError(Code.BAD_PUSH, text)
    for name, spans in _all_units(push).items():
        data = state.data.sets.get(name)
        if data is None:
            text = (
                f"This broker knows no data set {name!a:.80}, of which this push of {who} has units; "
                "it is dropped, and they are trained on again."
            )
            raise ProtocolError(Code.STALE, text)
        if not data.can_claim(who, spans):
            text = (
                f"Units of the data set {name!a:.80} in this push of {who} have meanwhile counted or "
                "been given to others; it is dropped, so that none counts twice."
            )
            raise ProtocolError(Code.STALE, text)
    return True


def under_way(state: RunState, member: Member, push: Push) -> None:
    """This push was taken in, or waits for its turn: its units count when it does."""
    who = member.worker_id
    for name, spans in _all_units(push).items():
        state.data.sets[name].claim(who, spans)
    for lot in push.lots or ():
        units = _units(lot)
        left = _uncounted(state, who, dict(enumerate(lot.pushes)))
        pending = PendingLot(units, push, left)
        state.data.add_lot(who, pending)
        if not left:
            _count(state, who, pending)


def counted(state: RunState, fragment: int, ledger: Ledger) -> None:
    """A version of this fragment is whole, with this ledger: units of its pushes may count now."""
    for worker_id, lot in state.data.all_lots():
        push_id = lot.left.get(fragment)
        if push_id is not None and ledger.names_whole(worker_id, push_id):
            del lot.left[fragment]
            if not lot.left:
                _count(state, worker_id, lot)


def _count(state: RunState, worker_id: str, lot: PendingLot) -> None:
    state.data.end_lot(worker_id, lot)
    for name, spans in lot.units.items():
        state.data.sets[name].count(worker_id, spans)
        for other in state.data.lots.get(worker_id, ()):  # that names them again
            if name in other.units:
                other.units[name] -= spans


# What does not count.


def _may_count(state: RunState, worker_id: str, lot: PendingLot) -> bool:
    """Is all that is missing of its pushes still under way, or whole and waiting to be merged?"""
    if state.round is None:
        return False
    # Of a worker that is gone nothing more is taken, but what is whole is in the round.
    whole = {each.key for each in state.round.pushes if each.held.is_full}
    pushes = (replace(lot.push, fragment=f, push_id=each) for f, each in lot.left.items())
    return all(
        (worker_id, push.push_id) in whole or rules_of(state).find(state, worker_id, push)
        for push in pushes
    )


def _give_back(state: RunState, worker_id: str, name: str, *, keeps: Spans) -> None:
    """A worker stands for nothing else of this data set any more."""
    data = state.data.sets[name]
    for lot in list(state.data.lots.get(worker_id, ())):
        is_dropped = bool(lot.units.get(name, Spans()) - keeps)
        if is_dropped and not _may_count(state, worker_id, lot):
            state.data.end_lot(worker_id, lot)
    gone = data.of(worker_id) - keeps - state.data.in_lots(worker_id, name)
    data.give_back(worker_id, gone)


def leave(state: RunState, worker_id: str) -> None:
    """A worker is gone."""
    for name in state.data.sets:
        _give_back(state, worker_id, name, keeps=Spans())


def released(state: RunState) -> None:
    """A round is over: what workers that are gone had in it has counted, or never will."""
    for worker_id in list(state.data.lots):
        if worker_id not in state.members:
            leave(state, worker_id)
