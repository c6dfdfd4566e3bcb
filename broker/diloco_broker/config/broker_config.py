"""The validated options of a broker, and the part of them that is sent to workers.

An option without effect is accepted if it describes what happens anyway, so that a sweep needs no
special cases: a pattern for one fragment, a buffer of one gradient, zero momentum for sgd. An option
that asks for something that will not happen is rejected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import PurePath
from typing import Any

from diloco_broker.config.declaration import AUTO, Options
from diloco_broker.config.option import check_alone, refusal
from diloco_broker.config.presets import preset, summary
from diloco_protocol.addresses import CONTROL_PORT, FEED_PORT, is_loopback, with_scheme
from diloco_protocol.errors import UsageError, check_names
from diloco_protocol.feed import INSECURE, KEYS, LOOPBACK
from diloco_protocol.messages import BUFFERS, RunConfig

_ONE_VERSION = "a round's contributions start from one version"
# Options that have no effect in rounds, and why.
_ONLY_ASYNC = {
    "dylu": "in rounds every worker makes the same H steps",
    "dylu_min_steps": "see --dylu",
    "staleness_weight": _ONE_VERSION,
    "max_staleness": _ONE_VERSION,
    "staging_slots": "rounds have no slots",
    "staging_deadline": "rounds have no slots",
}
_ONLY_ROUNDS = ("min_workers", "quorum", "deterministic", "aggregate", "trim", "weight_by", "late")
_ONLY_QUORUM = ("grace", "late")
# Settings that an operator may change during the run, with their names in messages.
SETTINGS = {
    "outer_lr": "outer learning rate",
    "outer_momentum": "outer momentum",
    "outer_lr_schedule": "outer learning rate's schedule",
    "outer_momentum_warmup": "outer momentum's warm-up",
    "workers": "workers",
    "min_workers": "min-workers",
    "sync_every": "sync-every",
    "quorum": "quorum",
    "grace": "grace",
    "save_every": "save-every",
    "max_rounds": "max-rounds",
    "token_budget": "token-budget",
    "max_time": "max-time",
}


@dataclass(frozen=True)
class BrokerConfig(Options):
    """The validated options of a broker; `Options` declares them. Raises UsageError for a conflict."""

    def __new__(cls, *_: object, **options: object) -> BrokerConfig:
        check_names("BrokerConfig", "option", options, [each.name for each in fields(cls)])
        return super().__new__(cls)

    @classmethod
    def from_preset(cls, name: str, **options: Any) -> BrokerConfig:
        """The options of a preset, except those given here; see `diloco_broker.config.presets`."""
        try:
            return cls(**(preset(name) | options))
        except UsageError as error:
            raise UsageError(f"{error} {summary(name, options)}") from None

    def __post_init__(self) -> None:
        if self.fragment_sync_delay is None:
            overlaps = self.num_fragments > 1 and not self.deterministic
            object.__setattr__(self, "fragment_sync_delay", AUTO if overlaps else 0)
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, PurePath):  # checkpoints hold the options as JSON
                object.__setattr__(self, each.name, str(value))
        object.__setattr__(self, "bind", with_scheme(self.bind, CONTROL_PORT))
        object.__setattr__(self, "feed", with_scheme(self.feed, FEED_PORT))
        _check(self)

    @property
    def run_config(self) -> RunConfig:
        """The part that is sent to workers."""
        told = {each.name for each in fields(RunConfig)} & {each.name for each in fields(self)}
        values = {name: getattr(self, name) for name in told}
        values |= {"fragment_sync_delay": self.least_delay, "buffers": BUFFERS}
        return RunConfig(**values, fragment_delay_auto=self.has_auto_delay)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that an operator may change during the run, and `dn_buffer`, which they keep."""
        return {name: getattr(self, name) for name in (*SETTINGS, "dn_buffer")}

    @property
    def security(self) -> str:
        """Which peers may connect, as the feed names it: KEYS, LOOPBACK or INSECURE."""
        if self.keys:
            return KEYS
        return LOOPBACK if _stays_here(self.bind) and _stays_here(self.feed) else INSECURE


def _check(options: Options) -> None:
    """Check each value, then their combination; raises UsageError for the first problem."""
    for each in fields(options):
        check_alone(each, getattr(options, each.name))
    if options.is_async:
        _check_async(options)
    else:
        _check_sync(options)
    _check_rounds(options)
    _check_aggregate(options)
    _check_saving(options)
    _check_fragments(options)
    _check_dylu(options)
    _check_outer(options)
    for name in ("bind", "feed"):
        _check_reach(options, name)


