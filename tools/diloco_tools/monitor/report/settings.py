"""What the settings of a run are called on the page, in the order in which it shows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diloco_tools.monitor.report.drawing.wording import setting

TITLES = {
    "sync_every": "Steps to a boundary (H)",
    "workers_wanted": "Workers",
    "min_workers": "Least contributions to a round",
    "outer.optimizer": "Outer optimizer",
    "outer.variant": "Variant of Delayed Nesterov",
    "outer.lr": "Outer learning rate",
    "outer.lr_schedule": "Its schedule",
    "outer.momentum": "Outer momentum",
    "outer.momentum_warmup": "Its warm-up",
    "outer.nesterov": "Nesterov's form",
    "outer.buffer": "Gradients to a momentum step",
    "outer.c": "c of Delayed Nesterov",
    "outer.groups": "Groups of the torch optimizer",
    "wire_dtype": "Pseudo-gradients are sent as",
    "reply_dtype": "Parameters are sent as",
    "num_fragments": "Fragments (P)",
    "fragment_pattern": "How the model is split",
    "fragment_delay_auto": "Replies are merged when they are here",
    "fragment_sync_delay": "Steps from sending to merging (tau)",
    "fragment_max_delay": "Steps after which a worker waits",
    "fragment_merge": "Merge",
    "fragment_update_alpha": "Weight of local parameters (alpha)",
    "reducer.aggregate": "Aggregate",
    "reducer.trim": "Left out at each end",
    "reducer.weight_by": "Weights",
    "reducer.staged": "Whole submissions are kept",
    "reducer.deterministic": "Folded in the order of workers",
    "reducer.max_delta_norm": "Longest pseudo-gradient",
    "reducer.max_delta_norm_auto": "Longer than 5 times the usual is refused",
    "reducer.quorum": "Quorum",
    "reducer.grace_s": "Grace, seconds",
    "reducer.late": "Late work",
    "asynchronous.dylu": "Dynamic Local Updates",
    "asynchronous.dylu_min_steps": "Least steps of a slow worker",
    "asynchronous.staleness_weight": "Weight of stale work",
    "asynchronous.max_staleness": "Stalest work that counts, versions",
    "asynchronous.slots": "Slots",
    "asynchronous.deadline_s": "Loses its slot without progress after, seconds",
    "liveness.heartbeat_timeout_s": "Dead after silence of, seconds",
    "liveness.stall_timeout_s": "Stalled without a step for, seconds",
    "liveness.disconnect_grace_s": "Time to reconnect, seconds",
    "save_every": "A checkpoint each ... rounds",
}
# Those that say nothing where a run has no fragments.
OF_FRAGMENTS = "fragment_"


def title_of(name: str) -> str:
    """A name of the feed in words; one that is not known here stays as it is."""
    return TITLES.get(name, name)


def rows_of(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Titles and values of those that are set; known ones first."""
    one_fragment = settings.get("num_fragments") in (None, 1)
    names = [name for name in TITLES if name in settings]
    names += sorted(settings.keys() - TITLES.keys())
    return [
        (title_of(name), setting(settings[name]))
        for name in names
        if settings[name] is not None
        and settings[name] != "[]"
        and not (one_fragment and name.startswith(OF_FRAGMENTS))
    ]
