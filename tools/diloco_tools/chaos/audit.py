"""Was every pseudo-gradient counted exactly once? Found out from the logs of both sides.

    python -m diloco_tools.chaos.audit FOLDER

This module shares nothing with what it checks: it imports no broker, worker or protocol, only reads JSON
lines. The broker's log says of each version what it was made from (`after`) and which pushes went into
it; each life of a worker has a log of the pushes that it froze, saw counted, or dropped.

The *lineage* of a final version is walked back through `after` to the version that came after nothing.
A broker that crashed may have written down versions that nobody received, and made others in their
place: they are on no lineage, and what they counted was not counted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BROKER_LOG = "broker.audit.jsonl"
WORKER_LOGS = "*.worker.jsonl"  # NAME.LIFE.worker.jsonl
FINAL = "final.json"  # {"versions": [[run, counter, tag], ...]}, one for each fragment

Version = tuple[str, int, str]
Push = tuple[str, str]  # worker, push id


@dataclass(frozen=True)
class Contribution:
    """A push, or a part of one, in a version. `chunks` is None when all of it went in."""

    worker: str
    push_id: str
    steps: int
    chunks: frozenset[int] | None
    version: Version

    @property
    def push(self) -> Push:
        return (self.worker, self.push_id)


@dataclass(frozen=True)
class Release:
    """A version, what it was made from, and what went into it."""

    version: Version
    after: Version | None
    fragment: int
    round: int
    epoch: str  # the broker's life that wrote it down
    contributions: tuple[Contribution, ...]


@dataclass(frozen=True)
class Frozen:
    """A pseudo-gradient as its worker froze it: `steps` inner steps, behind its step `step`."""

    fragment: int
    steps: int
    step: int


@dataclass
class WorkerLog:
    """What one process of a worker has written down."""

    worker: str
    number: int
    frozen: dict[str, Frozen] = field(default_factory=dict)
    counted: dict[str, Version] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)  # push id: why
    has_left: bool = False  # it ended politely

    @property
    def name(self) -> str:
        return f"{self.worker}.{self.number}"


@dataclass
class Findings:
    """What an audit has found, in sentences. The first six are broken promises."""

    # A lineage or a log that cannot be followed.
    broken: list[str] = field(default_factory=list)
    # A chunk of a push is twice in a lineage.
    doubled: list[str] = field(default_factory=list)
    # A surviving worker saw a push counted that is in no lineage.
    lost: list[str] = field(default_factory=list)
    # A surviving worker froze a push that is neither counted nor dropped, and went on.
    uncounted: list[str] = field(default_factory=list)
    # A lineage has a push that no worker froze.
    strangers: list[str] = field(default_factory=list)
    # A push has other steps in a version than its worker gave it, or was dropped by it.
    differing: list[str] = field(default_factory=list)
    # Pushes of surviving workers that ended for a stated reason.
    dropped: list[str] = field(default_factory=list)
    # Pushes that were under way when their surviving worker left.
    in_flight: list[str] = field(default_factory=list)
    # Pushes that a killed process saw counted, in a version that was lost with the broker.
    forgotten: list[str] = field(default_factory=list)
    # The releases of all lineages, in order of their rounds.
    lineage: list[Release] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        """A sentence for each broken promise."""
        counts = [*self.doubled, *self.lost, *self.uncounted]
        return [*self.broken, *counts, *self.strangers, *self.differing]

    @property
    def remarks(self) -> list[str]:
        """What happened to pushes that are in no final version for a reason."""
        return [*self.dropped, *self.in_flight, *self.forgotten]


def read_lines(text: str) -> list[dict[str, Any]]:
    """The records of a log; a last line that a kill has torn is left out."""
    *whole, last = text.split("\n")
    found = [json.loads(line) for line in whole if line.strip()]
    try:
        return [*found, json.loads(last)]
    except ValueError:
        return found


def release_of(record: Mapping[str, Any]) -> Release:
    """A line of the broker's log."""
    version = _version(record["version"])
    return Release(
        version,
        None if record["after"] is None else _version(record["after"]),
        record["fragment"],
        record["round"],
        record["epoch"],
        tuple(
            Contribution(
                push["worker"],
                push["push_id"],
                push["steps"],
                None if push["chunks"] == "all" else chunks_of(push["chunks"]),
                version,
            )
            for push in record["pushes"]
        ),
    )


def _version(value: Sequence[Any]) -> Version:
    run, counter, tag = value
    return (str(run), int(counter), str(tag))


def chunks_of(bitmap: str) -> frozenset[int]:
    """The chunks in a bitmap given in hexadecimal digits: chunk i is bit i mod 8 of byte i div 8."""
    return frozenset(
        8 * place + bit
        for place, byte in enumerate(bytes.fromhex(bitmap))
        for bit in range(8)
        if byte >> bit & 1
    )


def log_of(worker: str, number: int, records: Iterable[Mapping[str, Any]]) -> WorkerLog:
    """What these records of one process of a worker say."""
    log = WorkerLog(worker, number)
    for record in records:
        match record["event"]:
            case "frozen":
                frozen = Frozen(record["fragment"], record["steps"], record["step"])
                log.frozen[record["push_id"]] = frozen
            case "counted":
                log.counted[record["push_id"]] = _version(record["version"])
            case "dropped":
                log.dropped[record["push_id"]] = record["why"]
            case "left":
                log.has_left = True
    return log


