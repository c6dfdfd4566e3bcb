"""The configuration of a broker: what the command line says, checked in one place."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass
from pathlib import PurePath

from diloco_protocol.addresses import DEFAULT_CONTROL_ADDRESS, DEFAULT_FEED_ADDRESS, with_scheme
from diloco_protocol.chunks import CHUNK_ELEMENTS
from diloco_protocol.dtypes import check_wire_dtype
from diloco_protocol.errors import UsageError
from diloco_protocol.fragments.plan import PATTERNS, longest_delay
from diloco_protocol.messages import BUFFERS, MERGES, MODES, WEIGHTS, RunConfig

OUTERS = ("nesterov", "dn", "fedbuff", "sgd")
DN_VARIANTS = ("paper", "direct")
STALENESS_WEIGHTS = ("none", "poly")
AGGREGATES = ("mean", "clip-median-norm")
LATES = ("carry", "drop")
RECOVERIES = ("adopt", "rewind")
AUTO = "auto"


@dataclass(frozen=True)
class BrokerConfig:
    """Options of a broker; each equals the command-line option of the same name.

    Attributes:
        mode: "sync" (rounds) or "async" (each submission is an outer step of its own).
        workers: round one waits for so many workers; in asynchronous mode, how many are planned.
        min_workers: a round never closes with fewer contributions.
        sync_every: H, inner (optimizer) steps between two pushes of a fragment.
        outer: outer optimizer: "nesterov", "dn" (Delayed Nesterov), "fedbuff" (a buffer of N, then
            one Nesterov step) or "sgd" (no momentum). None: nesterov in sync, dn in async.
        outer_lr: learning rate eta of the outer optimizer.
        outer_momentum: momentum mu of the outer optimizer.
        nesterov: Nesterov's form of the momentum (the paper's); False is the classical form.
        dn_buffer: N, gradients between two momentum steps of dn and fedbuff. None: the workers in
            asynchronous mode; 1 in synchronous mode, where a round's mean is one gradient.
        dn_c: c of Delayed Nesterov, in [0, 1/N].
        dn_variant: "paper" (Liu et al. 2024, algorithm 3) or "direct" (see `outer.DirectDelayed`).
        staleness_weight: "none", or "poly": a submission s versions old counts (1 + s)^-1/2.
        max_staleness: older submissions are refused; None: none is too old.
        dylu: Dynamic Local Updates: slower workers make fewer steps. Asynchronous mode only.
        dylu_min_steps: least steps that a slow worker is given.
        num_fragments: P; each fragment is synchronised every H steps, one after the other.
        fragment_pattern: "strided", "contiguous" or "balanced"; see `diloco_protocol.FragmentPlan`.
        fragment_plan: a JSON file with a split of one's own, instead of a pattern: a fragment for each
            name or pattern of names; see `diloco_protocol.fragments.own_split`. None: the pattern.
        fragment_sync_delay: tau, inner steps between sending a fragment and merging the reply; or
            "auto": each worker merges at the first step at which all of the reply is here. None becomes
            "auto" where `num_fragments` is above 1, unless `deterministic`, and otherwise 0.
        fragment_update_alpha: weight of the local parameters in that merge.
        fragment_merge: "alpha", or "rebase", which keeps the steps made since sending.
        fragment_max_delay: inner steps after which a worker waits for a late reply. None: tau; with
            "auto" H/P, and never more than H/2 (`diloco_protocol.fragments.plan.longest_delay`).
        deterministic: fold whole submissions in the order of worker ids: the same bits in any order
            of arrival.
        weight_by: what a contribution weighs: "equal", "tokens" or "samples".
        aggregate: "mean", or "clip-median-norm": none counts longer than the median one.
        quorum: K: once so many submissions are whole, the round waits `grace` seconds for the rest.
        grace: seconds. In asynchronous mode: what is whole within so many seconds of the first is
            applied together.
        late: "carry" late work into the next round of its fragment, or "drop" it.
        staging_slots: submissions on their way at a time in asynchronous mode.
        staging_deadline: seconds without progress after which one of these loses its slot.
        save_dir: folder for checkpoints; None: nothing is saved.
        save_every: rounds (applications, in asynchronous mode) between two checkpoints.
        keep: how many checkpoints are kept.
        durable: save each version before anybody is told of it; needs `save_dir`, `save_every` 1.
        resume: "auto" (go on from the newest sound checkpoint in `save_dir`, if there is one), "none",
            or the path of a checkpoint or of a folder of them.
        recover: "adopt" newer versions that workers hold, or "rewind" to the checkpoint.
        audit: file that a line of JSON is appended to for each version: what it contains.
        wire_dtype: dtype of pseudo-gradients on the way up: fp32, bf16 or fp16.
        reply_dtype: dtype of parameters on the way down: fp32, bf16 or fp16.
        bind: address of the control socket; port 0 or * picks a free one.
        feed: address of the status feed; likewise.
        heartbeat_timeout: seconds of silence after which a worker counts as dead; 0 = never.
        stall_timeout: seconds for which a worker may train without a step before the others no longer
            wait for it; 0 = for ever.
        disconnect_grace: seconds that a worker whose connection broke has to come back.
        recover_wait: seconds that a broker which lost its memory waits for the workers it knows: those
            of the checkpoint, or without one all `workers` when one of them holds a version of an
            earlier run. Then the newest version is taken.
        insecure: allow an address that is not loopback although anyone who reaches it can join.
        chunk_elements: elements of a chunk on the wire; not an option of the command line, since
            smaller chunks are slower and larger ones are refused by the frame limits.

    What is true of the run anyway is accepted, so that a sweep needs no special case: a pattern of one
    fragment, a buffer of one gradient, no momentum for sgd. What asks for something that will not happen
    is refused.

    Raises:
        UsageError: for a value that cannot work, naming it.
    """

    mode: str = "sync"
    workers: int = 1
    min_workers: int = 1
    sync_every: int = 500
    outer: str | None = None
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    nesterov: bool = True
    dn_buffer: int | None = None
    dn_c: float = 0.0
    dn_variant: str = "paper"
    staleness_weight: str = "none"
    max_staleness: int | None = None
    dylu: bool = False
    dylu_min_steps: int | None = None
    num_fragments: int = 1
    fragment_pattern: str = "strided"
    fragment_plan: str | None = None
    fragment_sync_delay: int | str | None = None
    fragment_update_alpha: float = 0.0
    fragment_merge: str = "alpha"
    fragment_max_delay: int | None = None
    deterministic: bool = False
    weight_by: str = "equal"
    aggregate: str = "mean"
    quorum: int | None = None
    grace: float = 0.0
    late: str = "carry"
    staging_slots: int = 2
    staging_deadline: float = 30.0
    save_dir: str | None = None
    save_every: int = 1
    keep: int = 3
    durable: bool = False
    resume: str = "auto"
    recover: str = "adopt"
    audit: str | None = None
    wire_dtype: str = "bf16"
    reply_dtype: str = "fp32"
    bind: str = DEFAULT_CONTROL_ADDRESS
    feed: str = DEFAULT_FEED_ADDRESS
    heartbeat_timeout: float = 120.0
    stall_timeout: float = 600.0
    disconnect_grace: float = 1.0
    recover_wait: float = 10.0
    insecure: bool = False
    chunk_elements: int = CHUNK_ELEMENTS

    def __post_init__(self) -> None:
        if self.fragment_sync_delay is None:
            overlaps = self.num_fragments > 1 and not self.deterministic
            object.__setattr__(self, "fragment_sync_delay", AUTO if overlaps else 0)
        for name in _PATHS:
            self._take_path(name)
        self._check_single_values()
        if self.is_async:
            self._check_async()
        else:
            self._check_sync()
        self._check_rounds()
        self._check_saving()
        self._check_fragments()
        self._check_outer()
        for name in ("bind", "feed"):
            address = with_scheme(getattr(self, name))
            _check_address(name, address, insecure=self.insecure)
            object.__setattr__(self, name, address)

    @property
    def has_new_address(self) -> bool:
        """The system picks a port (`*` or 0): nobody can have known this address before."""
        return self.bind.rpartition(":")[2] in ("*", "0")

    @property
    def is_async(self) -> bool:
        return self.mode == "async"

    @property
    def is_staged(self) -> bool:
        """Whether a submission counts whole or not at all, which needs room for whole ones."""
        return bool(self.why_staged)

    @property
    def why_staged(self) -> str:
        """The option that needs whole submissions; empty when chunks are added as they come."""
        reasons = {
            "--mode async": self.is_async,
            "--quorum": self.quorum is not None,
            "--deterministic": self.deterministic,
            f"--aggregate {self.aggregate}": self.aggregate != "mean",
        }
        return next((option for option, needs in reasons.items() if needs), "")

    @property
    def outer_name(self) -> str:
        return self.outer or ("dn" if self.is_async else "nesterov")

    @property
    def dn_size(self) -> int:
        """N: gradients in a buffer of dn and fedbuff."""
        if self.dn_buffer is not None:
            return self.dn_buffer
        return self.workers if self.is_async else 1

    @property
    def has_auto_delay(self) -> bool:
        """Whether replies are merged when they are here, instead of a number of steps after the slot."""
        return self.fragment_sync_delay == AUTO

    @property
    def least_delay(self) -> int:
        """Steps after which a reply is merged, not earlier: tau, or 0 with "auto"."""
        delay = self.fragment_sync_delay
        return delay if isinstance(delay, int) else 0

    @property
    def longest_delay(self) -> int:
        """Steps after which a worker waits for a reply."""
        if self.fragment_max_delay is not None:
            return self.fragment_max_delay
        if self.has_auto_delay:
            return longest_delay(self.sync_every, self.num_fragments)
        return self.least_delay

    @property
    def least_steps(self) -> int:
        """H_min of Dynamic Local Updates."""
        return self.fewest_steps if self.dylu_min_steps is None else self.dylu_min_steps

    @property
    def fewest_steps(self) -> int:
        """The least H in which every fragment can be sent and merged: P (tau + 1), tau 0 with "auto"."""
        return self.num_fragments * (self.least_delay + 1)

    @property
    def run_config(self) -> RunConfig:
        """The part that workers are told."""
        return RunConfig(
            mode=self.mode,
            sync_every=self.sync_every,
            num_fragments=self.num_fragments,
            fragment_sync_delay=self.least_delay,
            fragment_update_alpha=self.fragment_update_alpha,
            fragment_merge=self.fragment_merge,
            fragment_max_delay=self.fragment_max_delay,
            fragment_delay_auto=self.has_auto_delay,
            dylu=self.dylu,
            weight_by=self.weight_by,
            wire_dtype=self.wire_dtype,
            reply_dtype=self.reply_dtype,
            heartbeat_timeout=self.heartbeat_timeout,
            chunk_elements=self.chunk_elements,
            buffers=BUFFERS,
        )

    def _take_path(self, name: str) -> None:
        """Keep a path as text: checkpoints hold the options as JSON."""
        value = getattr(self, name)
        if isinstance(value, PurePath):
            object.__setattr__(self, name, str(value))
            return
        function = ", and a function goes to Broker(fragment_plan=...)" if callable(value) else ""
        _require(
            (value is None and name != "resume") or (isinstance(value, str) and value != ""),
            name,
            repr(value),
            f"the path of a {_PATHS[name]}{function}",
        )

    def _check_single_values(self) -> None:
        """What each value must be, whatever the others are."""
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            _require(value in choices, name, value, _alternatives(choices))
        for name, lowest in _COUNTS.items():
            value = getattr(self, name)
            if value == AUTO and name == "fragment_sync_delay":
                continue
            whole = isinstance(value, int) and not isinstance(value, bool)
            if value is not None or name not in _MAY_BE_SILENT:
                what = f"a whole number, at least {lowest}"
                if name == "fragment_sync_delay":
                    what = f"auto, or {what}"
                _require(whole and value >= lowest, name, value, what)
        for name in ("nesterov", "dylu", "deterministic", "durable", "insecure"):
            value = getattr(self, name)
            _require(isinstance(value, bool), name, repr(value), "True or False")
        for name in (
            "heartbeat_timeout",
            "stall_timeout",
            "disconnect_grace",
            "recover_wait",
            "grace",
        ):
            value = getattr(self, name)
            _require(_finite(value) and value >= 0, name, value, "a finite number, at least 0")
        for name in ("outer_lr", "staging_deadline"):
            value = getattr(self, name)
            _require(_finite(value) and value > 0, name, value, "a finite number above 0")
        for name in ("outer_momentum", "fragment_update_alpha", "dn_c"):
            value = getattr(self, name)
            _require(_finite(value), name, value, "a finite number")
        _require(
            self.chunk_elements <= CHUNK_ELEMENTS,
            "chunk_elements",
            self.chunk_elements,
            f"from 1 to {CHUNK_ELEMENTS}",
        )
        check_wire_dtype(self.wire_dtype)
        check_wire_dtype(self.reply_dtype)

    def _check_rounds(self) -> None:
        for name in ("min_workers", "quorum"):
            value = getattr(self, name)
            _require(
                value is None or value <= self.workers,
                name,
                value,
                f"at most --workers, which is {self.workers}",
            )
        if self.quorum is not None:
            _require(
                self.quorum >= self.min_workers,
                "quorum",
                self.quorum,
                f"at least --min-workers, which is {self.min_workers}",
            )

    def _check_saving(self) -> None:
        _require(
            not self.durable or self.save_dir is not None,
            "durable",
            self.durable,
            "left out where nothing is saved; give --save-dir DIR",
        )
        _require(
            not self.durable or self.save_every == 1,
            "save_every",
            self.save_every,
            "1 with --durable, which saves each version",
        )

    def _check_fragments(self) -> None:
        pieces, steps, delay = self.num_fragments, self.sync_every, self.least_delay
        _require(
            steps >= pieces,
            "sync_every",
            steps,
            f"at least --num-fragments, which is {pieces}: each fragment has a step of its own",
        )
        _require(
            self.fragment_plan is None or self.fragment_pattern == "strided",
            "fragment_pattern",
            self.fragment_pattern,
            f"left out with --fragment-plan {self.fragment_plan}, which says where each parameter goes",
        )
        interval = steps // pieces
        _require(
            delay < interval,
            "fragment_sync_delay",
            delay,
            f"below {interval}, the steps between two fragments (--sync-every {steps} over "
            f"--num-fragments {pieces})",
        )
        _require(
            0 <= self.fragment_update_alpha <= 1,
            "fragment_update_alpha",
            self.fragment_update_alpha,
            "in [0, 1]",
        )
        _require(
            self.fragment_merge == "alpha" or not self.fragment_update_alpha,
            "fragment_update_alpha",
            self.fragment_update_alpha,
            "left out with --fragment-merge rebase, which keeps all local steps",
        )
        longest = self.fragment_max_delay
        _require(
            longest is None or delay <= longest < steps,
            "fragment_max_delay",
            longest,
            f"from --fragment-sync-delay, which is {delay}, to below --sync-every, {steps}",
        )
        _require(
            not (self.deterministic and self.has_auto_delay),
            "fragment_sync_delay",
            AUTO,
            "a number with --deterministic: when a reply comes differs from run to run",
        )

    def _check_outer(self) -> None:
        _require(0 <= self.outer_momentum < 1, "outer_momentum", self.outer_momentum, "in [0, 1)")
        _require(
            0 <= self.dn_c <= 1 / self.dn_size,
            "dn_c",
            self.dn_c,
            f"in [0, 1/N], and N is {self.dn_size} (--dn-buffer)",
        )
        buffered = self.outer_name in ("dn", "fedbuff")
        _require(
            self.dn_buffer in (None, 1) or buffered,
            "dn_buffer",
            self.dn_buffer,
            f"left out, or 1: --outer {self.outer_name} has no buffer, each gradient is a step",
        )
        paper = self.outer_name == "dn" and self.dn_variant == "paper"
        # 0.9 is what was not given.
        _require(
            self.outer_name != "sgd" or self.outer_momentum in (0.0, 0.9),
            "outer_momentum",
            self.outer_momentum,
            "left out, or 0: --outer sgd has no momentum",
        )
        _require(
            not self.dn_c or paper,
            "dn_c",
            self.dn_c,
            "left out: only --outer dn with --dn-variant paper has it",
        )
        _require(
            self.dn_variant == "paper" or self.outer_name == "dn",
            "dn_variant",
            self.dn_variant,
            f"left out: --outer {self.outer_name} is not dn",
        )

    def _check_async(self) -> None:
        problems = {
            "min_workers": self.min_workers > 1,
            "quorum": self.quorum is not None,
            "deterministic": self.deterministic,
            "aggregate": self.aggregate != "mean",
            "weight_by": self.weight_by != "equal",
            "late": self.late != "carry",
        }
        for name, wrong in problems.items():
            _require(
                not wrong,
                name,
                getattr(self, name),
                "left out with --mode async, which applies each submission by itself",
            )
        fit = self.fewest_steps
        _require(
            self.dylu_min_steps is None or self.dylu,
            "dylu_min_steps",
            self.dylu_min_steps,
            "left out, or --dylu given",
        )
        _require(
            fit <= self.least_steps <= self.sync_every,
            "dylu_min_steps",
            self.least_steps,
            f"from {fit} ({self.num_fragments} fragments x (delay {self.least_delay} + 1)) to "
            f"--sync-every, which is {self.sync_every}",
        )

    def _check_sync(self) -> None:
        only = "left out, or --mode async given: "
        _require(
            not self.dylu, "dylu", "on", only + "in rounds every worker makes the same H steps"
        )
        _require(
            self.dylu_min_steps is None, "dylu_min_steps", self.dylu_min_steps, only + "see --dylu"
        )
        _require(
            self.staleness_weight == "none",
            "staleness_weight",
            self.staleness_weight,
            only + "a round's contributions start from one version",
        )
        _require(
            self.max_staleness is None,
            "max_staleness",
            self.max_staleness,
            only + "a round's contributions start from one version",
        )
        for name, usual in (("staging_slots", 2), ("staging_deadline", 30.0)):
            value = getattr(self, name)
            _require(value == usual, name, value, only + "rounds have no slots")
        for name, default in (("grace", 0.0), ("late", "carry")):
            value = getattr(self, name)
            _require(
                value == default or self.quorum is not None,
                name,
                value,
                "left out, or --quorum given: without it a round waits for everyone",
            )


_CHOICES: dict[str, tuple[str | None, ...]] = {
    "mode": MODES,
    "outer": (*OUTERS, None),
    "dn_variant": DN_VARIANTS,
    "staleness_weight": STALENESS_WEIGHTS,
    "fragment_pattern": PATTERNS,
    "fragment_merge": MERGES,
    "weight_by": WEIGHTS,
    "aggregate": AGGREGATES,
    "late": LATES,
    "recover": RECOVERIES,
}

_PATHS = {
    "fragment_plan": "file",
    "save_dir": "folder",
    "resume": "checkpoint, auto or none",
    "audit": "file",
}

# Lowest values of whole numbers.
_COUNTS = {
    "workers": 1,
    "min_workers": 1,
    "sync_every": 1,
    "num_fragments": 1,
    "fragment_sync_delay": 0,
    "fragment_max_delay": 0,
    "dn_buffer": 1,
    "max_staleness": 0,
    "dylu_min_steps": 1,
    "quorum": 1,
    "staging_slots": 1,
    "save_every": 1,
    "keep": 1,
    "chunk_elements": 1,
}
_MAY_BE_SILENT = {"fragment_max_delay", "dn_buffer", "max_staleness", "dylu_min_steps", "quorum"}


def _alternatives(choices: tuple[str | None, ...]) -> str:
    *others, last = (choice for choice in choices if choice)
    return f"{', '.join(others)} or {last}"


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _require(holds: bool, name: str, value: object, what: str) -> None:
    """Raise UsageError unless the condition holds, with a sentence in the words of the options."""
    if not holds:
        raise UsageError(f"--{name.replace('_', '-')} is {value}; it must be {what}.")


def _check_address(name: str, address: str, *, insecure: bool) -> None:
    wrong = UsageError(
        f"--{name} is {address!r}; it must be an address like tcp://127.0.0.1:8512 "
        "(port * picks a free one)."
    )
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or "/" in rest or not (port == "*" or port.isdecimal()):
        raise wrong
    if host.startswith("[") != host.endswith("]") or (":" in host and host[0] != "["):
        raise wrong
    if port != "*" and int(port) > 65535:
        raise wrong
    if not insecure and not _is_loopback(host.strip("[]")):
        raise UsageError(
            f"--{name} {address} can be reached from other machines, and there is no "
            "authentication: anyone who reaches it could change the model. Bind to 127.0.0.1 and "
            "use an SSH tunnel, or give --insecure if you trust everyone on that network."
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
