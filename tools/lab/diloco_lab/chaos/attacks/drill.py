"""The drill: a broker with two training workers, without keys and with, and attack after attack."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diloco_lab.chaos.attacks import keyed, watch
from diloco_lab.chaos.attacks.floods import READS_AFTER_S
from diloco_lab.chaos.attacks.peers import Tally
from diloco_lab.chaos.attacks.report import MIB, Row
from diloco_lab.chaos.attacks.table import ATTACKS, Attack
from diloco_lab.chaos.attacks.words import MARK
from diloco_lab.chaos.attacks.worker import SYNC_EVERY, description
from diloco_lab.driver import machine
from diloco_lab.driver.options import ANYWHERE, START_WITHIN_S, broker_command, make_keys
from diloco_lab.driver.roles import RoleProcess
from diloco_protocol.clients import find_keys
from diloco_protocol.errors import DilocoError
from diloco_protocol.roles import Peer as Owner
from diloco_tools.processes import Child, ChildFailed, Children, wait_for_line

WORKERS = ("w0", "w1")
TRAINS_WITHIN_S = 60.0
ENDS_LATE_S = 30.0  # an attacker, after its time
STALLS_S = 3.0  # after which rounds wait no more for the member that only sends heartbeats
SETTLES_S = 1.0
POISONS_WITHIN_S = 120.0
CALM_WITHIN_S = 20.0  # what an attack leaves behind is worked off, before the next one
ROUND_WITHIN_S = 10.0  # the next one after a window: it makes the window's last part
LOOK_EVERY_S = 0.02
NOBODY = "stranger"


@dataclass(frozen=True)
class Options:
    """How long, and which."""

    folder: Path
    calm_s: float = 2.0
    attack_s: float = 3.0
    settles_s: float = 1.0  # until the memory behind an attack is looked at
    is_quick: bool = False  # one broker for each attack, and not all of them
    seed: int = 0
    names: tuple[str, ...] = ()  # all

    @classmethod
    def quick(cls, folder: Path) -> Options:
        return cls(folder, calm_s=0.8, attack_s=0.8, settles_s=0.3, is_quick=True)

    def wanted(self, *, has_keys: bool) -> list[Attack]:
        """The attacks on a broker that asks for keys, or for none."""
        return [
            each
            for each in ATTACKS
            if (has_keys or each.without_keys)
            and (not self.names or any(word in each.name for word in self.names))
            and (not self.is_quick or has_keys != each.without_keys)
        ]


class Stage(Children):
    """A broker and its workers; all of them have ended once its context is left.

    Attributes:
        keys_folder: of the broker; None: it asks for none.
    """

    def __init__(self, folder: Path, *, has_keys: bool, trains: bool = True) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(folder)
        self.keys_folder = folder / "keys" if has_keys else None
        self._trains = trains
        self.broker: Child
        self.address = self.feed = ""
        self._described = folder / "description"

    def __enter__(self) -> Stage:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        locked: dict[str, Any] = {}
        if self.keys_folder is not None:
            names = (*WORKERS, *(each.name for each in keyed.WORKERS))
            others = {"operator": keyed.OPERATOR.name, "monitor": keyed.MONITOR.name}
            make_keys(self, self.keys_folder, *names, **others)
            locked = {"keys": self.keys_folder}
        command = broker_command(
            "serve",
            **locked,
            workers=len(WORKERS),
            sync_every=SYNC_EVERY,
            outer_lr=0.5,
            stall_timeout=STALLS_S,
            bind=ANYWHERE,
            feed=ANYWHERE,
            save_dir=self.folder / "run",
            save_every=keyed.SAVE_EVERY,
        )
        self.broker = self.start("broker", command)
        self.address = wait_for_line(self.broker, "control", START_WITHIN_S)
        self.feed = wait_for_line(self.broker, "feed", START_WITHIN_S)
        self._described.write_bytes(description())
        if self._trains:
            self.train()

    def train(self) -> None:
        """Start the workers, and wait until rounds close."""
        for name in WORKERS:
            job = self.folder / f"{name}.job.json"
            keys = self.key_file(Owner(keyed.THIEF.role, name))
            plain = {"name": name, "address": self.address, "rounds": str(self._rounds(name))}
            job.write_text(json.dumps(plain | {"keys": keys}))
            module = "diloco_lab.chaos.attacks.worker"
            self.start(name, [sys.executable, "-m", module, str(job)])
        self.await_rounds(time.monotonic() + 1.0, TRAINS_WITHIN_S)

    def written(self) -> int:
        """Bytes of the broker's log and history."""
        return watch.size_of((self.broker.log, *self.history))

    def key_file(self, owner: Owner | None) -> str:
        """Empty where no keys are asked for."""
        if self.keys_folder is None or owner is None:
            return ""
        return str(self.keys_folder / "clients" / f"{owner.role.value}-{owner.name}.key")

    def watched(self) -> watch.Watch:
        echo = self.add(RoleProcess("raw", "echo", self.folder))
        port = echo.ask("port")["port"]
        echo.tell("accept")
        echo.tell("echo")
        return watch.Watch(self.broker.pid, self._asker(), port)

    def _asker(self) -> watch.Status | watch.Heartbeats:
        """A member where there is a run; it could not be one without giving it a model."""
        owner = keyed.PULSE if self._trains else keyed.OPERATOR
        keys = find_keys(self.key_file(owner)) if self.keys_folder is not None else None
        if not self._trains:
            return watch.Status(self.address, keys)
        described = self._described.read_bytes()
        return watch.Heartbeats(self.address, keys, keyed.PULSE.name, described)

    def _rounds(self, name: str) -> Path:
        return self.folder / f"{name}.rounds"

    def rounds(self) -> list[float]:
        """When rounds ended, as the first worker has seen it."""
        return watch.read_times(self._rounds(WORKERS[0]))

    def await_rounds(self, after: float, within_s: float) -> None:
        """Wait for a round that ends later than that; do not insist."""
        deadline = after + within_s
        while time.monotonic() < deadline:
            if any(each > after for each in self.rounds()[-1:]):
                return
            self.check()
            time.sleep(LOOK_EVERY_S)

    def check(self) -> None:
        """Raises ChildFailed where the broker or a worker has ended."""
        for child in self.all:
            if not child.running and child.name in ("broker", *WORKERS):
                raise child.failure()

    @property
    def history(self) -> tuple[Path, ...]:
        run = self.folder / "run"
        return (run / "history.1.jsonl", run / "history.jsonl", run / "control.jsonl")

    def send(self, attack: Attack, options: Options) -> Tally:
        """Have a process attack, and wait for it."""
        seconds = READS_AFTER_S + 1.0 if attack.waits and not options.is_quick else options.attack_s
        began, name = time.monotonic(), f"attack-{len(self.all)}"
        attacker = self.add(RoleProcess("attacker", name, self.folder))
        attacker.tell(
            "attack",
            name=attack.name,
            address=self.address,
            feed=self.feed,
            seconds=seconds,
            seed=options.seed,
            keys=self.key_file(attack.with_key),
            folder=str(self.keys_folder or ""),
            description=str(self._described),
        )
        try:
            return Tally(**attacker.hear(START_WITHIN_S + seconds + ENDS_LATE_S))
        except ChildFailed as error:
            # It tells nothing of the broker, but nobody may take it for an attack that was withstood.
            through = [f"it was not tried to its end: {error}"]
            return Tally(through=through, began_at=began, ended_at=time.monotonic())
        finally:
            attacker.kill()
            self.check()


