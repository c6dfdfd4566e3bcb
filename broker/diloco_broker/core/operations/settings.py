"""Settings that an operator may change during a run.

A new setting applies from the next version on. A version in progress keeps the settings that it started
with, since some of its chunks have been stepped already: changes wait in `RunState.wanted` until the
next round opens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from diloco_broker.config import BrokerConfig
from diloco_broker.config.broker_config import SETTINGS
from diloco_broker.config.declaration import AUTO
from diloco_broker.core import effects
from diloco_broker.core.operations import ending
from diloco_broker.core.rounds.grace import NO_OVERLAP
from diloco_broker.core.rounds.modes import mode_of
from diloco_broker.core.state import RunState
from diloco_protocol.errors import UsageError
from diloco_protocol.messages import Notice

# Values that reset a setting: the quorum to all workers, a limit of the run to none.
_RESETS = {"quorum": 0, "max_rounds": 0, "token_budget": 0, "max_time": "0"}
# Keys in the groups of a torch optimizer, by the name of the setting.
_OPTIMIZER_KEYS = {"outer_lr": "lr", "outer_momentum": "momentum"}


@dataclass(frozen=True)
class Change:
    """A change of one setting; `before` and `after` are values of the field."""

    name: str
    before: Any
    after: Any

    @property
    def text(self) -> str:
        none = "all" if self.name == "quorum" else "none"
        return f"{SETTINGS[self.name]} {_shown(self.before, none)} -> {_shown(self.after, none)}"


def _shown(value: Any, none: str) -> str:
    return none if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def changes(state: RunState, arguments: Mapping[str, Any]) -> list[Change]:
    """Compare requested settings with the current and pending ones.

    Raises UsageError for a setting that cannot be changed, or not to this value.
    """
    unknown = sorted(arguments.keys() - SETTINGS.keys())
    if unknown or not arguments:
        what = f"Unknown setting {unknown[0]!r:.60}" if unknown else "No setting was given"
        raise UsageError(
            f"{what}; settings that can be changed during a run: {', '.join(SETTINGS)}."
        )
    if state.has_own_optimizer and "outer_momentum_warmup" in arguments:
        raise UsageError(
            "An outer optimizer of outer_optimizer_factory has no momentum warm-up; it supports "
            "--outer-momentum and --outer-lr-schedule."
        )
    config = state.wanted or state.config
    after = _with(config, arguments)  # this only checks the values for a torch optimizer
    planned = []
    for name in (name for name in SETTINGS if name in arguments):
        if state.has_own_optimizer and name in _OPTIMIZER_KEYS:
            before, is_same = _of_groups(state, name, getattr(after, name))
        else:
            before = getattr(config, name)
            is_same = before == getattr(after, name)
        if not is_same:
            planned.append(Change(name, before, getattr(after, name)))
    return planned


def _of_groups(state: RunState, name: str, wanted: float) -> tuple[Any, bool]:
    """A setting in the groups of a torch optimizer, and whether all groups have the wanted value."""
    groups, called = state.outer_groups, SETTINGS[name]
    if not groups:
        raise UsageError(
            f"The {called} cannot be set yet: the outer optimizer does not exist before the run has "
            "parameters."
        )
    values = [getattr(group, _OPTIMIZER_KEYS[name]) for group in groups]
    if None in values:
        raise UsageError(
            f"The outer optimizer has no {called} in {values.count(None)} of its {len(values)} groups."
        )
    waiting = state.wanted_outer.get(name)
    shown = list(dict.fromkeys(values)) if waiting is None else [waiting]
    before = shown[0] if len(shown) == 1 else ", ".join(f"{value:g}" for value in shown)
    return before, shown == [wanted]


def _with(config: BrokerConfig, arguments: Mapping[str, Any]) -> BrokerConfig:
    values = dict(arguments)
    for name, reset in _RESETS.items():  # the same values reset them on the command line
        if name in values and values[name] == reset:
            values[name] = None
    for name in ("outer_lr", "outer_momentum", "grace"):
        if isinstance(values.get(name), int) and not isinstance(values[name], bool):
            values[name] = float(values[name])
    if not mode_of(config).has_rounds and config.has_buffer:
        # N defaults to the number of workers; it must not change while gradients are in the buffer.
        values["dn_buffer"] = config.dn_size
    after = replace(config, **values)
    if "save_every" in values and config.save_dir is None:
        raise UsageError("This broker writes no checkpoints; start it with --save-dir DIR.")
    if mode_of(after) is not mode_of(config):
        raise UsageError(
            "The quorum can be changed only if the broker keeps pushes until they are complete; start "
            "it with --quorum, --deterministic, --max-delta-norm, or an --aggregate other than the mean."
        )
    return after


def want(state: RunState, planned: Sequence[Change]) -> None:
    """Note these changes as pending; `take_effect` applies them."""
    values = {each.name: each.after for each in planned}
    if state.has_own_optimizer:
        own = {name: values.pop(name) for name in _OPTIMIZER_KEYS if name in values}
        state.wanted_outer = state.wanted_outer | own
    if "workers" in values:
        state.absences.recount()
    state.wanted = _with(state.wanted or state.config, values)


def remark(state: RunState, planned: Sequence[Change]) -> str:
    """Describe consequences of the changes that an operator may not expect, as sentences."""
    names = {each.name for each in planned}
    said = ""
    if state.has_own_optimizer and names & _OPTIMIZER_KEYS.keys() and len(state.outer_groups) > 1:
        said += f" It applies to all {len(state.outer_groups)} groups of the outer optimizer."
    if "sync_every" in names:
        said += " Each worker uses the new sync-every from its next cycle on."
        own = [m.worker_id for m in state.members if m.sync_every is not None]
        if own:
            less = " where that is smaller" if mode_of(state.config).has_rounds else ""
            kept_by = f"{', '.join(own[:8])}{' ...' * (len(own) > 8)}"
            said += f" These workers keep their own H{less}: {kept_by}."
    if any(each.after == AUTO for each in planned) and not state.config.overlap_steps():
        said += f" {NO_OVERLAP}"
    return said + (_about_workers(state) if "workers" in names else "")


def after_restart(state: RunState, planned: Sequence[Change]) -> str:
    """Describe which settings a restarted broker has, as sentences."""
    own = state.has_own_optimizer
    saved = [each for each in planned if own and each.name in _OPTIMIZER_KEYS]
    said = " Checkpoints contain the settings of the outer optimizer's groups." if saved else ""
    if len(saved) < len(planned):
        which = "the other settings" if saved else "settings"
        said += f" A restart resets {which} to the command line's values."
    return said


def _about_workers(state: RunState) -> str:
    config = state.wanted or state.config
    if not mode_of(config).has_rounds:
        goes_on = f" The buffer of the outer optimizer still takes {config.dn_size} gradients."
        return goes_on if config.has_buffer else ""
    if not state.first_round_pending:
        return (
            " The first round is over: later rounds wait for all members of the run, and need at least "
            f"{config.min_workers} (--min-workers)."
        )
    return ""


def first_use(state: RunState) -> str:
    """When a new setting applies, as the end of a sentence."""
    round_ = state.round
    if round_ is None:
        return ""
    number = round_.number + bool(state.closing)
    if state.config.num_fragments > 1:
        return f" from round {number}"
    return f" from version {number + 1}"


def take_effect(state: RunState) -> effects.Effects:
    """Apply pending settings; no outer step may be queued."""
    before, wanted = state.config, state.wanted
    if wanted is None:
        return
    outer, state.wanted_outer = state.wanted_outer, {}
    state.config, state.wanted = wanted, None
    own = {_OPTIMIZER_KEYS[name]: value for name, value in outer.items()}
    state.outer_groups = tuple(replace(group, **own) for group in state.outer_groups)
    yield effects.SetOuterOptimizer(wanted, own)
    ends = ("max_rounds", "token_budget", "max_time")
    if any(getattr(before, each) != getattr(wanted, each) for each in ends):
        ending.forget(state)
    if before.sync_every != wanted.sync_every:
        text = f"The run's sync_every changed from {before.sync_every} to {wanted.sync_every}."
        for member in state.members:
            yield member.tell(Notice("sync_every", text, sync_every=wanted.sync_every))
