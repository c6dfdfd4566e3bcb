"""The promises of a run, checked after every event of a simulated one.

- No push is counted twice in any chunk; where submissions are staged, whole or not at all. What a worker
  is told to be counted is in the version, and what it is told to be refused is not.
- Versions and rounds increase by one; each fragment has its turn. The ledger of a version, the weights
  and the number of workers reported are those of its contents.
- What the reducer keeps is bounded as the mode has it.
- Every push ends, and no worker waits endlessly, once enough workers are there. A worker whose training
  hangs is not waited for, and is expected again when it goes on.
- A broker that comes back owes what `simulation.incarnations` says.

A broken promise raises `Violation` at the moment it is broken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from diloco_broker.config import BrokerConfig
from diloco_broker.core import effects, events
from diloco_broker.core.machine import Core
from diloco_broker.core.rounds.modes import mode_of
from diloco_broker.core.rounds.round import Phase
from diloco_broker.core.rounds.streaming import StreamingRound
from diloco_broker.core.rounds.uploads import UPLOAD_WINDOW
from diloco_broker.core.versions.fragment import FragmentVersions
from diloco_broker.storage.checkpoint_format import Checkpoint
from diloco_protocol.messages import Chunk, Commit, Held, Push, Released
from diloco_protocol.version import PUSHES_REMEMBERED, VersionId
from simulation.contents import Key
from simulation.disk import Disk
from simulation.incarnations import Incarnations, Published
from simulation.tensors import Record, Tensors, Violation, Wire, as_held, demand

if TYPE_CHECKING:
    from simulation.worker import Worker

# Where not every event is followed by all checks, the whole ledger is checked every this many versions.
LEDGER_EVERY = 50
# Versions that are remembered as they were released; workers hold newer ones.
VERSIONS_KEPT = 2000
# A hanging worker has been found out after the time-out, three heartbeats and so long on the way.
ON_THE_WAY_S = 20.0


class Referee:
    """Raises Violation where a promise is broken.

    Everything that depends on others must have come to an end within `patience` seconds, once enough
    workers are there. The core's own invariants and the bounds of memory are checked after every event,
    or after every `thoroughness`.
    """

    def __init__(
        self,
        config: BrokerConfig,
        patience: float,
        thoroughness: int = 1,
        disk: Disk | None = None,
        alive: Callable[[], Sequence[Worker]] = tuple,
    ) -> None:
        self.config = config
        self.patience = patience
        self.thoroughness = thoroughness
        self.records: dict[Key, Record] = {}
        self.incarnations = Incarnations(config, self.records, disk)
        self.now = 0.0  # of the current event
        self.enough_since = 0.0  # since then there have been as many workers as a round needs
        self.has_relays = False
        self.versions_made = 0  # released, in all fragments and incarnations of the broker
        self._published: dict[tuple[int, VersionId], Published] = {}
        # What this incarnation of the broker released.
        self._history: set[tuple[int, VersionId]] = set()
        self._audit: effects.RecordVersion | None = None
        self._alive = alive
        self._round: int | None = None
        self._released_at = 0.0
        self._counted_at: dict[str, float] = {}
        self._events = 0

    @property
    def tensors(self) -> Tensors:
        return self.incarnations.tensors

    # Events at workers.

    def offered(self, process: str, worker_id: str, push: Push) -> None:
        tokens, samples = push.tokens, push.samples
        counts = {
            "tokens": tokens,
            "samples": samples,
            "tokens2-per-step": tokens**2 / max(1, push.steps),
        }
        count = counts.get(self.config.weight_by, 1)
        record = Record(process, push, push.weight * count, self.now)
        self.records[worker_id, push.push_id] = record
        self.incarnations.keys[push.push_id] = (worker_id, push.push_id)

    def told(self, worker_id: str, push_id: int, ending: str) -> None:
        record = self.records[worker_id, push_id]
        demand(record.ending is None, "it ends twice, now with {}: {}", ending, record)
        record.ending = ending
        if ending == "counted":
            record.told_in_incarnation = self.incarnations.number

    def delivered(
        self,
        worker_id: str,
        released: Released,
        counted: int | None,
        wires: tuple[Wire, ...] | None,
        held: VersionId | None,
    ) -> None:
        """A worker has a version whole now, instead of the one that it `held`.

        `counted` is the push in flight that it was told to be in it; `wires` are its chunks, None when
        it is the version that it held already.
        """
        fragment, version = released.fragment, released.version
        published = self._published.get((fragment, version))
        if published is None:
            raise Violation(f"{worker_id} has version {version} of {fragment}, which never was")
        demand(published.ledger is released.ledger, "{} got another ledger", worker_id)
        if wires is None:
            demand(held == version, "{} holds {}, and {} is not new", worker_id, held, version)
        else:
            demand(
                wires == as_held(published.wires), "{} has other chunks of {}", worker_id, version
            )
            back = held is not None and version.counter <= held.counter
            lost = (fragment, held) not in self._history
            demand(not back or lost, "{} goes back from {} to {}", worker_id, held, version)
        if counted is not None:
            record = self.records[worker_id, counted]
            self._check_counted(record, worker_id, released, published)
            began_with = self.incarnations.first.get(fragment)
            if began_with is not None and (fragment, version) not in self._history:
                self.incarnations.counts_late(record, self._published[fragment, began_with])

    def _check_counted(
        self, record: Record, worker_id: str, released: Released, published: Published
    ) -> None:
        key = (worker_id, record.push.push_id)
        places = [wire.contents.where(key) for wire in published.wires]
        known = [place for place in places if place is not None]
        is_whole = record.is_whole_in(key, published.wires)
        demand(
            is_whole and bool(known),
            "it was told that {} contains it: {}",
            released.version,
            record,
        )
        base, where = record.push.base, max(known)
        assert base is not None
        stale = max(0, where - 1 - base.counter)
        told = released.staleness  # None where its worker counted as dead in between
        began_with = self.incarnations.first.get(released.fragment)
        is_inherited = began_with is not None and where <= began_with.counter
        right = told in (stale, None) or is_inherited
        demand(right, "told staleness {}, not {}: {}", told, stale, record)

    # Events at the broker.

    def begins_incarnation(
        self, tensors: Tensors, checkpoint: Checkpoint | None, owner_of: Callable[[bytes], str]
    ) -> None:
        """A broker starts, the first one or its successor, and resumes `checkpoint`.

        `owner_of` gives the name of the process at the other end of a connection.
        """
        self.incarnations.begins(tensors, checkpoint, owner_of)
        self._history.clear()
        self._audit = self._round = None
        self.enough_since = self.now

    def audited(self, audit: effects.RecordVersion) -> None:
        self._audit = audit
        if mode_of(self.config).needs_whole:
            return
        added = self.tensors.added.get(audit.fragment, {})
        keys = [(each.worker_id, each.push.push_id) for each in audit.pushes]
        for key in keys:
            record = self.records[key]
            for other in keys:
                is_earlier = self.records[other].offered_at < record.offered_at
                if other[0] == key[0] and is_earlier:
                    record.spared |= dict.fromkeys(added.get(other, set()), other)

    def after(self, core: Core, event: events.Event, queue: Iterable[effects.TensorWork]) -> None:
        """The core has handled an event; `queue` is the tensor work that is waiting."""
        state = core.state
        self._notice_whole(core, event)
        for fragment, versions in enumerate(state.versions.fragments):
            if versions.version is not None and versions.version is not self.tensors.versions.get(
                fragment
            ):
                self._new_version(core, fragment, versions, versions.version)
        number = state.round.number if state.round else None
        if number != self._round:
            self._new_round(core, number)
        self._events += 1
        if self._events % self.thoroughness == 0:
            core.check_invariants()
            self._check_memory(core, queue)

    def _notice_whole(self, core: Core, event: events.Event) -> None:
        match event:
            case events.WorkDone(effects.Fold(worker_id="")):
                pass
            case events.Received(message=Chunk() as chunk, payload=Held()):
                member = core.state.members.with_session(chunk.session or b"")
                if member is not None and chunk.push_id is not None:
                    key = (member.worker_id, chunk.push_id)
                    self._whole_if_staged(core, chunk.fragment, key)
            case events.WorkDone(effects.Fold() as work):
                record = self.records[work.worker_id, work.push_id]
                if len(record.taken) == record.push.chunks:
                    record.whole_at = self.now
            case events.WorkDone(work):
                self._whole_if_staged(core, work.fragment, (work.worker_id, work.push_id))
            case events.Received(message=Commit(session, push_id, fragment)):
                member = core.state.members.with_session(session)
                if member is not None:
                    self._whole_if_staged(core, fragment, (member.worker_id, push_id))

    def _whole_if_staged(self, core: Core, fragment: int, key: Key) -> None:
        submission = core.state.submissions.find(fragment, *key)
        if submission is not None and submission.is_whole:
            self.records[key].whole_at = self.records[key].whole_at or self.now

    def _new_version(
        self, core: Core, fragment: int, versions: FragmentVersions, version: VersionId
    ) -> None:
        former = self.tensors.versions.get(fragment)
        if former is not None:
            follows = version.counter == former.counter + 1 and version.run == former.run
            is_new = follows and version.tag != former.tag
            demand(is_new, "fragment {} goes from {} to {}", fragment, former, version)
            self._check_report(core, fragment)
            self.versions_made += 1
            self._released_at = self.now
        else:
            self._check_ledger(versions)
            names = frozenset(process.name for process in self._alive())
            self.incarnations.fragment_begins(core, versions, self._published, names)
        added = self.tensors.release(fragment, version)
        if former is not None:
            self._check_audit(former, version, added)
        self._check_contents(versions, added)
        self._check_names(versions, added)
        if self.thoroughness == 1 or self.versions_made % LEDGER_EVERY == 0:
            self._check_ledger(versions)
        for key in self._whole(added, versions):
            self.records[key].counted_in = version
            self._counted_at[self.records[key].process] = self.now
        self._history.add((fragment, version))
        self._published[fragment, version] = Published(versions.wires, versions.ledger)
        while len(self._published) > VERSIONS_KEPT:
            del self._published[next(iter(self._published))]

    def _check_audit(
        self, former: VersionId, version: VersionId, added: dict[Key, set[int]]
    ) -> None:
        """What was written down of a version is what it has more than the one before."""
        audit = self._audit
        assert audit is not None, "nothing was written down"
        right = (audit.after, audit.version) == (former, version)
        demand(right, "{} after {} was released, written down {}", version, former, audit)
        told = {(p.worker_id, p.push.push_id): set(p.added) for p in audit.pushes if p.added}
        demand(told == added, "{} has {} more, written down {}", version, added, told)

    def _check_report(self, core: Core, fragment: int) -> None:
        """Compare the report of the round that has just ended with its contents."""
        state, round_ = core.state, self._round
        versions, report = state.versions[fragment], state.last_report
        assert report is not None
        if not self.config.is_async:
            number = versions.record.round
            its_turn = number == round_ and number % self.config.num_fragments == fragment
            demand(its_turn, "round {} made a version of {}: {}", number, fragment, round_)
        added = self.tensors.added.get(fragment, {})
        whole = self._whole(added, versions)
        weight = sum(self.records[key].weight for key in whole)
        workers = len({worker_id for worker_id, _ in whole})
        stale = max((self.tensors.staleness(self.records[key]) for key in whole), default=0)
        right = (report.averaged, report.staleness) == (workers, stale)
        right = right and abs(report.weight - weight) <= 1e-9 * max(1.0, weight)
        demand(right, "{}, but {} workers, {}, {}", report, workers, weight, stale)
        once = self.config.is_async or workers == len(whole)
        demand(once, "a worker is averaged more than once in a round: {}", whole)

    def _whole(self, added: Iterable[Key], versions: FragmentVersions) -> list[Key]:
        """Of these pushes, those of which nothing is missing any more."""
        return [key for key in added if self.records[key].is_whole_in(key, versions.wires)]

    def _check_contents(self, versions: FragmentVersions, added: dict[Key, set[int]]) -> None:
        """Staged submissions count whole or not at all, and not when they were refused.

        Only what a relay held that died in this moment is missing, and is counted later.
        """
        if not mode_of(self.config).needs_whole:
            return
        for key, chunks in added.items():
            whole = len(chunks) == len(versions.wires) or self.has_relays
            demand(whole, "{} chunks of {} are counted: whole or not at all", len(chunks), key)
            record = self.records[key]
            good = record.ending in (None, "counted")
            demand(good, "counted although it was refused: {}", record)

    def _check_names(self, versions: FragmentVersions, added: Iterable[Key]) -> None:
        for worker_id, push_id in added:
            named = [each.push_id for each in versions.ledger.pushes.get(worker_id, ())]
            right = push_id in named or len(named) == PUSHES_REMEMBERED
            demand(right, "the ledger of {} lacks {}", versions.version, (worker_id, push_id))

    def _check_ledger(self, versions: FragmentVersions) -> None:
        """Each push is in the chunks that the ledger calls its own, and in no others."""
        ledger, size = versions.ledger, len(versions.wires)
        for worker_id, pushes in ledger.pushes.items():
            for counted in pushes:
                key = (worker_id, counted.push_id)
                own = ledger.own_chunks(*key, size)
                right = all((key in w.contents) == (i in own) for i, w in enumerate(versions.wires))
                demand(right, "the ledger of {} errs in {}: {}", versions.version, key, own)

    def _new_round(self, core: Core, number: int | None) -> None:
        versions, pieces = self.tensors.versions, self.config.num_fragments
        made = sum(v.counter for fragment, v in versions.items() if fragment < pieces)
        follows = number == made and (self._round is None or number == self._round + 1)
        demand(follows, "round {} follows {}, versions made: {}", number, self._round, made)
        self._round = number
        round_ = core.state.round
        if round_ is not None and not self.config.is_async:
            its_turn = round_.fragment == round_.number % pieces
            demand(its_turn, "round {} is about fragment {}", number, round_.fragment)

    def _check_memory(self, core: Core, queue: Iterable[effects.TensorWork]) -> None:
        """Payloads kept: by the mode's own bound."""
        state, config = core.state, self.config
        waiting = Counter(
            (work.worker_id, work.push_id)
            for work in queue
            if isinstance(work, effects.Fold | effects.Inspect)
        )
        total = sum(waiting.values())
        demand(
            state.chunks_waiting == total,
            "{} chunks wait to be added: {}",
            total,
            state.chunks_waiting,
        )
        crowded = max(waiting.values(), default=0)
        demand(crowded <= UPLOAD_WINDOW, "{} chunks of a push wait to be added", crowded)
        if not mode_of(config).needs_whole:
            demand(not list(state.submissions), "a streaming round keeps submissions")
            return
        if config.is_async:
            # Within a grace period whole ones wait for each other, and are as many as have come.
            kept = [s for s in state.submissions if not (config.fixed_grace and s.is_whole)]
            slots = config.staging_slots
            demand(len(kept) <= slots, "{} submissions are kept in {} slots", len(kept), slots)
        ids = {member.worker_id for member in state.members}
        orphans = [
            s.key
            for s in state.submissions
            if not (s.is_whole or s.is_chosen) and s.worker_id not in ids
        ]
        demand(not orphans, "half a push of a worker that is gone is kept: {}", orphans)
        rooms = Counter(
            (s.worker_id, s.push.fragment, s.is_whole)
            for s in state.submissions
            if not s.is_chosen and not (config.is_async and s.is_whole)
        )
        demand(max(rooms.values(), default=0) <= 1, "more than one of a kind is kept: {}", rooms)

    # Progress.

    def watch(self, core: Core) -> None:
        """Called now and then: does every worker that can make progress make it?"""
        alive = self._alive()
        config, state = self.config, core.state
        floor = config.workers if state.first_round_pending else config.min_workers
        if state.model.checkpoint and config.recover_wait:
            floor = config.min_workers
        training = [process for process in alive if process.hangs_until < self.now]
        if len(training) < (1 if config.is_async else floor):
            self.enough_since = self.now
        for process in alive:
            self._check_hanging(core, process)
            for what, since in (
                ("stands still", process.training.waiting_since),
                ("has a push in flight", process.training.oldest_in_flight),
            ):
                if since is not None:
                    back = max(process.online_since, process.hangs_until)
                    for_s = self.now - max(since, self.enough_since, back)
                    right = for_s <= self.patience
                    demand(right, "{} {} for {:.0f} s", process.name, what, for_s)
        online = max((process.online_since for process in alive), default=self.now)
        idle = self.now - max(self._released_at, self.enough_since, online)
        demand(idle <= self.patience, "no version was released for {:.0f} s", idle)

    def _check_hanging(self, core: Core, process: Worker) -> None:
        """A worker whose training hangs is not waited for; when it goes on, it is again.

        While pushes from before it hung are still on their way, it counts as going on.
        """
        config, round_ = self.config, core.state.round
        member = core.state.members.named(process.worker_id)
        if config.is_async or not config.stall_timeout or member is None or round_ is None:
            return
        # Through two relays it is three times on the way.
        beats_s = 3 * process.beat_s + ON_THE_WAY_S * (3 if self.has_relays else 1)
        counted_at = self._counted_at.get(process.name, 0.0)
        joined_at = member.joined_at + core.state.held_s  # on the clock of the others, or later
        since = max(process.hangs_from, process.online_since, joined_at, counted_at)
        if min(self.now, process.hangs_until) - since > config.stall_timeout + beats_s:
            waits = round_.phase is Phase.OPEN and process.worker_id in round_.missing
            waits = waits and process.hangs_until > self.now
            demand(not waits, "{} hangs since {:.0f} s and is waited for", process.name, since)
        if member.liveness.is_stalled:
            back = max(process.hangs_until, process.online_since)
            demand(self.now - back <= beats_s, "{} trains, and counts as stalled", process.name)

    def at_the_end(self, core: Core) -> None:
        """The run stops here: check how every push ended."""
        alive = {process.name for process in self._alive()}
        core.check_invariants()
        fragments = core.state.versions.fragments
        for key, record in self.records.items():
            if record.is_lost:
                continue
            wires = enumerate(fragments[record.push.fragment].wires)
            inside = [record.is_in(key, index, wire) for index, wire in wires]
            if record.ending == "counted":
                demand(all(inside), "it is lost: {}", record)
            elif record.ending is not None:
                may_be = not any(inside) or not (mode_of(self.config).needs_whole or all(inside))
                demand(may_be, "refused, but counted: {}", record)
            elif record.process not in alive and record.whole_at is not None:
                may_be = all(inside) or self._may_be_pending(core, key, record)
                may_be = may_be or record.was_at_relay
                demand(may_be, "the broker had all of it, and it is lost: {}", record)

    def _may_be_pending(self, core: Core, key: Key, record: Record) -> bool:
        """May a whole push of a process that is gone be missing from the version?"""
        if self.config.max_staleness is not None:
            return True  # it may have grown too old, and its process is gone
        round_ = core.state.round
        if isinstance(round_, StreamingRound):
            return key in round_.contributions
        return core.state.submissions.find(record.push.fragment, *key) is not None
