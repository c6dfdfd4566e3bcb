"""Settings that a worker may choose, and those that must match the run.

A worker may choose its wire dtype, since each push is decoded by its own, and H if the run has no
rounds. In a run with rounds a slow worker may make fewer steps per cycle than the others, but not more,
since they would wait for it.
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
    """Raise ProtocolError, with both values, if a worker insists on a setting that it cannot have."""
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
            f"The worker asks for {name:.40}={asked!s:.60}, the run has {name:.40}={runs}; omit it to "
            "use the run's value, or restart the broker with the worker's.",
        )


def _as_run(config: BrokerConfig, name: str) -> object:
    """A field of the run's configuration, as the option has it."""
    if name == "fragment_sync_delay":
        return config.fragment_sync_delay  # "auto" is sent as 0 with a flag
    return getattr(config.run_config, name, None)


def _check_steps(config: BrokerConfig, join: Join, asked: Any) -> None:
    least, runs = config.fewest_steps, config.sync_every
    if own_sync_every(join.wants) is None or not least <= asked <= MOST_STEPS:
        raise ProtocolError(
            Code.CONFIG_DIFFERS,
            f"The worker asks for sync_every={asked!s:.60}; with {config.num_fragments} fragment(s) and "
            f"a delay of {config.fragment_sync_delay} it must be from {least} to {MOST_STEPS}.",
        )
    # A former member uses the smaller value: an operator may have changed the run's since it joined.
    is_new = join.run is None and join.session is None
    if asked > runs and mode_of(config).has_rounds and is_new:
        raise ProtocolError(
            Code.CONFIG_DIFFERS,
            f"The worker asks for sync_every={asked}, the run has sync_every={runs}: the other workers "
            "would wait for it in each round. Omit it, use a smaller one, or restart the broker with a "
            "larger one.",
        )


def remark(config: BrokerConfig, join: Join) -> str | None:
    """A remark for the log on a worker whose cycle is shorter than the run's; None for others."""
    own = own_sync_every(join.wants)
    is_longer = own is None or own >= config.sync_every
    if is_longer or config.weight_by != "equal" or not mode_of(config).has_rounds:
        return None
    return (
        f"{join.worker_id} makes {own} steps per cycle instead of {config.sync_every}, but has the same "
        "weight in the mean; use --weight-by tokens or samples to weight each worker by its work."
    )


def sync_every_of(state: RunState, member: Member) -> int:
    """H of one worker: its own, the run's, or less for slow ones with Dynamic Local Updates."""
    config, own = state.config, member.sync_every
    if own is not None:
        return min(own, config.sync_every) if mode_of(config).has_rounds else own
    if not config.dylu:
        return config.sync_every
    speeds = {m.worker_id: m.figures.speed for m in state.members if m.figures.speed is not None}
    return dylu.sync_every(speeds, member.worker_id, config.sync_every, config.least_steps)
