"""Checks from the logs of both sides that every pseudo-gradient was counted exactly once.

    python -m diloco_lab.chaos.audit FOLDER

This module shares nothing with the checked code: it imports no broker, worker or protocol, and reads
JSON lines. The broker's log names for each version its predecessor (`after`) and the pushes in it; each
incarnation of a worker has a log of the pushes that it froze, saw counted, or dropped.

The *lineage* of a final version is followed back through `after` to the first version. A crashed broker
may have logged versions that no worker received, and replaced them later: these are on no lineage, and
their pushes are not counted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

BROKER_LOG = "broker.audit.jsonl"
WORKER_LOGS = "*.worker.jsonl"  # NAME.LIFE.worker.jsonl
FINAL = "final.json"  # {"versions": [[run, counter, tag], ...]}, one for each fragment

Record = Mapping[str, Any]  # a line of a log
Version = tuple[str, int, str]
Push = tuple[str, str]  # worker, push id


@dataclass(frozen=True)
class Contribution:
    """A push, or a part of one, in a version. `chunks` is None if it is whole."""

    worker: str
    push_id: str
    steps: int
    chunks: frozenset[int] | None
    version: Version


@dataclass
class WorkerLog:
    """The log of one process of a worker, by push."""

    worker: str
    number: int
    frozen: dict[str, Record] = field(default_factory=dict)
    counted: dict[str, Version] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)  # why
    has_left: bool = False  # in order

    @property
    def name(self) -> str:
        return f"{self.worker}.{self.number}"


@dataclass
class Findings:
    """The findings of an audit, in sentences."""

    # Broken promises.
    broken: list[str] = field(default_factory=list)  # a lineage or a log cannot be followed
    doubled: list[str] = field(default_factory=list)  # a chunk of a push is twice in a lineage
    lost: list[str] = field(default_factory=list)  # counted as a survivor saw, but in no lineage
    uncounted: list[str] = field(default_factory=list)  # frozen by a survivor, which then continued
    strangers: list[str] = field(default_factory=list)  # in a lineage, and no worker froze it
    differing: list[str] = field(default_factory=list)  # other steps, or dropped by its worker
    # In no final version, for a reason.
    dropped: list[str] = field(default_factory=list)  # by survivors, with a reason
    in_flight: list[str] = field(default_factory=list)  # being sent when its survivor left
    forgotten: list[str] = field(default_factory=list)  # of the killed, in a version that was lost
    # The releases of all lineages, in order of their rounds.
    lineage: list[Record] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        """A sentence for each broken promise."""
        counts = [*self.doubled, *self.lost, *self.uncounted]
        return [*self.broken, *counts, *self.strangers, *self.differing]

    @property
    def remarks(self) -> list[str]:
        """A sentence for each push that is in no final version for a reason."""
        return [*self.dropped, *self.in_flight, *self.forgotten]


def read_lines(text: str) -> list[dict[str, Any]]:
    """The records of a log, without a last line that was cut off by a kill."""
    *whole, last = text.split("\n")
    found = [json.loads(line) for line in whole if line.strip()]
    try:
        return [*found, json.loads(last)]
    except ValueError:
        return found


def version_of(plain: Sequence[Any]) -> Version:
    """The version in a record."""
    run, counter, tag = plain
    return (str(run), int(counter), str(tag))


def told(version: Version) -> str:
    """A version for people."""
    return f"{version[1]}#{version[2]}"


def chunks_of(bitmap: str) -> frozenset[int] | None:
    """The chunks in a bitmap given in hexadecimal digits: chunk i is bit i mod 8 of byte i div 8."""
    if bitmap == "all":
        return None
    data = bytes.fromhex(bitmap)
    return frozenset(i for i in range(8 * len(data)) if data[i // 8] >> i % 8 & 1)


def log_of(worker: str, number: int, records: Iterable[Record]) -> WorkerLog:
    """The log of one process of a worker from its records."""
    log = WorkerLog(worker, number)
    for record in records:
        match record["event"]:
            case "frozen":
                log.frozen[record["push_id"]] = record
            case "counted":
                log.counted[record["push_id"]] = version_of(record["version"])
            case "dropped":
                log.dropped[record["push_id"]] = record["why"]
            case "left":
                log.has_left = True
    return log


def lineage_of(releases: Iterable[Record], head: Version) -> list[Record]:
    """The releases of a version's lineage, the oldest first.

    Raises:
        ValueError: the log lacks one of them, or goes in a circle.
    """
    by_version = {version_of(each["version"]): each for each in releases}
    found: list[Record] = []
    at: Version | None = head
    while at is not None:
        release = by_version.pop(at, None)
        if release is None:
            seen = any(version_of(r["version"]) == at for r in found)
            why = "comes after itself" if seen else "is not in the broker's log"
            raise ValueError(f"Version {told(at)}, which led to {told(head)}, {why}.")
        found.append(release)
        at = None if release["after"] is None else version_of(release["after"])
    return found[::-1]


def contributions(lineage: Iterable[Record]) -> dict[Push, list[Contribution]]:
    """The contributions to these versions, by push."""
    entered: dict[Push, list[Contribution]] = {}
    for release in lineage:
        version = version_of(release["version"])
        for push in release["pushes"]:
            key, chunks = (push["worker"], push["push_id"]), chunks_of(push["chunks"])
            part = Contribution(*key, push["steps"], chunks, version)
            entered.setdefault(key, []).append(part)
    return entered


def audit(
    releases: Sequence[Record],
    heads: Iterable[Version],
    logs: Sequence[WorkerLog],
) -> Findings:
    """Compare the lineages of these final versions, one of each fragment, with the workers' logs."""
    findings = Findings()
    first: dict[Version, Record] = {}
    findings.broken += [
        f"Version {told(version)} is twice in the broker's log."
        for version, release in ((version_of(each["version"]), each) for each in releases)
        if first.setdefault(version, release) != release
    ]
    for head in heads:
        try:
            findings.lineage += lineage_of(releases, head)
        except ValueError as error:
            findings.broken.append(str(error))
    findings.lineage.sort(key=lambda release: (release["round"], release["fragment"]))
    entered = contributions(findings.lineage)
    known = {(log.worker, push_id): f for log in logs for push_id, f in log.frozen.items()}
    for push, parts in entered.items():
        _check_versions(parts, known.get(push), findings)
    for log in logs:
        _check_log(log, entered, findings)
    return findings


