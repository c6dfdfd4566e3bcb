"""What an operator may change while the run goes on: settings, and whether rounds close.

A new setting holds from the next version on. A version that is being made is finished with what it was
begun with, since some of its chunks have been stepped already: what was asked for meanwhile waits in
`RunState.wanted` until the next round opens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from diloco_broker.config import BrokerConfig
from diloco_broker.config.broker_config import SETTINGS
from diloco_broker.core import effects
from diloco_broker.core.operations import ending
from diloco_broker.core.rounds.modes import mode_of
from diloco_broker.core.state import RunState
from diloco_protocol.errors import UsageError
from diloco_protocol.messages import Notice

# What takes a setting back: the quorum is all workers again, the run has no such end.
_TAKEN_BACK = {"quorum": 0, "max_rounds": 0, "token_budget": 0, "max_time": "0"}
# What a torch optimizer has in its groups, by the name of the setting.
_OF_THE_OPTIMIZER = {"outer_lr": "lr", "outer_momentum": "momentum"}


@dataclass(frozen=True)
class Change:
    """One setting. `before` and `after` are values of the field."""

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
    """What would change, compared with what is wanted already.

    Raises UsageError for a setting that cannot be changed, or not to that; then none is.
    """
    unknown = sorted(arguments.keys() - SETTINGS.keys())
    if unknown or not arguments:
        what = f"no setting named {unknown[0]!r:.60}" if unknown else "nothing to set"
        raise UsageError(
            f"There is {what}; what can be set while the run goes on: {', '.join(SETTINGS)}."
        )
    if state.has_own_optimizer and "outer_momentum_warmup" in arguments:
        raise UsageError(
            "The momentum of an outer optimizer that outer_optimizer_factory makes has no warm-up; "
            "--outer-lr-schedule holds for it, and --outer-momentum sets it."
        )
    config = state.wanted or state.config
    after = _with(config, arguments)  # of a torch optimizer's settings it only checks the values
    planned = []
    for name in (name for name in SETTINGS if name in arguments):
        if state.has_own_optimizer and name in _OF_THE_OPTIMIZER:
            before, is_same = _of_groups(state, name, getattr(after, name))
        else:
            before = getattr(config, name)
            is_same = before == getattr(after, name)
        if not is_same:
            planned.append(Change(name, before, getattr(after, name)))
    return planned


def _of_groups(state: RunState, name: str, wanted: float) -> tuple[Any, bool]:
    """What the groups of a torch optimizer have of a setting, and whether all have what is wanted."""
    groups, called = state.outer_groups, SETTINGS[name]
    if not groups:
        raise UsageError(
            f"The {called} cannot be set yet: the outer optimizer is made once the run has parameters."
        )
    values = [getattr(group, _OF_THE_OPTIMIZER[name]) for group in groups]
    if None in values:
        raise UsageError(
            f"The outer optimizer has no {called}: {values.count(None)} of its {len(values)} groups "
            f"have none."
        )
    waiting = state.wanted_outer.get(name)
    shown = list(dict.fromkeys(values)) if waiting is None else [waiting]
    before = shown[0] if len(shown) == 1 else ", ".join(f"{value:g}" for value in shown)
    return before, shown == [wanted]


def _with(config: BrokerConfig, arguments: Mapping[str, Any]) -> BrokerConfig:
    values = dict(arguments)
    for name, nothing in _TAKEN_BACK.items():  # as on the command line
        if name in values and values[name] == nothing:
            values[name] = None
    for name in ("outer_lr", "outer_momentum", "grace"):
        if isinstance(values.get(name), int) and not isinstance(values[name], bool):
            values[name] = float(values[name])
    if not mode_of(config).has_rounds and config.has_buffer:
        # N is the workers by default: it must not change under gradients that are in the buffer.
        values["dn_buffer"] = config.dn_size
    after = replace(config, **values)
    if "save_every" in values and config.save_dir is None:
        raise UsageError("This broker saves nothing; start it with --save-dir DIR.")
    if mode_of(after) is not mode_of(config):
        raise UsageError(
            "Whether rounds have a quorum decides how contributions are kept, so it is settled at the "
            "start: a broker that was started with --quorum, --deterministic, --max-delta-norm, or an "
            "--aggregate other than the mean can change it."
        )
    return after


def want(state: RunState, planned: Sequence[Change]) -> None:
    """Take down what `changes` has found; `take_effect` carries it out."""
    values = {each.name: each.after for each in planned}
    if state.has_own_optimizer:
        own = {name: values.pop(name) for name in _OF_THE_OPTIMIZER if name in values}
        state.wanted_outer = state.wanted_outer | own
    if "workers" in values:
        state.absences.recount()
    state.wanted = _with(state.wanted or state.config, values)


def remark(state: RunState, planned: Sequence[Change]) -> str:
    """What follows from the changes, or does not, though one might not think so; sentences."""
    names = {each.name for each in planned}
    said = ""
    if state.has_own_optimizer and names & _OF_THE_OPTIMIZER.keys() and len(state.outer_groups) > 1:
        said += f" All {len(state.outer_groups)} groups of the outer optimizer have it."
    if "sync_every" in names:
        said += " Each worker uses the new sync-every from its next cycle on."
        own = [m.worker_id for m in state.members if m.sync_every is not None]
        if own:
            less = ", where that is smaller" if mode_of(state.config).has_rounds else ""
            said += (
                f" {', '.join(own[:8])}{' ...' * (len(own) > 8)}: H stays the worker's own{less}."
            )
    return said + (_about_workers(state) if "workers" in names else "")


def after_restart(state: RunState, planned: Sequence[Change]) -> str:
    """What a broker that is started again goes on with; sentences."""
    own = state.has_own_optimizer
    saved = [each for each in planned if own and each.name in _OF_THE_OPTIMIZER]
    said = " A checkpoint keeps the outer optimizer's groups as they are." if saved else ""
    if len(saved) < len(planned):
        said += " After a restart the command line's values hold again."
    return said


def _about_workers(state: RunState) -> str:
    config = state.wanted or state.config
    if not mode_of(config).has_rounds:
        goes_on = f" The buffer of the outer optimizer goes on taking {config.dn_size} gradients."
        return goes_on if config.has_buffer else ""
    if not state.first_round_pending:
        return (
            " Round one is over: later ones wait for all workers of the run, and for --min-workers, "
            f"which is {config.min_workers}."
        )
    return ""


def first_use(state: RunState) -> str:
    """From when on a setting of now holds, as the end of a sentence."""
    round_ = state.round
    if round_ is None:
        return ""
    number = round_.number + bool(state.closing)
    if state.config.num_fragments > 1:
        return f" from round {number}"
    return f" from version {number + 1}"


def take_effect(state: RunState) -> effects.Effects:
    """No step is queued: what is wanted holds from here on."""
    before, wanted = state.config, state.wanted
    if wanted is None:
        return
    outer, state.wanted_outer = state.wanted_outer, {}
    state.config, state.wanted = wanted, None
    own = {_OF_THE_OPTIMIZER[name]: value for name, value in outer.items()}
    state.outer_groups = tuple(replace(group, **own) for group in state.outer_groups)
    yield effects.SetOuterOptimizer(wanted, own)
    ends = ("max_rounds", "token_budget", "max_time")
    if any(getattr(before, each) != getattr(wanted, each) for each in ends):
        ending.forget(state)
    if before.sync_every != wanted.sync_every:
        text = f"The run's sync_every is {wanted.sync_every} now; it was {before.sync_every}."
        for member in state.members:
            yield member.tell(Notice("sync_every", text, sync_every=wanted.sync_every))
