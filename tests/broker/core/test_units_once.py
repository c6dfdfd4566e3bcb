"""Whatever happens to workers and broker, the parameters at the end contain each unit once an epoch."""

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from diloco_broker.storage.checkpoint_format import Checkpoint
from kit.core_harness import a_stage
from kit.unit_workers import NAME, UnitWorker, times_contained

SIZE, EPOCHS = 7, 2
ACTIONS = (
    *("takes", "trains", "begins", "completes", "blunders"),
    *("goes back", "goes away", "comes back", "dies", "joins", "the broker restarts"),
)
SCRIPTS = st.lists(
    st.tuples(st.sampled_from(ACTIONS), st.integers(0, 3), st.integers(1, 5)), max_size=60
)

# One comes back with a push in flight whose units another has been given.
AWAY = [
    *[("takes", 0, 3), ("trains", 0, 5), ("begins", 0, 1), ("goes away", 0, 1)],
    *[("takes", 1, 5), ("takes", 1, 5), ("trains", 1, 5), ("begins", 1, 1)],
    *[("completes", 1, 1), ("comes back", 0, 1)],
]

# One that was away when its push counted comes back to a broker that has lost that version and adopts it
# from another.
LOST = [
    *[("takes", 0, 2), ("takes", 1, 1), ("trains", 0, 5), ("trains", 1, 5)],
    *[("begins", 0, 1), ("completes", 0, 1), ("begins", 1, 1), ("completes", 1, 1)],
    *[("takes", 0, 3), ("takes", 1, 1), ("trains", 0, 5), ("trains", 1, 5)],
    *[("begins", 0, 1), ("completes", 0, 1), ("goes away", 0, 1), ("begins", 1, 1)],
    *[("completes", 1, 1), ("the broker restarts", 0, 2), ("takes", 0, 1)],
]
USUAL: dict[str, Any] = {"min_workers": 1, "save_dir": "run", "recover": "rewind"}


class Story:
    """A run of up to four workers, of which anything may happen to each."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.stage = a_stage(2, 2, **{**USUAL, **options})
        self.adopts = self.stage.config.recover != "rewind"
        first = UnitWorker(self.stage, "w0", SIZE, EPOCHS, pulls=False)
        self.living = [first, UnitWorker(self.stage, "w1", SIZE, EPOCHS)]
        first.pulls()
        self.incarnations = list(self.living)  # all that there ever were
        self._saved: list[Checkpoint] = []
        self._push_ids = 0

    def happens(self, action: str, which: int, count: int) -> None:
        worker = self.living[which % len(self.living)] if self.living else None
        match action:
            case "joins" if len(self.living) < 4:
                self._joins(f"w{which}")
            case "the broker restarts":
                self._restarts(back=count)
            case _ if worker is not None:
                self._does(worker, action, count)
        for each in self.living:
            if each.is_here:
                each.pulls()
                each.looks()

    def _joins(self, worker_id: str) -> None:
        if worker_id not in {each.worker_id for each in self.living}:
            self.living.append(UnitWorker(self.stage, worker_id, SIZE, EPOCHS))
            self.incarnations.append(self.living[-1])

    def _restarts(self, back: int) -> None:
        """The broker is killed; it goes on from one of its last checkpoints, its workers come back."""
        saved = self._saved = self._saved + self.stage.checkpoints
        self.stage = self.stage.restarted(saved[-min(back, len(saved))])
        for worker in self.living:
            worker.comes_to(self.stage, holds_versions=self.adopts)
        if self.adopts:
            self._gives_what_is_newer()

    def _gives_what_is_newer(self) -> None:
        """Workers seed what they are asked for, until the broker goes on; then all ask again."""
        given: set[tuple[str, int]] = set()
        for _ in range(100):
            for worker in self.living:
                for fragment in worker.puppet.asked_for:
                    if (worker.worker_id, fragment) not in given:
                        given.add((worker.worker_id, fragment))
                        worker.puppet.seeds(fragment)
            if self.stage.state.is_running:
                break
            self.stage.passes(1.0)
            self.stage.beats(*(each.worker_id for each in self.living))
        for worker in self.living:
            worker.is_back()

    def _does(self, worker: UnitWorker, action: str, count: int) -> None:
        if action == "comes back" and not worker.is_here:
            worker.comes_to(self.stage)
        if not worker.is_here:
            return
        match action:
            case "takes":
                worker.takes(count)
            case "trains":
                worker.trains(count)
            case "begins":
                self._push_ids += 1
                worker.begins_next(self._push_ids)
            case "completes":
                worker.completes()
            case "blunders":
                worker.blunders()
            case "goes back":
                worker.goes_back()
            case "goes away":
                worker.puppet.dies()
            case "dies" if not self.adopts:  # it would take along what the others' versions contain
                worker.puppet.dies()
                self.living.remove(worker)

    def ends(self) -> None:
        """From here on all goes well, until all is counted."""
        for worker in self.living:
            self._does(worker, "comes back", 0)
        for number in range(2):
            self._joins(f"last{number}")
        for _ in range(SIZE * EPOCHS):
            for action, count in (("takes", 4), ("trains", 9), ("begins", 0), ("completes", 0)):
                for which in range(len(self.living)):
                    self.happens(action, which, count)
            self.stage.passes(0.2)
            if self.stage.state.data.sets[NAME].is_over:
                return
        raise AssertionError("some units never count")


WAYS: list[dict[str, Any]] = [
    {},
    {"deterministic": True},
    {"quorum": 1, "late": "carry"},
    {"quorum": 1, "late": "drop"},
    {"mode": "async", "outer": "nesterov"},
    {"recover": "adopt"},
]


def of_each_kind() -> list[Any]:
    """Each way to make versions, of a whole model and of fragments; one of the two is nightly."""
    return [
        pytest.param(
            {**way, "num_fragments": pieces, "sync_every": 4},
            id=f"{way}, {pieces}",
            marks=() if (number + pieces) % 2 else pytest.mark.nightly,
        )
        for number, way in enumerate(WAYS)
        for pieces in (1, 2)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("options", of_each_kind())
@example(script=AWAY)
@example(script=LOST)
@settings(max_examples=15)
@given(script=SCRIPTS)
def test_each_unit_is_in_the_parameters_once_an_epoch(
    options: dict[str, Any], script: list[tuple[str, int, int]]
) -> None:
    story = Story(options)
    for action, which, count in script:
        story.happens(action, which, count)
    story.ends()
    assert times_contained(story.stage, story.incarnations) == dict.fromkeys(
        range(SIZE * EPOCHS), 1
    )
