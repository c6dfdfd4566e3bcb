"""What diloco-top prints of each kind of run: the stored text, line by line."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_tools.top.drawing.notation import UNEASY
from kit.feed_snapshots import LOST, status, worker
from kit.top_screen import document, full_screen
from kit.top_text import drawn, matches

SPLIT = status(fragments=[{"fragment": n, "version": 7 - n, "buffered": n} for n in range(3)])
BUFFERED = {"optimizer": "dn", "lr": 0.7, "momentum": 0.9, "variant": "paper", "buffer": 4}
PLAIN = {"staged": True, "aggregate": "mean", "weight_by": "equal", "grace_s": 0.0, "late": "carry"}
REFUSED = {"age_s": 72.0, "worker": "rtx", "code": "late", "text": "Too late."}
# A worker without a name that a terminal should show, and an event that is no markup.
STRANGE = {
    "workers": [worker("a\x1b[2J\nb\u202e")],
    "events": [{"sequence": 1, "text": "left\r\x1b]0;x\x07 [red]now[/red]", "level": "error"}],
}
TOO_MANY = [worker(f"w{n}", health="lost") for n in range(9)]


ON_DISK = {"folder": "/d", "round": 411, "age_s": 13.0, "error": None}
PUSHED = {"number": 13, "seconds": 1.0, "averaged": 1, "staleness": 3, "loss": 2.5}
WEIGHTED = {"deterministic": True, "aggregate": "clip-median-norm", "weight_by": "tokens"}
DOCUMENTS: dict[str, dict[str, Any]] = {
    "healthy": status(),
    "some_lost": LOST,
    "bare": {"feed": 1, "sequence": 1, "epoch": "a0"},
    "no_round_yet": status(round={"number": 0, "expected": [], "floor": 2}),
    "first_round": status(round={"number": 0, "expected": ["a"]}),
    "names_of_strangers": status(**STRANGE),
    "many_in_trouble": status(workers=TOO_MANY),
    "paused": status(state="paused", paused_for_s=7.0, workers=[worker("a")]),
    "no_save_folder": status(checkpoint=None),
    "disk_full": status(checkpoint={"round": 4, "error": "No space left on device"}),
    "saved_and_refused": status(
        checkpoint=ON_DISK,
        rejections=[REFUSED],
        totals={"rejected": 3, "refused": {"late": 2, "non_finite": 1}},
    ),
    "asynchronous": status(
        mode="async",
        fragments=[{"fragment": 0, "version": 14, "gradients": 14, "buffered": 2}],
        outer=BUFFERED,
        reducer=PLAIN | {"submissions": 2, "waiting": 1},
        last_round=PUSHED,
    ),
    "fragments": SPLIT
    | {"fragment_sync_delay": 2, "fragment_update_alpha": 0.5, "outer": BUFFERED},
    "fragments_rebase": SPLIT | {"fragment_merge": "rebase"},
    "fragments_merged_when_here": SPLIT
    | {
        "fragment_delay_auto": True,
        "fragment_max_delay": 71,
        "workers": [{"id": "a", "merge_delay": 15}, {"id": "b", "merge_delay": 2}, {"id": "c"}],
    },
    "fragments_not_merged_yet": SPLIT | {"fragment_delay_auto": True, "workers": [{"id": "a"}]},
    "plain_mean": status(reducer=PLAIN),
    "quorum": status(reducer=PLAIN | {"quorum": 3, "grace_s": 5.0, "late": "drop"}),
    # A buffer of one is none.
    "weighted": status(outer=BUFFERED | {"buffer": 1}, reducer=PLAIN | WEIGHTED),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_text_is_the_stored_one(name: str) -> None:
    matches(f"once_{name}.txt", drawn(DOCUMENTS[name]))


def test_norm_of_a_worker_that_stands_out_is_marked() -> None:
    workers = [worker("a"), worker("b", delta_norm=75.0, times_usual=60.0)]
    lines = full_screen(document(1, workers=workers), 160, 40).lines
    (line,) = [line for line in lines if " 75.000" in line.plain]
    (usual,) = [line for line in lines if " 1.250" in line.plain]
    assert any(span.style == UNEASY for span in line.spans)
    assert not any(span.style == UNEASY for span in usual.spans)
