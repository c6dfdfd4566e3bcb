"""The lines of a run's history: a round that has ended, what the run is, what an operator did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from diloco_broker.core.effects import RecordAction, RoundReport
from diloco_broker.core.feed import LoopFigures
from diloco_broker.core.state.run import RunState

# What does not change from round to round.
SETTINGS = (
    "outer",
    "sync_every",
    "num_fragments",
    "fragment_sync_delay",
    "fragment_delay_auto",
    "fragment_max_delay",
    "fragment_pattern",
    "fragment_update_alpha",
    "fragment_merge",
    "reducer",
    "liveness",
    "asynchronous",
    "wire_dtype",
    "reply_dtype",
    "workers_wanted",
    "min_workers",
    "save_every",
)


def round_line(state: RunState, report: RoundReport, figures: LoopFigures) -> dict[str, Any]:
    """A round that has ended, with what its workers had to say."""
    told = asdict(report) | {"seconds": round(report.seconds, 3)}
    del told["workers"]
    return {
        "kind": "round",
        **told,
        "alive": len(state.members),
        "bytes_up": state.totals.bytes_up - state.totals_before.bytes_up,
        "bytes_down": state.versions.bytes_down,
        "cpu_s": round(figures.cpu_s, 3),
        "rss_bytes": figures.rss_bytes,
        "longest_turn_ms": round(figures.longest_turn_s * 1e3, 3),
        "workers": [
            {
                "id": member.worker_id,
                "host": member.figures.host,
                "step": member.figures.step,
                "steps_per_s": member.figures.steps_per_s,
                "loss": member.figures.loss,
                "staleness": member.figures.staleness,
                "bytes_up": member.account.bytes_up,
                "bytes_down": member.account.bytes_down,
            }
            for name in report.workers
            if (member := state.members.named(name)) is not None
        ],
    }


def start_line(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    """What does not change from round to round, from a snapshot of the feed."""
    return {
        "kind": "start",
        **{name: snapshot[name] for name in ("version", "run", "mode", "control", "model")},
        "settings": {name: snapshot[name] for name in SETTINGS},
    }


def action_line(state: RunState, acted: RecordAction) -> dict[str, Any]:
    number = state.round.number if state.round else None
    return {**asdict(acted), "run": state.model.run, "round": number}
