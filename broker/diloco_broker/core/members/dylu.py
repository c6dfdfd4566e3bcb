"""Dynamic Local Updates: fewer inner steps for slower workers, so that all finish at about one time.

    H_w = max(H_min, floor(v_w / v_max H))            (Liu et al. 2024, arXiv 2401.09135, section 5)

v is an exponential average of the optimizer steps per second that a worker reports in its heartbeats,
not counting the time it waits. v_max is the maximum over the current members.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

# Weight of the newest report, which is an average itself, of about the worker's last twenty steps.
SPEED_WEIGHT = 0.5


def average_speed(speed: float | None, reported: float | None) -> float | None:
    """The average after one more report, in steps per second; invalid reports are ignored.

    The average is over seconds per step, so that the effect of one absurdly high report is short.
    """
    if reported is None or not (math.isfinite(reported) and reported > 0):
        return speed
    if speed is None:
        return reported
    return 1 / (1 / speed + SPEED_WEIGHT * (1 / reported - 1 / speed))


def sync_every(speeds: Mapping[str, float], worker_id: str, base: int, least: int) -> int:
    """H of one worker; `base` until its speed is known.

    `speeds` are steps per second of the members, by id; `base` is the H of the fastest one
    (`--sync-every`); `least` is H_min, which prevents the collapse of H on a fast network.
    """
    speed = speeds.get(worker_id)
    if speed is None:
        return base
    # Rounding errors must not lower an integer quotient: 0.29 / 0.58 * 100 is 49.99...
    share = math.floor(speed / max(speeds.values()) * base + 1e-9)
    return min(base, max(least, share))