def _check_versions(
    parts: Sequence[Contribution], frozen: Record | None, findings: Findings
) -> None:
    """Compare a push in the final versions with the one that its worker froze."""
    first = parts[0]
    with_chunks = [part for part in parts if part.chunks is None or part.chunks]
    for earlier, part in combinations(with_chunks, 2):
        which = "chunks"
        if part.chunks is not None and earlier.chunks is not None:
            if not part.chunks & earlier.chunks:
                continue
            which = f"chunks {sorted(part.chunks & earlier.chunks)}"
        findings.doubled.append(
            f"Push {first.push_id} of {first.worker} has {which} in version "
            f"{told(earlier.version)} and again in {told(part.version)}."
        )
    if frozen is None:
        findings.strangers.append(
            f"{first.worker} never froze push {first.push_id}, which is in version "
            f"{told(first.version)}."
        )
    elif any(part.steps != frozen["steps"] for part in parts):
        findings.differing.append(
            f"Push {first.push_id} of {first.worker} has {frozen['steps']} steps, in "
            f"version {told(first.version)} it has {first.steps}."
        )


def _check_log(
    log: WorkerLog, entered: Mapping[Push, Sequence[Contribution]], findings: Findings
) -> None:
    """Compare the log of one process of a worker with the final versions."""
    for push_id, version in log.counted.items():
        if (log.worker, push_id) not in entered:
            sentence = (
                f"{log.name} saw push {push_id} counted in version {told(version)}, and no final "
                "version contains it."
            )
            (findings.lost if log.has_left else findings.forgotten).append(sentence)
    if not log.has_left:
        return
    last = {frozen["fragment"]: push_id for push_id, frozen in log.frozen.items()}
    for push_id, frozen in log.frozen.items():
        what = f"push {push_id} of {frozen['steps']} steps"
        parts = entered.get((log.worker, push_id), ())
        if push_id in log.dropped:
            findings.dropped.append(f"{log.name} dropped {what}: {log.dropped[push_id]}")
            findings.differing += [
                f"{log.name} dropped {what}, and version {told(part.version)} contains it."
                for part in parts
            ]
        elif push_id in log.counted or any(part.chunks is None for part in parts):
            continue
        elif last[frozen["fragment"]] == push_id:
            findings.in_flight.append(f"{log.name} left with {what} in flight.")
        else:
            findings.uncounted.append(f"{log.name} froze {what}, which was never counted.")


def read_folder(folder: Path) -> tuple[list[dict[str, Any]], list[Version], list[WorkerLog]]:
    """The logs of a drill: the broker's releases, the final versions, and the workers' logs."""
    releases = read_lines((folder / BROKER_LOG).read_text())
    final = json.loads((folder / FINAL).read_text())["versions"]
    logs = []
    for path in sorted(folder.glob(WORKER_LOGS)):
        worker, number, *_ = path.name.rsplit(".", 3)
        logs.append(log_of(worker, int(number), read_lines(path.read_text())))
    return releases, [version_of(each) for each in final], logs


def main(arguments: Sequence[str]) -> int:
    """Audit a folder and print the findings. Returns the exit code: 1 for a broken promise."""
    if len(arguments) != 1 or not (Path(arguments[0]) / BROKER_LOG).exists():
        print(f"usage: python -m diloco_lab.chaos.audit FOLDER, which contains {BROKER_LOG}")
        return 2
    findings = audit(*read_folder(Path(arguments[0])))
    pushes = contributions(findings.lineage)
    print(f"{len(findings.lineage)} versions contain {len(pushes)} pushes.")
    for sentence in findings.remarks:
        print(f"note: {sentence}")
    for sentence in findings.problems:
        print(f"BROKEN: {sentence}")
    return 1 if findings.problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
