"""The drill: a broker with two training workers, without keys and with, and attack after attack."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from diloco_lab.bench.process_pool import BrokerProcess, Ends, Probes, ProcessPool
from diloco_lab.chaos.attacks import keyed, watch
from diloco_lab.chaos.attacks.floods import READS_AFTER_S
from diloco_lab.chaos.attacks.peers import Tally
from diloco_lab.chaos.attacks.report import MIB, Row
from diloco_lab.chaos.attacks.table import ATTACKS, Attack
from diloco_lab.chaos.attacks.words import MARK
from diloco_lab.chaos.attacks.worker import SYNC_EVERY, description
from diloco_lab.driver import machine
from diloco_lab.driver.experiment import emptied
from diloco_lab.driver.options import START_WITHIN_S, make_keys
from diloco_protocol.errors import DilocoError
from diloco_protocol.roles import Peer as Owner
from diloco_tools.processes import ChildFailed

WORKERS = ("w0", "w1")
TRAINS_WITHIN_S = 60.0
ENDS_LATE_S = 30.0  # an attacker, after its time
STALLS_S = 3.0  # after which rounds stop waiting for the member that only sends heartbeats
CALM_WITHIN_S = 20.0  # until the effects of an attack are over, before the next one
ROUND_WITHIN_S = 10.0  # for the next round after a window, which completes the window
LOOK_EVERY_S = 0.02
AUDIT = "audit.jsonl"  # in which the broker writes each new version
WITHOUT_KEYS = "stranger"


@dataclass(frozen=True)
class Options:
    """The length and the choice of attacks."""

    folder: Path
    is_quick: bool = False  # shorter, each attack on one broker only
    names: tuple[str, ...] = ()  # all

    @property
    def calm_s(self) -> float:
        return 0.8 if self.is_quick else 2.0

    @property
    def settles_s(self) -> float:
        """Until the memory after an attack is measured."""
        return 0.3 if self.is_quick else 1.0

    def seconds_of(self, attack: Attack) -> float:
        if self.is_quick:
            return 0.8
        return READS_AFTER_S + 1.0 if attack.waits else 3.0

    def wanted(self, *, has_keys: bool) -> list[Attack]:
        """The attacks on a broker with keys, or without."""
        return [
            each
            for each in ATTACKS
            if (has_keys or each.without_keys)
            and (not self.names or any(word in each.name for word in self.names))
            and (not self.is_quick or has_keys != each.without_keys)
        ]


class Stage:
    """A broker and its workers, which train. Made by `stage`.

    Attributes:
        keys_folder: of the broker; None: it has no keys.
    """

    def __init__(self, pool: ProcessPool, broker: BrokerProcess, keys_folder: Path | None) -> None:
        self.pool, self.broker, self.keys_folder = pool, broker, keys_folder
        run = pool.folder / "run"
        self.log = broker.child.log
        self.history = (run / "history.1.jsonl", run / "history.jsonl", run / "control.jsonl")
        self.rounds = watch.Rounds(pool.folder / AUDIT)
        self.described = pool.folder / "description"
        self.described.write_bytes(description())
        for name in WORKERS:
            keys = self.key_file(Owner(keyed.THIEF.role, name))
            trainer = pool.role("attacked", name)
            trainer.tell("train", address=broker.address, name=name, keys=keys)
        self.await_rounds(time.monotonic(), TRAINS_WITHIN_S)  # members can join after the model

    def key_file(self, owner: Owner | None) -> str:
        """Empty without keys."""
        if self.keys_folder is None or owner is None:
            return ""
        return str(self.keys_folder / "clients" / f"{owner.role.value}-{owner.name}.key")

    def written(self) -> int:
        """Bytes of the broker's log and history."""
        return watch.size_of((self.log, *self.history))

    def probes(self) -> Probes:
        """A member that only sends heartbeats; rounds wait for it for a moment."""
        heart = self.pool.role("hearts")
        keys = self.key_file(keyed.PULSE) or None
        heart.ask("join", address=self.broker.address, names=[keyed.PULSE.name], keys=keys)
        ends = Ends(self.pool.role("raw", "pinger"), self.pool.role("raw", "echo"))
        ends.connect()
        return Probes(heart, ends)

    def await_rounds(self, after: float, within_s: float) -> None:
        """Wait for a round that ends later than `after`, at most for `within_s`."""
        deadline = after + within_s
        while time.monotonic() < deadline and not any(t > after for t in self.rounds.seen()[-1:]):
            self.check()
            time.sleep(LOOK_EVERY_S)

    def check(self) -> None:
        """Raises ChildFailed if the broker or a worker has ended."""
        for child in (self.broker.child, *(self.pool.role("attacked", each) for each in WORKERS)):
            if not child.running:
                raise child.failure()

    def send(self, attack: Attack, seconds: float) -> Tally:
        """Have a process attack, and wait for it."""
        began = time.monotonic()
        attacker = self.pool.role("attacker", f"attack-{len(self.pool.all)}")
        attacker.tell(
            "attack",
            name=attack.name,
            address=self.broker.address,
            feed=self.broker.feed,
            seconds=seconds,
            keys=self.key_file(attack.with_key),
            folder=str(self.keys_folder or ""),
            description=str(self.described),
        )
        try:
            return Tally(**attacker.hear(START_WITHIN_S + seconds + ENDS_LATE_S))
        except ChildFailed as error:
            # It says nothing about the broker, but must not count as an attack that was withstood.
            through = [f"it was not tried to its end: {error}"]
            return Tally(through=through, began_at=began, ended_at=time.monotonic())
        finally:
            attacker.kill()
            self.check()