def lineage_of(releases: Iterable[Release], head: Version) -> list[Release]:
    """The releases that led to this version, the oldest first.

    Raises:
        ValueError: the log lacks one of them, or goes in a circle.
    """
    by_version = {release.version: release for release in releases}
    found: list[Release] = []
    at: Version | None = head
    while at is not None:
        release = by_version.pop(at, None)
        if release is None:
            seen = any(r.version == at for r in found)
            why = "comes after itself" if seen else "is not in the broker's log"
            raise ValueError(f"Version {told(at)}, which led to {told(head)}, {why}.")
        found.append(release)
        at = release.after
    return found[::-1]


def told(version: Version) -> str:
    """A version for people."""
    return f"{version[1]}#{version[2]}"


def audit(
    releases: Sequence[Release], heads: Iterable[Version], logs: Sequence[WorkerLog]
) -> Findings:
    """Compare the lineages of these final versions, one of each fragment, with the workers' logs."""
    findings = Findings()
    first: dict[Version, Release] = {}
    findings.broken += [
        f"Version {told(release.version)} is twice in the broker's log."
        for release in releases
        if first.setdefault(release.version, release) != release
    ]
    for head in heads:
        try:
            findings.lineage += lineage_of(releases, head)
        except ValueError as error:
            findings.broken.append(str(error))
    findings.lineage.sort(key=lambda release: (release.round, release.fragment))
    entered = contributions(findings.lineage)
    known = {(log.worker, push_id): f for log in logs for push_id, f in log.frozen.items()}
    for push, parts in entered.items():
        findings.doubled += _doubled(push, parts)
        if push not in known:
            findings.strangers.append(
                f"{parts[0].worker} never froze push {parts[0].push_id}, which is in version "
                f"{told(parts[0].version)}."
            )
        elif any(part.steps != known[push].steps for part in parts):
            findings.differing.append(
                f"Push {parts[0].push_id} of {parts[0].worker} has {known[push].steps} steps, in "
                f"version {told(parts[0].version)} it has {parts[0].steps}."
            )
    for log in logs:
        _compare(log, entered, findings)
    return findings


def contributions(lineage: Iterable[Release]) -> dict[Push, list[Contribution]]:
    """What went into these versions, by push."""
    entered: dict[Push, list[Contribution]] = {}
    for release in lineage:
        for contribution in release.contributions:
            entered.setdefault(contribution.push, []).append(contribution)
    return entered


def _doubled(push: Push, parts: Sequence[Contribution]) -> list[str]:
    found = []
    parts = [part for part in parts if part.chunks is None or part.chunks]  # something went in
    for number, part in enumerate(parts):
        for earlier in parts[:number]:
            if part.chunks is None or earlier.chunks is None:
                which = "chunks"
            elif part.chunks & earlier.chunks:
                which = f"chunks {sorted(part.chunks & earlier.chunks)}"
            else:
                continue
            found.append(
                f"Push {push[1]} of {push[0]} has {which} in version {told(earlier.version)} and "
                f"again in {told(part.version)}."
            )
    return found


def _compare(
    log: WorkerLog, entered: Mapping[Push, Sequence[Contribution]], findings: Findings
) -> None:
    """One process of a worker against what went into the final versions."""
    for push_id, version in log.counted.items():
        if (log.worker, push_id) not in entered:
            sentence = (
                f"{log.name} saw push {push_id} counted in version {told(version)}, and no final "
                "version contains it."
            )
            (findings.lost if log.has_left else findings.forgotten).append(sentence)
    if not log.has_left:
        return
    last = {frozen.fragment: push_id for push_id, frozen in log.frozen.items()}
    for push_id, frozen in log.frozen.items():
        what = f"push {push_id} of {frozen.steps} steps"
        parts = entered.get((log.worker, push_id), ())
        if push_id in log.dropped:
            findings.dropped.append(f"{log.name} dropped {what}: {log.dropped[push_id]}")
            findings.differing += [
                f"{log.name} dropped {what}, and version {told(part.version)} contains it."
                for part in parts
            ]
        elif push_id in log.counted or any(part.chunks is None for part in parts):
            continue
        elif last[frozen.fragment] == push_id:
            findings.in_flight.append(f"{log.name} left with {what} in flight.")
        else:
            findings.uncounted.append(f"{log.name} froze {what}, which was never counted.")


def read_folder(folder: Path) -> tuple[list[Release], list[Version], list[WorkerLog]]:
    """The logs of a drill: the broker's releases, the final versions, and the workers' logs."""
    releases = [release_of(each) for each in read_lines((folder / BROKER_LOG).read_text())]
    heads = [_version(v) for v in json.loads((folder / FINAL).read_text())["versions"]]
    logs = []
    for path in sorted(folder.glob(WORKER_LOGS)):
        worker, number, *_ = path.name.rsplit(".", 3)
        logs.append(log_of(worker, int(number), read_lines(path.read_text())))
    return releases, heads, logs


def main(arguments: Sequence[str]) -> int:
    """Audit a folder and say what was found. Returns the exit code: 1 for a broken promise."""
    if len(arguments) != 1 or not (Path(arguments[0]) / BROKER_LOG).exists():
        print(f"usage: python -m diloco_tools.chaos.audit FOLDER, which holds {BROKER_LOG}")
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
