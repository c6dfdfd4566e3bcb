"""What an operator may change while the run goes on: settings, and whether rounds close.

A new setting holds from the next version on. A version that is being made is finished with what it was
begun with, since some of its chunks have been stepped already: what was asked for meanwhile waits in
`State.wanted` until the next round opens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from diloco_broker.config import BrokerConfig
from diloco_broker.events import Acted, Effect, Tune
from diloco_broker.rounds import Phase
from diloco_broker.staging import StagedRound
from diloco_broker.state import State
from diloco_protocol.errors import UsageError

# Fields of BrokerConfig that may be changed, as people call them.
SETTINGS = {
    "outer_lr": "outer learning rate",
    "outer_momentum": "outer momentum",
    "workers": "workers",
    "quorum": "quorum",
    "grace": "grace",
    "save_every": "save-every",
}
_OF_THE_OPTIMIZER = ("outer_lr", "outer_momentum")


@dataclass(frozen=True)
class Change:
    """One setting. `before` and `after` are values of the field."""

    name: str
    before: Any
    after: Any

    @property
    def text(self) -> str:
        return f"{SETTINGS[self.name]} {_shown(self.before)} -> {_shown(self.after)}"


def _shown(value: Any) -> str:
    return "all" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def changes(state: State, arguments: Mapping[str, Any]) -> list[Change]:
    """What would change, compared with what is wanted already.

    Raises:
        UsageError: a setting that cannot be changed, or not to that; then none is.
    """
    unknown = sorted(arguments.keys() - SETTINGS.keys())
    if unknown or not arguments:
        what = f"no setting named {unknown[0]!r:.60}" if unknown else "nothing to set"
        raise UsageError(
            f"There is {what}; what can be set while the run goes on: {', '.join(SETTINGS)}."
        )
    if state.has_own_optimizer and any(name in arguments for name in _OF_THE_OPTIMIZER):
        raise UsageError(
            "The outer optimizer is one of torch's, made by a factory; its settings are its own and "
            "cannot be set from here."
        )
    config = state.wanted or state.config
    after = _with(config, arguments)
    return [
        Change(name, getattr(config, name), getattr(after, name))
        for name in SETTINGS
        if name in arguments and getattr(config, name) != getattr(after, name)
    ]


def _with(config: BrokerConfig, arguments: Mapping[str, Any]) -> BrokerConfig:
    values = dict(arguments)
    if values.get("quorum") == 0:  # as on the command line: wait for all
        values["quorum"] = None
    for name in ("outer_lr", "outer_momentum", "grace"):
        if isinstance(values.get(name), int) and not isinstance(values[name], bool):
            values[name] = float(values[name])
    if config.is_async and config.outer_name in ("dn", "fedbuff"):
        # N is the workers by default: it must not change under gradients that are in the buffer.
        values["dn_buffer"] = config.dn_size
    after = replace(config, **values)
    if "save_every" in values and config.save_dir is None:
        raise UsageError("This broker saves nothing; start it with --save-dir DIR.")
    if after.is_staged != config.is_staged:
        raise UsageError(
            "Whether rounds have a quorum decides how contributions are kept, so it is settled at the "
            "start: a broker that was started with --quorum, --deterministic or --aggregate "
            "clip-median-norm can change it."
        )
    return after


def want(state: State, who: str, planned: Sequence[Change]) -> Iterator[Effect]:
    """Take down what `changes` has found; `take_effect` carries it out."""
    values = {each.name: each.after for each in planned}
    state.wanted = _with(state.wanted or state.config, values)
    when = first_use(state)
    for each in planned:
        text = f"{each.text}{when}"
        yield Acted(who, f"set {each.name}", each.before, each.after, text)


def remark(state: State, planned: Sequence[Change]) -> str:
    """What does not follow from the changes, though one might think so; a sentence, or nothing."""
    if not any(each.name == "workers" for each in planned):
        return ""
    config = state.wanted or state.config
    if config.is_async:
        if config.outer_name in ("dn", "fedbuff"):
            return f" The buffer of the outer optimizer goes on taking {config.dn_size} gradients."
        return ""
    if not state.first_round_pending:
        return (
            " Round one is over: later ones wait for all who are here, and for --min-workers, which is "
            f"{config.min_workers}."
        )
    return ""


def first_use(state: State) -> str:
    """From when on a setting of now holds, as the end of a sentence."""
    round_ = state.round
    if round_ is None:
        return ""
    number = round_.number + (round_.phase is Phase.CLOSING)
    if state.config.num_fragments > 1:
        return f" from round {number}"
    return f" from version {number + 1}"


def take_effect(state: State) -> Iterator[Effect]:
    """No step is queued: what is wanted holds from here on."""
    before, wanted = state.config, state.wanted
    if wanted is None:
        return
    state.config, state.wanted = wanted, None
    yield Tune(wanted)
    round_ = state.round
    if round_ is None or wanted.is_async:
        return
    if state.first_round_pending and before.workers != wanted.workers:
        round_.floor = wanted.workers
    if isinstance(round_, StagedRound):
        if round_.quorum != wanted.quorum:
            round_.quorum_at = None
        round_.quorum, round_.grace = wanted.quorum, wanted.grace