def drill(options: Options, say: Callable[[str], None]) -> tuple[list[Row], list[str]]:
    """All rows, and sentences on what went wrong besides them."""
    rows: list[Row] = []
    problems: list[str] = []
    for has_keys in (False, True):
        wanted = options.wanted(has_keys=has_keys)
        stages = [
            [each for each in wanted if each.on_empty == on_empty] for on_empty in (False, True)
        ]
        for measure, attacks in zip((_beside_training, _on_empty), stages, strict=True):
            try:
                for row in measure(options, attacks, has_keys=has_keys) if attacks else ():
                    say(_line(row))
                    rows.append(row)
            except (ChildFailed, DilocoError) as error:
                problems.append(str(error))
    return rows, problems


def poisons(options: Options) -> list[dict[str, Any]]:
    """What pseudo-gradients that do harm come to, with each defence; see `poison`."""
    with Children(options.folder) as children:
        role = children.add(RoleProcess("poison", "poison", options.folder))
        role.tell("results")
        found: list[dict[str, Any]] = role.hear(POISONS_WITHIN_S)["rows"]
    return found


def _beside_training(options: Options, attacks: list[Attack], *, has_keys: bool) -> Iterator[Row]:
    """One after the other, on one broker with two training workers."""
    folder = _empty(options.folder / ("keys" if has_keys else "open"))
    with Stage(folder, has_keys=has_keys) as stage, stage.watched() as seen:
        stage.await_rounds(time.monotonic() + STALLS_S, TRAINS_WITHIN_S)
        first_base = machine.resident(stage.broker.pid)
        for attack in attacks:
            row = _measured(stage, seen, attack, options, first_base)
            if row.broken() and not row.through:
                again = _measured(stage, seen, attack, options, first_base)
                row = twice(row, again)
            yield row


