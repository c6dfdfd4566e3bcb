"""Runs to simulate: a mode, and everything else drawn by a seed."""

import random
from dataclasses import replace
from typing import Any

from kit.core_harness import a_config
from simulation.network import Weather
from simulation.simulator import Scenario
from simulation.troubles import Troubles

MODES: dict[str, dict[str, Any]] = {
    "streaming": {},
    "deterministic": {"deterministic": True},
    "clip": {"aggregate": "clip-median-norm"},
    "carry": {"grace": 1.0},
    "drop": {"grace": 1.0, "late": "drop"},
    "async": {"mode": "async"},
    "async-stale": {"mode": "async", "max_staleness": 3, "staleness_weight": "poly"},
    "async-grace": {"mode": "async", "grace": 0.5},
    "async-dylu": {"mode": "async", "dylu": True},
}
# How a run is saved: not at all; each round or now and then; each round before anybody is told of it.
SAVING: tuple[dict[str, Any], ...] = (
    {},
    {"save_dir": "folder", "recover": "adopt"},
    {"save_dir": "folder", "durable": True},
    {"save_dir": "folder", "recover": "rewind"},
)
# Uploads are quick; or they take seconds, so that much happens in the middle of them, and some stand
# still until their slot is taken from them.
WEATHERS = (Weather(), Weather(chunk_s=(0.05, 0.4), stall=0.02, stall_s=8.0))


def a_scenario(
    mode: str, streams: bool, seed: int, saved: int | None = None, replies: str | None = None
) -> Scenario:
    """A run of a mode, with everything else drawn: 1 to 12 workers of speeds 0.3 to 3.

    `saved` is one of the ways above; by default most runs are saved, and some with each seed are not.
    `replies` is what parameters travel in.
    """
    dice = random.Random(f"{mode} {streams} {seed}")
    pieces = dice.randint(2, 6) if streams else 1
    steps = dice.randint(max(4, pieces), 16)
    delay = dice.randrange(steps // pieces)
    latest = dice.choice((None, min(steps - 1, delay + dice.randint(0, 4))))
    workers = dice.randint(1, 6)
    fields: dict[str, Any] = {
        **MODES[mode],
        "num_fragments": pieces,
        "sync_every": steps,
        "fragment_sync_delay": delay,
        "fragment_max_delay": latest,
        "heartbeat_timeout": 12.0,
    }
    wants: tuple[dict[str, Any], ...] = ({},)
    if mode.startswith("async"):
        fields |= {"staging_slots": dice.randint(1, 3), "staging_deadline": 5.0}
        own = {"sync_every": dice.randint(pieces * (delay + 1), 20)}
        wants = ({}, {"wire_dtype": "int4"}, own)
    else:
        own = {"sync_every": dice.randint(pieces * (delay + 1), steps)}
        wants = ({}, {"wire_dtype": "int4"}, own)
        fields["min_workers"] = dice.randint(1, workers)
        fields["weight_by"] = dice.choice(("equal", "tokens", "samples"))
    if mode in ("carry", "drop"):
        fields["quorum"] = dice.randint(fields["min_workers"], workers)
    if replies is not None:
        fields["reply_dtype"] = replies
    fields |= SAVING[seed % len(SAVING) if saved is None else saved]
    troubles = Troubles(hangs=0.03, freezes=0.02, fulls=0.03, full_s=6.0)
    if "save_dir" in fields:
        every = 1 if "durable" in fields else dice.choice((1, 1, 4))
        fields |= {"save_every": every, "recover_wait": dice.choice((1.0, 4.0))}
        troubles = replace(troubles, restarts=0.05)
    if mode.startswith("async") or dice.random() < 0.3:
        fields |= {"outer": "dn", "dn_buffer": dice.randint(1, 4)}
    config = a_config(workers, stall_timeout=8.0, **fields)
    return Scenario(
        config,
        troubles=troubles,
        save_s=dice.choice((0.1, 2.0)),
        workers=dice.randint(2, 8),
        chunks=dice.choice((1, 2, 3, 9)),
        wants=wants,
        weather=WEATHERS[seed % len(WEATHERS)],
        thoroughness=5 if seed else 1,
    )