def _require(options: Options, name: str, holds: bool, what: str) -> None:
    if not holds:
        value = getattr(options, name)
        raise refusal(name, "on" if value is True else value, what)


def _require_unset(options: Options, name: str, why: str) -> None:
    default = getattr(Options, name)
    _require(options, name, getattr(options, name) == default, f"omitted{why}")


def _check_async(options: Options) -> None:
    for name in _ONLY_ROUNDS:
        _require_unset(options, name, " with --mode async, which applies each push by itself")
    _require(
        options, "grace", options.grace != AUTO, "a number with --mode async, without a quorum"
    )


def _check_sync(options: Options) -> None:
    for name, why in _ONLY_ASYNC.items():
        _require_unset(options, name, f" without --mode async: {why}")
    if options.quorum is None:
        for name in _ONLY_QUORUM:
            why = " without --quorum: then a round waits for all workers"
            _require_unset(options, name, why)


def _check_rounds(options: Options) -> None:
    floor, planned, quorum = options.min_workers, options.workers, options.quorum
    at_most = f"at most --workers, which is {planned}"
    _require(options, "min_workers", floor <= planned, at_most)
    most = options.max_workers
    _require(options, "workers", planned <= most, f"at most --max-workers, which is {most}")
    if quorum is not None:
        _require(options, "quorum", quorum <= planned, at_most)
        _require(options, "quorum", quorum >= floor, f"at least --min-workers, which is {floor}")


def _check_aggregate(options: Options) -> None:
    if options.aggregate != "trimmed-mean":
        _require_unset(options, "trim", " without --aggregate trimmed-mean")
    if options.aggregate in ("trimmed-mean", "coordinate-median"):
        why = f" with --aggregate {options.aggregate}, which counts each worker once"
        _require_unset(options, "weight_by", why)
    if options.max_delta_norm is not None:
        why = " with --max-delta-norm, because workers report their own weights"
        _require_unset(options, "weight_by", why)
    if options.max_delta_norm == AUTO:
        number = f"a number with --workers {options.workers}: auto needs at least three workers"
        _require(options, "max_delta_norm", options.workers >= 3, number)


def _check_saving(options: Options) -> None:
    if options.fresh:
        saves, resume = options.save_dir is not None, options.resume
        _require(
            options, "fresh", saves, "omitted without --save-dir: nothing could be moved aside"
        )
        why = f"omitted with --resume {resume}, which resumes a run"
        _require(options, "fresh", resume in (AUTO, "none"), why)
        keys, folder = options.keys, options.save_dir or ""
        inside = keys is not None and PurePath(keys).is_relative_to(folder)
        away = "omitted, because --keys is a folder in --save-dir and would be moved aside with it"
        _require(options, "fresh", not inside, away)
    if not options.durable:
        return
    saves = options.save_dir is not None
    _require(options, "durable", saves, "omitted without --save-dir; give --save-dir DIR")
    each_version = "1 with --durable, which saves each version"
    _require(options, "save_every", options.save_every == 1, each_version)


def _check_fragments(options: Options) -> None:
    pieces, steps, delay = options.num_fragments, options.sync_every, options.least_delay
    least = f"at least --num-fragments, which is {pieces}: each fragment needs its own step"
    _require(options, "sync_every", steps >= pieces, least)
    if options.fragment_plan is not None:
        file = options.fragment_plan
        why = f" with --fragment-plan {file}, which assigns each parameter to a fragment"
        _require_unset(options, "fragment_pattern", why)
    interval, over = steps // pieces, f"--sync-every {steps} over --num-fragments {pieces}"
    below = f"below {interval}, the steps between two fragments ({over})"
    _require(options, "fragment_sync_delay", delay < interval, below)
    is_fixed = not (options.deterministic and options.has_auto_delay)
    number = "a number with --deterministic: the arrival of replies differs between runs"
    _require(options, "fragment_sync_delay", is_fixed, number)
    if options.fragment_merge != "alpha":
        why = f" with --fragment-merge {options.fragment_merge}, which keeps all local steps"
        _require_unset(options, "fragment_update_alpha", why)
    longest = options.fragment_max_delay
    fits = longest is None or delay <= longest < steps
    between = f"from --fragment-sync-delay, which is {delay}, to below --sync-every, {steps}"
    _require(options, "fragment_max_delay", fits, between)


