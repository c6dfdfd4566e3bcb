"""Runs of the core whose broker is killed and started again, and what workers hold of them."""

from typing import Any

from diloco_protocol.bitmap import Bitmap
from diloco_protocol.version import Ledger, VersionId
from kit.core_harness import RUN, Held, Holdings, Puppet, Stage, a_run
from kit.noted_tensors import Wire

MODES: dict[str, dict[str, Any]] = {
    "streaming": {},
    "staged": {"deterministic": True},
    "async": {"mode": "async"},
}


def a_saved_run(*worker_ids: str, rounds: int = 0, pieces: int = 1, **options: Any) -> Stage:
    """A run that saves, in which each of these workers has pushed once in each of `rounds` rounds."""
    if pieces > 1:
        options |= {"num_fragments": pieces, "sync_every": 12}
    return a_run(*worker_ids, rounds=rounds, **{"save_dir": "run", **options})[0]


def next_incarnation(
    crashed: Stage, *worker_ids: str, **options: Any
) -> tuple[Stage, list[Puppet]]:
    """The broker started again, and these workers with the versions that the run has reached."""
    stage = crashed.restarted(**options)
    return stage, [stage.worker(name).comes_with(crashed.holdings()) for name in worker_ids]


def ahead(held: Holdings, **steps: int) -> Holdings:
    """The same with some fragments newer; `f1=2`: fragment 1 by two versions."""
    newer = list(held)
    for name, by in steps.items():
        fragment = int(name[1:])
        old = held[fragment]
        assert old is not None
        counter = old.version.counter + by
        ledger = old.ledger.with_push("lost", 900 + counter, Bitmap.full(len(old.wires)))
        version = VersionId(old.version.run, counter, 5_000 + counter)
        wires = tuple(Wire((*wire.contents, ("lost", 900 + counter))) for wire in old.wires)
        newer[fragment] = Held(version, ledger, wires)
    return tuple(newer)


def first(held: Holdings) -> Held:
    """What is held of fragment 0, which must be something."""
    assert held[0] is not None
    return held[0]


def holding(*counters: int, run: str = RUN, chunks: int = 2) -> Holdings:
    """Fragments at these versions, of a run without a checkpoint."""
    return (
        *(
            Held(
                VersionId(run, counter, 5_000 + counter),
                Ledger(),
                tuple(Wire((("lost", counter),)) for _ in range(chunks)),
            )
            for counter in counters
        ),
        None,
    )


def assert_masters_are_what_is_handed_out(stage: Stage) -> None:
    for fragment, versions in enumerate(stage.state.versions.fragments):
        assert tuple(stage.tensors.wires(fragment)) == versions.wires, f"fragment {fragment}"
