"""The processes of a worker resume from their own states, if all given states belong together."""

from typing import Any

import pytest

from diloco_protocol import Kind, Manifest, TensorEntry, lay_out
from diloco_protocol.errors import UsageError
from diloco_worker.model.spread.saved_share import part_of, shared_out

LAYOUT = lay_out(Manifest((TensorEntry("w", (8,), "float32", Kind.TRAINABLE),)), chunk_elements=2)
OWNERS = {2: [[0, 0, 1, 1], []], 3: [[0, 1, 2, 2], []]}


def saved(rank: int, count: int, counter: int = 5) -> dict[str, Any]:
    plain = {"fragments": [{"version": ["run", counter, 1], "flight": None}], "checksums": {}}
    return shared_out(plain, rank, count, OWNERS[count])


def goes_on(states: list[dict[str, Any]], rank: int) -> dict[str, Any]:
    return part_of(states, LAYOUT, rank, 2, OWNERS[2])


def test_process_takes_its_own_among_those_of_all_in_any_order() -> None:
    states = [saved(1, 2), saved(0, 2)]
    assert goes_on(states, 0) is states[1]
    assert goes_on(states, 1) is states[0]
    assert goes_on([states[0]], 1) is states[0], "its own state suffices"


@pytest.mark.parametrize(
    ("others", "words"),
    [
        # What an earlier group has left would be counted twice.
        ([saved(1, 2), saved(2, 3, counter=3)], "of different moments"),
        ([saved(1, 2), saved(2, 3)], "of different moments"),
        ([saved(1, 2), saved(1, 2)], "of different moments"),
        ([saved(1, 2, counter=6)], "of different moments"),
        ([saved(0, 2)], "process 1"),
    ],
)
def test_states_that_do_not_belong_together_are_refused(
    others: list[dict[str, Any]], words: str
) -> None:
    for rank in (0, 1):
        with pytest.raises(UsageError, match=words):
            goes_on([saved(0, 2), *others], rank)