def _check_dylu(options: Options) -> None:
    if not options.dylu:
        _require_unset(options, "dylu_min_steps", " without --dylu")
    fit, steps = options.fewest_steps, options.sync_every
    least = f"{fit} ({options.num_fragments} fragments x (delay {options.least_delay} + 1))"
    between = f"from {least} to --sync-every, which is {steps}"
    _require(options, "dylu_min_steps", fit <= options.least_steps <= steps, between)


def _check_outer(options: Options) -> None:
    outer, size = options.outer_name, options.dn_size
    within = f"in [0, 1/N], and N is {size} (--dn-buffer)"
    _require(options, "dn_c", 0 <= options.dn_c <= 1 / size, within)
    if not options.has_buffer:
        no_buffer = f"omitted, or 1: --outer {outer} has no buffer, each gradient is a step"
        _require(options, "dn_buffer", options.dn_buffer in (None, 1), no_buffer)
    if outer == "sgd" and options.outer_momentum:
        _require_unset(options, "outer_momentum", ", or 0: --outer sgd has no momentum")
    if outer == "sgd" and not options.outer_schedule.warmup.is_constant:
        why = ", or constant: --outer sgd has no momentum"
        _require_unset(options, "outer_momentum_warmup", why)
    _check_restart(options)
    if outer != "dn" or options.dn_variant != "paper":
        why = ": only --outer dn with --dn-variant paper uses it"
        _require_unset(options, "dn_c", why)
    if outer != "dn":
        _require_unset(options, "dn_variant", f": --outer {outer} is not dn")
    if outer != "cgad":
        for name in ("cgad_decay", "cgad_cutoff", "cgad_epsilon"):
            _require_unset(options, name, f": --outer {outer} is not cgad")
        return
    no_rounds = "another one without --mode async: cgad weighs stale pushes, and rounds have none"
    _require(options, "outer", options.is_async, no_rounds)
    _require_unset(
        options, "staleness_weight", " with --outer cgad, which weighs stale pushes itself"
    )
    if not options.outer_schedule.warmup.is_constant:
        why = ", or constant: --outer cgad has a constant momentum"
        _require_unset(options, "outer_momentum_warmup", why)


def _check_restart(options: Options) -> None:
    restart = options.outer_momentum_restart
    if options.outer_name in ("sgd", "cgad"):
        why = f": --outer {options.outer_name} has no Nesterov momentum"
        _require_unset(options, "outer_momentum_restart", why)
    unit = options.dn_size // options.outer_schedule.size  # rounds between two momentum steps
    several = (
        f"0, or a multiple of {unit} (--dn-buffer) that is larger" if unit > 1 else "0, or above 1"
    )
    fits = restart != unit and restart % unit == 0
    _require(options, "outer_momentum_restart", fits, several)


def _check_reach(options: Options, name: str) -> None:
    """Reject an address that other machines can reach without keys, unless --insecure allows it."""
    address = getattr(options, name)
    if not (options.insecure or options.keys or _stays_here(address)):
        raise UsageError(
            f"--{name} {address} can be reached from other machines, and without keys anyone there "
            "could change the model. Give --keys DIR (make them with: diloco-broker keygen DIR), or "
            "--insecure if you trust everyone on that network."
        )


def _stays_here(address: str) -> bool:
    """Whether this address is reachable from this machine only."""
    scheme, _, rest = address.partition("://")
    return scheme == "ipc" or is_loopback(rest.rpartition(":")[0])


# Options that belong to a broker, not to the run.
_OF_A_BROKER = frozenset((
    "bind", "feed", "keys", "ipc", "insecure", "save_dir", "keep", "audit", "tape", "resume", "fresh",
    "recover", "recover_wait", "tensor_threads", "max_workers", "max_parameters", "standby", "lease",
))  # fmt: skip


def run_differences(hub: Mapping[str, Any], ours: BrokerConfig) -> list[str]:
    """One sentence for each option of the run that differs between a standby and its hub.

    `hub` has the hub's options from its checkpoint. Settings that operators may change are not compared:
    the standby follows them.
    """
    others = _OF_A_BROKER | ours.settings.keys()
    return [
        f"The hub was started with --{name.replace('_', '-')} {hub[name]}, this standby with {value}. "
        "Restart the standby with the hub's options."
        for name, value in vars(ours).items()
        if name not in others and hub.get(name, value) != value
    ]
