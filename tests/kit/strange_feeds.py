"""Snapshots with whatever an unauthenticated peer may put into them, drawn by Hypothesis."""

from typing import Any

from hypothesis import strategies as st

from kit.feed_snapshots import status, worker

NAMES = st.text(max_size=40)
AGES = st.floats() | st.floats(0, 1e6)
COUNTERS = st.integers(-5, (1 << 63) - 1)

WORKERS = st.builds(
    worker,
    name=NAMES,
    state=NAMES,
    host=NAMES,
    health=st.sampled_from(["ok", "slow", "lost"]) | NAMES,
    loss=AGES | st.none(),
    steps_per_s=AGES,
    beat_age_s=AGES,
    sync_age_s=AGES | st.none(),
    inner_step=COUNTERS,
    sync_every=COUNTERS,
    bytes_up=COUNTERS,
    staleness=COUNTERS,
)
LAST_ROUND: st.SearchStrategy[dict[str, Any]] = st.builds(
    dict, number=COUNTERS, seconds=AGES, loss=AGES, delta_norm=AGES
)
CHECKPOINT: st.SearchStrategy[dict[str, Any]] = st.builds(
    dict, folder=NAMES, round=COUNTERS | st.none(), age_s=AGES, error=NAMES
)


def strange_feeds() -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(
        status,
        workers=st.lists(WORKERS, max_size=4),
        run=NAMES,
        mode=st.sampled_from(["sync", "async"]) | NAMES,
        uptime_s=AGES,
        waiting_for=NAMES | st.none(),
        state=st.sampled_from(["waiting", "training", "paused"]),
        paused_for_s=AGES | st.none(),
        events=st.lists(st.builds(dict, text=NAMES, level=NAMES, age_s=AGES)),
        round=st.builds(dict, number=COUNTERS, missing=st.lists(NAMES), age_s=AGES),
        counts=st.builds(dict, alive=COUNTERS),
        totals=st.builds(dict, refused=st.dictionaries(NAMES, COUNTERS | NAMES)),
        rejections=st.lists(st.builds(dict, worker=NAMES, text=NAMES, age_s=AGES)),
        checkpoint=CHECKPOINT,
        last_round=LAST_ROUND,
        fragments=st.lists(st.builds(dict, fragment=COUNTERS, version=COUNTERS)),
    )
