"""What diloco-top shows of asynchronous runs, fragments and reducers."""

from __future__ import annotations

from typing import Any

from kit.feed_snapshots import status
from kit.top_text import drawn

REDUCER = {
    "staged": True,
    "aggregate": "mean",
    "deterministic": False,
    "weight_by": "equal",
    "quorum": None,
    "grace_s": 0.0,
    "late": "carry",
    "submissions": 0,
    "waiting": 0,
}


def row(document: dict[str, Any], label: str) -> str:
    """The line that begins with this label; empty when there is none."""
    lines = [line.strip() for line in drawn(document).splitlines()]
    return next((line for line in lines if line.startswith(label)), "")


def test_asynchronous_run_shows_pushes_instead_of_a_round() -> None:
    document = status(
        mode="async",
        fragments=[{"fragment": 0, "version": 14, "tag": "ab", "gradients": 14, "buffered": 2}],
        outer={"optimizer": "dn", "lr": 0.7, "momentum": 0.9, "variant": "paper", "buffer": 4},
        reducer={**REDUCER, "submissions": 2, "waiting": 1},
        last_round={"number": 13, "seconds": 1.0, "averaged": 1, "staleness": 3, "loss": 2.5},
    )
    assert "14 pushes" in row(document, "applied")
    assert "2 under way" in row(document, "applied")
    assert "1 waiting for a slot" in row(document, "applied")
    assert not row(document, "round")
    assert "push 14" in row(document, "last")
    assert "3 versions old" in row(document, "last")
    assert "dn paper" in row(document, "outer")
    assert "buffer 2/4" in row(document, "outer")


def test_fragments_show_their_versions_delay_and_merge() -> None:
    parts = [{"fragment": n, "version": 7 - n, "tag": "ab", "buffered": n} for n in range(3)]
    document = status(
        fragments=parts,
        fragment_sync_delay=2,
        fragment_update_alpha=0.5,
        outer={"optimizer": "dn", "lr": 0.7, "buffer": 4, "variant": "paper"},
    )
    assert "3" in row(document, "fragments")
    assert "merged after 2 steps" in row(document, "fragments")
    assert "alpha 0.5" in row(document, "fragments")
    assert "buffer 0/4 1/4 2/4" in row(document, "outer")
    assert "versions 7 6 5" in row(document, "model")
    rebased = status(fragments=parts, fragment_merge="rebase")
    assert "rebase" in row(rebased, "fragments")


def test_fragments_that_are_merged_when_they_are_here_show_how_late_that_is() -> None:
    overlapping: dict[str, Any] = {
        "fragments": [{"fragment": n, "version": 7 - n, "tag": "ab"} for n in range(3)],
        "fragment_delay_auto": True,
        "fragment_max_delay": 71,
    }
    document = status(**overlapping, workers=[{"id": "a", "merge_delay": None}])
    assert "merged when here  at most 71  alpha 0" in row(document, "fragments")
    workers = [{"id": "a", "merge_delay": 15}, {"id": "b", "merge_delay": 2}, {"id": "c"}]
    document = status(**overlapping, workers=workers)
    assert "merged when here, after 2 to 15 steps" in row(document, "fragments")


def test_reducing_is_named_only_where_it_differs_from_a_plain_mean() -> None:
    assert not row(status(), "reducing")
    assert not row(status(reducer=REDUCER), "reducing")
    document = status(reducer={**REDUCER, "quorum": 3, "grace_s": 5.0, "late": "drop"})
    assert "quorum 3, 5 s grace, late work: drop" in row(document, "reducing")
    document = status(
        reducer={
            **REDUCER,
            "deterministic": True,
            "aggregate": "clip-median-norm",
            "weight_by": "tokens",
        }
    )
    line = row(document, "reducing")
    assert "clip-median-norm" in line
    assert "deterministic" in line
    assert "weights by tokens" in line


def test_buffer_of_one_gradient_is_not_worth_a_word() -> None:
    document = status(outer={"optimizer": "dn", "lr": 0.7, "buffer": 1, "variant": "paper"})
    assert "buffer" not in row(document, "outer")