@contextlib.contextmanager
def stage(folder: Path, *, has_keys: bool) -> Iterator[Stage]:
    """A run for as long as the context lasts."""
    with ProcessPool(emptied(folder, AUDIT), 0) as pool:
        keys = folder / "keys" if has_keys else None
        if keys is not None:
            names = (*WORKERS, *(each.name for each in keyed.WORKERS))
            others = {"operator": keyed.OPERATOR.name, "monitor": keyed.MONITOR.name}
            make_keys(pool, keys, *names, **others)
        with pool.broker(
            workers=len(WORKERS),
            sync_every=SYNC_EVERY,
            outer_lr=0.5,
            stall_timeout=STALLS_S,
            save_dir=folder / "run",
            save_every=keyed.SAVE_EVERY,
            audit=folder / AUDIT,
            keys=keys or False,
        ) as broker:
            try:
                yield Stage(pool, broker, keys)
            finally:
                pool.dismiss(*WORKERS)  # while they can leave


def drill(options: Options, say: Callable[[str], None]) -> tuple[list[Row], list[str]]:
    """All rows, and sentences about other errors."""
    rows: list[Row] = []
    problems: list[str] = []
    for has_keys in (False, True):
        try:
            if wanted := options.wanted(has_keys=has_keys):
                for row in measured(options, wanted, has_keys=has_keys):
                    say(str(row))
                    rows.append(row)
        except (ChildFailed, DilocoError) as error:
            problems.append(str(error))
    return rows, problems


def measured(options: Options, attacks: list[Attack], *, has_keys: bool) -> Iterator[Row]:
    """One after the other, on one broker with two training workers."""
    folder = options.folder / ("keys" if has_keys else "open")
    with stage(folder, has_keys=has_keys) as run:
        probes, pid = run.probes(), run.broker.child.pid
        with watch.Watch(pid, run.rounds) as seen:
            probes.begin(watch.PROBE_EVERY_S)  # its heartbeats show that the member stands still
            run.await_rounds(time.monotonic() + STALLS_S, TRAINS_WITHIN_S)
            probes.end()
            first_base = machine.resident(pid)
            for attack in attacks:
                measure = partial(_measured, run, seen, probes, attack, options)
                row = measure(first_base)
                if row.broken() and not row.through:
                    row = twice(row, measure(first_base))
                yield row


def twice(first: Row, again: Row) -> Row:
    """The result of two measurements: the first may have been slow by chance, but its growth remains."""
    return replace(
        again,
        first=first.plain(),
        rise_mib=max(first.rise_mib, again.rise_mib),
        written_kib=max(first.written_kib, again.written_kib),
    )


def _measured(  # noqa: PLR0917
    run: Stage,
    seen: watch.Watch,
    probes: Probes,
    attack: Attack,
    options: Options,
    first_base: float,
) -> Row:
    """A calm window, the attack, a moment after it; and the broker's costs."""
    watch.await_calm(probes, CALM_WITHIN_S)
    calm_began, written_before = time.monotonic(), run.written()
    time.sleep(options.calm_s)
    calm_ended = time.monotonic()
    run.await_rounds(calm_ended, ROUND_WITHIN_S)
    written = run.written()
    base = max(watch.within(seen.memory, calm_ended - 0.5, calm_ended), default=0.0)
    probes.begin(watch.PROBE_EVERY_S)
    did = run.send(attack, options.seconds_of(attack))
    time.sleep(options.settles_s)
    ended = time.monotonic()
    beats, pings = probes.end(did.began_at)
    beside = watch.within(seen.memory, did.began_at, ended) or [base]
    run.await_rounds(ended, ROUND_WITHIN_S)
    run.check()
    through = [*did.through, *watch.forged(run.log, run.history, MARK)]
    if "Traceback" in run.log.read_text(errors="replace"):
        through.append(f"a traceback in {run.log}")
    rounds = run.rounds.seen()
    calm, whole = watch.pace(rounds, calm_began, calm_ended), watch.pace(rounds, calm_ended, ended)
    usual = (written - written_before) / (calm_ended - calm_began) / max(calm, 0.1)
    beyond = run.written() - written - usual * whole * (ended - calm_ended)
    return Row(
        attack.name,
        name_of(attack, has_keys=run.keys_folder is not None),
        {name: getattr(did, name) for name in COUNTED},
        through,
        calm=calm,
        beside=watch.pace_beside(rounds, did.began_at, did.ended_at, ended),
        rise_mib=(max(beside) - base) / MIB,
        after_mib=(beside[-1] - base) / MIB,
        kept_mib=(beside[-1] - first_base) / MIB,
        answer_ms=max(beats),
        echo_ms=max(pings),
        written_kib=max(0.0, beyond) / 1024,
        seconds=did.ended_at - did.began_at,
    )


COUNTED = ("messages", "connections", "bytes", "ended", "refused")


def name_of(attack: Attack, *, has_keys: bool) -> str:
    """The attacker, for the table."""
    if not has_keys:
        return WITHOUT_KEYS
    return attack.by or (f"key: {attack.with_key.role.value}" if attack.with_key else "no key")