def twice(first: Row, again: Row) -> Row:
    """What counts of two measurements: others may have slowed the first one, but what it made stays."""
    return replace(
        again,
        again=True,
        first=first.plain(),
        rise_mib=max(first.rise_mib, again.rise_mib),
        written_kib=max(first.written_kib, again.written_kib),
    )


def _measured(
    stage: Stage, seen: watch.Watch, attack: Attack, options: Options, first_base: float
) -> Row:
    seen.await_calm(CALM_WITHIN_S)
    calm_began, written_before = time.monotonic(), stage.written()
    time.sleep(options.calm_s)
    calm_ended = time.monotonic()
    stage.await_rounds(calm_ended, ROUND_WITHIN_S)
    written = stage.written()
    base = max(watch.within(seen.memory, calm_ended - 0.5, calm_ended), default=0.0)
    did, row = _attacked(stage, seen, attack, options, base)
    ended = time.monotonic()
    stage.await_rounds(ended, ROUND_WITHIN_S)
    stage.check()
    through = [*row.through, *watch.forged(stage.broker.log, stage.history, MARK)]
    if "Traceback" in stage.broker.log.read_text(errors="replace"):
        through.append(f"a traceback in {stage.broker.log}")
    rounds = stage.rounds()
    calm, whole = watch.pace(rounds, calm_began, calm_ended), watch.pace(rounds, calm_ended, ended)
    usual = (written - written_before) / (calm_ended - calm_began) / max(calm, 0.1)
    beyond = stage.written() - written - usual * whole * (ended - calm_ended)
    return replace(
        row,
        through=through,
        calm=calm,
        beside=watch.pace_beside(rounds, did.began_at, did.ended_at, ended),
        kept_mib=row.after_mib + (base - first_base) / MIB,
        written_kib=max(0.0, beyond) / 1024,
    )


def _attacked(
    stage: Stage,
    seen: watch.Watch,
    attack: Attack,
    options: Options,
    base: float,
) -> tuple[Tally, Row]:
    """An attack, and what it cost the broker, whose memory had `base` bytes before."""
    did = stage.send(attack, options)
    time.sleep(options.settles_s)
    ended = time.monotonic()
    beside = watch.within(seen.memory, did.began_at, ended) or [base]
    answer, echo = seen.longest_ms(did.began_at, ended)
    return did, Row(
        attack.name,
        name_of(attack, has_keys=stage.keys_folder is not None),
        {name: getattr(did, name) for name in _COUNTED},
        [*did.through, *seen.unanswered(did.began_at, ended)],
        rise_mib=(max(beside) - base) / MIB,
        after_mib=(beside[-1] - base) / MIB,
        kept_mib=(beside[-1] - base) / MIB,
        answer_ms=answer,
        echo_ms=echo,
        seconds=did.ended_at - did.began_at,
        attacker_cpu=did.cpu,
    )


_COUNTED = ("messages", "connections", "bytes", "ended", "refused")


def _on_empty(options: Options, attacks: list[Attack], *, has_keys: bool) -> Iterator[Row]:
    """Each on a broker that has no model yet; workers must be able to bring one afterwards."""
    for attack in attacks:
        folder = _empty(options.folder / ("empty-keys" if has_keys else "empty-open"))
        with Stage(folder, has_keys=has_keys, trains=False) as stage, stage.watched() as seen:
            time.sleep(SETTLES_S)
            base = machine.resident(stage.broker.pid)
            # Longer than a worker whose connection has ended is waited for.
            longer = replace(options, settles_s=2 * SETTLES_S)
            _, row = _attacked(stage, seen, attack, longer, base)
            through = list(row.through)
            try:
                stage.train()
            except ChildFailed as error:
                through.append(f"nobody could train afterwards: {error}")
            if not stage.rounds():
                through.append(f"no round closed within {TRAINS_WITHIN_S:g} s afterwards")
            yield replace(row, through=through)


def _empty(folder: Path) -> Path:
    """This folder, without what an earlier drill has left in it."""
    if (folder / "broker.log").exists():
        shutil.rmtree(folder)
    return folder


def name_of(attack: Attack, *, has_keys: bool) -> str:
    """By whom it is, for the table."""
    if not has_keys:
        return NOBODY
    return attack.by or (f"key: {attack.with_key.role.value}" if attack.with_key else "no key")


def _line(row: Row) -> str:
    kept = "-" if row.kept is None else f"{row.kept:.2f} of {row.calm:.1f} rounds/s"
    answer = "-" if row.answer_ms is None else f"{row.answer_ms:.0f} ms"
    is_broken = "; BROKEN" if row.broken() else ""
    return (
        f"{row.attack}, {row.by}: {kept}, RSS {row.rise_mib:+.0f} MiB, answer {answer}{is_broken}"
    )
