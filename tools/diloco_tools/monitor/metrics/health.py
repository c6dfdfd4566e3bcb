"""Whether a broker lives, for those who end and start it: `/healthz` of the exporter."""

from __future__ import annotations

from diloco_tools.monitor.feed.listener import Reading

# A broker publishes each second, also while it saves and steps. What it is silent for beyond this is no
# load; a `torch.optim` outer optimizer over a large model may take seconds at a time.
DEAD_AFTER_S = 30.0


def why_unhealthy(reading: Reading, dead_after_s: float = DEAD_AFTER_S) -> str | None:
    """Why the broker counts as dead, a sentence; None while it lives, or has said that it ends.

    A run that waits for its workers, is paused, or cannot save is not healed by another life of its
    broker, so it counts as healthy here.
    """
    model = reading.model
    if model.snapshot is None:
        return f"{model.refusal or 'no snapshot has arrived yet'}"
    if model.snapshot.state == "stopping":
        return None
    age = model.age_s(reading.now)
    return f"the broker has sent nothing for {age:.0f} s" if age > dead_after_s else None
