"""What a worker may have for itself, and what it trains with as the run does.

The wire dtype is a worker's own affair: each push is decoded as it came. So is H where nobody waits for
anybody. In a run with rounds a slow worker may take fewer steps to each boundary than the others; more
would only make them wait.
"""

from __future__ import annotations

from typing import Any

from diloco_broker.config import BrokerConfig
from diloco_broker.config.declaration import MOST_STEPS
from diloco_broker.core.members import dylu
from diloco_broker.core.members.members import Member, own_sync_every
from diloco_broker.core.rounds.modes import mode_of
from diloco_broker.core.state import RunState
from diloco_protocol.dtypes import WIRE_DTYPES
from diloco_protocol.errors import Code, ProtocolError
from diloco_protocol.messages import Join


def check_wants(config: BrokerConfig, join: Join) -> None:
    """Raise ProtocolError where a worker insists on what it cannot have, naming both values."""
    for name, asked in join.wants.items():
        runs = _as_run(config, name)
        if asked is None or asked == runs:
            continue
        if name == "wire_dtype" and asked in WIRE_DTYPES:
            continue
        if name == "sync_every":
            _check_steps(config, join, asked)
            continue
        raise ProtocolError(
            Code.CONFIG_DIFFERS,
            f"The worker asks for {name:.40}={asked!s:.60}, the run has {name:.40}={runs}; leave it out "
            "to take the run's, or start the broker with the other.",
        )


def _as_run(config: BrokerConfig, name: str) -> object:
    """A field of the run's configuration, in the words of the options."""
    if name == "fragment_sync_delay":
        return config.fragment_sync_delay  # "auto" is 0 with a mark on the wire
    return getattr(config.run_config, name, None)


def _check_steps(config: BrokerConfig, join: Join, asked: Any) -> None:
    least, runs = config.fewest_steps, config.sync_every
    if own_sync_every(join.wants) is None or not least <= asked <= MOST_STEPS:
        raise ProtocolError(
            Code.CONFIG_DIFFERS,
            f"The worker asks for sync_every={asked!s:.60}; with {config.num_fragments} fragment(s) and "
            f"a delay of {config.fragment_sync_delay} it must be from {least} to {MOST_STEPS}.",
        )
    # Who has been in the run takes the smaller of the two: an operator may have changed the run's.
    is_new = join.run is None and join.session is None
    if asked > runs and mode_of(config).has_rounds and is_new:
        raise ProtocolError(
            Code.CONFIG_DIFFERS,
            f"The worker asks for sync_every={asked}, the run has sync_every={runs}, and the others "
            "would wait for it in each round; leave it out or take fewer steps, or start the broker "
            "with more.",
        )


def remark(config: BrokerConfig, join: Join) -> str | None:
    """What should be known of a worker whose cycle is shorter than the run's; None for others."""
    own = own_sync_every(join.wants)
    is_longer = own is None or own >= config.sync_every
    if is_longer or config.weight_by != "equal" or not mode_of(config).has_rounds:
        return None
    return (
        f"{join.worker_id} makes {own} steps a cycle, the run has {config.sync_every}, and both count "
        "the same in the mean; with --weight-by tokens or samples each would count by its work."
    )


def sync_every_of(state: RunState, member: Member) -> int:
    """H of one worker: its own, or smaller for slow ones under Dynamic Local Updates."""
    config, own = state.config, member.sync_every
    if own is not None:
        return min(own, config.sync_every) if mode_of(config).has_rounds else own
    if not config.dylu:
        return config.sync_every
    speeds = {m.worker_id: m.figures.speed for m in state.members if m.figures.speed is not None}
    return dylu.sync_every(speeds, member.worker_id, config.sync_every, config.least_steps)
