"""Whether a worker can take part in a run as the broker describes it, and how often it beats. Pure."""

from __future__ import annotations

from diloco_protocol import RunConfig

# Seconds between heartbeats where neither the worker nor the broker asks for something else.
HEARTBEAT_S = 30.0
# What must be the same when a broker comes back: chunks in flight are numbered by it.
FIXED = ("mode", "num_fragments", "chunk_elements")


def objection(
    config: RunConfig, earlier: RunConfig | None, asked_interval: float | None
) -> str | None:
    """Why this worker cannot take part, as a sentence; None when it can.

    Args:
        config: what the broker runs.
        earlier: what this worker has trained with so far, if it has.
        asked_interval: seconds between heartbeats that the user asked for; None = whatever fits.
    """
    tolerated = config.heartbeat_timeout
    if asked_interval == 0 and tolerated > 0:
        return (
            f"The broker drops workers that are silent for {tolerated:g} s, and this one has "
            "heartbeat_interval 0; leave it out, or start the broker with --heartbeat-timeout 0."
        )
    if asked_interval is not None and 0 < tolerated <= asked_interval:
        return (
            f"heartbeat_interval is {asked_interval:g} s, but the broker drops workers that are "
            f"silent for {tolerated:g} s; choose at most a third of that."
        )
    if config.mode != "sync" or config.num_fragments != 1:
        return (
            f"The run has mode {config.mode!r} with {config.num_fragments} fragment(s); this "
            "release of the worker trains mode 'sync' with one fragment."
        )
    for name in FIXED if earlier is not None else ():
        ours, theirs = getattr(earlier, name), getattr(config, name)
        if ours != theirs:
            return (
                f"The broker came back with {name} {theirs}, this worker trains with {ours}; "
                "restart the worker, or the broker with its old options."
            )
    return None


def heartbeat_interval(config: RunConfig, asked: float | None) -> float:
    """Seconds between heartbeats; 0 = none."""
    if asked is not None:
        return asked
    if config.heartbeat_timeout > 0:
        return min(HEARTBEAT_S, config.heartbeat_timeout / 3)
    return HEARTBEAT_S
