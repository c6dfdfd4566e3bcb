"""Dynamic Local Updates: fewer inner steps for slower workers, so that all are done at about one time.

    H_w = max(H_min, floor(v_w / v_max H))            (Liu et al. 2024, arXiv 2401.09135, section 5)

v is an exponential average of the optimizer steps per second that a worker reports in its heartbeats,
without the time it spends waiting. Whoever is gone has no part in v_max.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

# Weight of the newest report. Each is an average itself, of about the worker's last twenty steps.
SPEED_WEIGHT = 0.5


def average_speed(speed: float | None, reported: float | None) -> float | None:
    """The average after one more report, steps per second; reports that make no sense are left out.

    What is averaged are seconds per step, so that one absurdly high report does not stay for long.
    """
    if reported is None or not (math.isfinite(reported) and reported > 0):
        return speed
    if speed is None:
        return reported
    return 1 / (1 / speed + SPEED_WEIGHT * (1 / reported - 1 / speed))


def sync_every(speeds: Mapping[str, float], worker_id: str, base: int, least: int) -> int:
    """H of one worker, which gets `base` until its speed is known.

    `speeds` are steps per second of the workers here, by id; `base` is the H of the fastest
    (`--sync-every`); `least` is H_min, which guards against the collapse of H on a fast network.
    """
    speed = speeds.get(worker_id)
    if speed is None:
        return base
    # A quotient a hair below a whole number is that number: 0.29 / 0.58 * 100 is 49.99...
    share = math.floor(speed / max(speeds.values()) * base + 1e-9)
    return min(base, max(least, share))
