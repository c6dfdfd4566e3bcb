"""What diloco-top prints of each kind of run: the stored text, line by line."""

from __future__ import annotations

from typing import Any

import pytest

from kit.feed_snapshots import LOST, status, worker
from kit.top_text import drawn, matches

BUFFERED = {"optimizer": "dn", "lr": 0.7, "momentum": 0.9, "variant": "paper", "buffer": 4}
# A name with control characters, and an event with markup, which is shown as text.
STRANGE = {
    "workers": [worker("a\x1b[2J\nb\u202e")],
    "events": [{"sequence": 1, "text": "left\r\x1b]0;x\x07 [red]now[/red]", "level": "error"}],
}
TOO_MANY = [worker(f"w{n}", health="lost") for n in range(9)]


DOCUMENTS: dict[str, dict[str, Any]] = {
    "healthy": status(),
    "some_lost": LOST,
    "bare": {"feed": 1, "sequence": 1, "epoch": "a0"},
    "names_of_strangers": status(**STRANGE),
    "many_in_trouble": status(workers=TOO_MANY),
    "asynchronous": status(
        mode="async",
        fragments=[{"fragment": 0, "version": 14, "gradients": 14, "buffered": 2}],
        outer=BUFFERED,
        reducer={"staged": True, "submissions": 2, "waiting": 1},
        last_round={"number": 13, "seconds": 1.0, "averaged": 1, "staleness": 3, "loss": 2.5},
    ),
    "fragments": status(
        fragments=[{"fragment": n, "version": 7 - n, "buffered": n} for n in range(3)],
        fragment_sync_delay=2,
        fragment_update_alpha=0.5,
        outer=BUFFERED,
    ),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_text_is_the_stored_one(name: str) -> None:
    matches(f"once_{name}.txt", drawn(DOCUMENTS[name]))
