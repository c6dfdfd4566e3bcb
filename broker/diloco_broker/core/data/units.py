"""The work queue: units are handed out, counted with the pushes that contain them, or returned.

`core.data.data_sets` has the states of a unit. Each request of a worker lists the units that it claims.
Those that it no longer lists are returned; those that it lists but does not hold here, because the
broker or the worker restarted, it gets if they are free. A push names the units that count with it, and
is refused if another worker has been given one of them, so that no unit counts twice.

A worker that dies or leaves returns all units but those in pushes that may still count.
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

MOST_AT_A_TIME = 4096  # units in one answer: bounds its size
# Pending batches of one worker: one for each push in flight, and those of abandoned pushes.
MOST_LOTS = 256
# Ranges of units in all pending batches of one worker, since each takes memory.
MOST_ROWS = 4 * MOST_RANGES


def take(state: RunState, member: Member, message: Take) -> effects.Effects:
    """Update the units that a worker claims, and hand out more."""
    who, data = member.worker_id, state.data.sets.get(message.name)
    try:
        holds = Spans.read(message.holds)
        lots = [_units(lot) for lot in message.lots[:MOST_LOTS]]
        if data is None:
            data = _begin(state, message)
            yield effects.info(
                f"{who} starts the data set {message.name!r} of {message.size} units."
            )
        _check_same(data, message)
    except ValueError as error:
        yield member.tell(Result(message.request, False, f"{error}."))
        return
    is_ready = state.is_running  # before that, the broker may still adopt a newer version
    stands_for = holds
    for units, lot in zip(lots, message.lots, strict=False):
        spans = units.get(message.name, Spans())
        if not is_ready:
            stands_for = stands_for | spans  # reserved until it is known whether they count
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
    """Start a data set; raises ValueError if it is invalid."""
    if not is_data_set_name(message.name):
        raise ValueError(
            f"the name of a data set must have 1 to 64 printable characters, got {message.name!r:.80}"
        )
    whole = message.size * max(1, message.epochs)
    if message.size < 1 or message.epochs < 0 or whole >= LARGEST:
        raise ValueError(f"a data set cannot have {message.size} units in {message.epochs} epochs")
    if len(state.data.sets) >= MOST_DATA_SETS:
        raise ValueError(f"this run already has {MOST_DATA_SETS} data sets, the maximum")
    data = DataSet(message.size, message.epochs, message.seed)
    return state.data.begin(message.name, data)


def _check_same(data: DataSet, message: Take) -> None:
    for name in ("size", "epochs", "seed"):
        ours, theirs = getattr(data, name), getattr(message, name)
        if ours != theirs:
            what = "units" if name == "size" else name
            raise ValueError(
                f"the data set {message.name!r} has {what}={ours} in this run, but this worker has "
                f"{theirs}; use the same value in all workers, or another name"
            )


def _units(lot: Lot) -> dict[str, Spans]:
    """Read the units of a batch by data set; raises ValueError for invalid ranges."""
    return {name: Spans.read(flat) for name, flat in lot.units.items()}


def _all_units(push: Push) -> dict[str, Spans]:
    found: dict[str, Spans] = {}
    for lot in push.lots or ():
        for name, spans in _units(lot).items():
            found[name] = found.get(name, Spans()) | spans
    return found


def _uncounted(state: RunState, worker_id: str, pushes: Mapping[int, int]) -> dict[int, int]:
    """Those of these push ids, by fragment, that no version completely contains.

    This includes a version that waits for its checkpoint: its units have counted.
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
    """Whether this push has new units; raises ProtocolError if its worker may not have them."""
    who = member.worker_id
    if not push.lots or state.data.has_lot(who, push):
        return False
    if not _uncounted(state, who, {push.fragment: push.push_id}):
        return False  # it has counted, and will be answered so
    under_way = state.data.lots.get(who, ())
    if len(under_way) + len(push.lots) > MOST_LOTS:
        raise ProtocolError(
            Code.BAD_PUSH, f"{who} already has {MOST_LOTS} pending batches of units, the maximum."
        )
    ranges = sum(spans.ranges for lot in under_way for spans in lot.units.values())
    pieces = state.config.num_fragments
    for lot in push.lots:
        try:
            units = _units(lot)
        except ValueError as error:
            raise ProtocolError(Code.BAD_PUSH, f"Invalid units in this push: {error}.") from None
        if len(lot.pushes) != pieces or lot.pushes[push.fragment] != push.push_id:
            text = f"A batch of units must name a push of each of {pieces} fragments, this one included."
            raise ProtocolError(Code.BAD_PUSH, text)
        ranges += sum(spans.ranges for spans in units.values())
    if ranges > MOST_ROWS:
        text = (
            f"{who} has {ranges} ranges of pending units, more than {MOST_ROWS}; use larger units."
        )
        raise ProtocolError(Code.BAD_PUSH, text)
    for name, spans in _all_units(push).items():
        data = state.data.sets.get(name)
        if data is None:
            text = (
                f"Dropped a push of {who}: this broker does not know its data set {name!a:.80}. Its "
                "units will be handed out again."
            )
            raise ProtocolError(Code.STALE, text)
        if not data.can_claim(who, spans):
            text = (
                f"Dropped a push of {who}: some of its units of the data set {name!a:.80} have counted "
                "or were given to other workers in the meantime."
            )
            raise ProtocolError(Code.STALE, text)
    return True


def under_way(state: RunState, member: Member, push: Push) -> None:
    """Note the units of a push that was granted or deferred: they count when it does."""
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
    """Count the units whose last push is in this ledger, that of a complete version."""
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
        for other in state.data.lots.get(worker_id, ()):  # it may name the same units
            if name in other.units:
                other.units[name] -= spans


# Units that are returned.


def _may_count(state: RunState, worker_id: str, lot: PendingLot) -> bool:
    """Whether each of its uncounted pushes is in progress, or complete and waiting to be merged."""
    if state.round is None:
        return False
    # The round still has complete pushes of workers that died or left.
    whole = {each.key for each in state.round.pushes if each.held.is_full}
    pushes = (replace(lot.push, fragment=f, push_id=each) for f, each in lot.left.items())
    return all(
        (worker_id, push.push_id) in whole or rules_of(state).find(state, worker_id, push)
        for push in pushes
    )


def _give_back(state: RunState, worker_id: str, name: str, *, keeps: Spans) -> None:
    """Return the units of this data set that a worker holds, except those that it `keeps`."""
    data = state.data.sets[name]
    for lot in list(state.data.lots.get(worker_id, ())):
        is_dropped = bool(lot.units.get(name, Spans()) - keeps)
        if is_dropped and not _may_count(state, worker_id, lot):
            state.data.end_lot(worker_id, lot)
    gone = data.of(worker_id) - keeps - state.data.in_lots(worker_id, name)
    data.give_back(worker_id, gone)


def leave(state: RunState, worker_id: str) -> None:
    """A worker died or left: return its units."""
    for name in state.data.sets:
        _give_back(state, worker_id, name, keeps=Spans())


def released(state: RunState) -> None:
    """A round ended: return uncounted units of workers that died or left."""
    for worker_id in list(state.data.lots):
        if worker_id not in state.members:
            leave(state, worker_id)
