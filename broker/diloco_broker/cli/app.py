"""`diloco-broker`: the daemon's command line."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from diloco_broker.cli import checkpoints, operator, plan
from diloco_broker.cli.dashboard_process import Dashboard
from diloco_protocol.addresses import DEFAULT_CONTROL_ADDRESS, DEFAULT_FEED_ADDRESS
from diloco_protocol.errors import UsageError

if TYPE_CHECKING:
    from diloco_broker.shell.loop import Broker

# Whatever imports torch is imported where it is used: that takes seconds, which no other command has.

DASHBOARD_PORT = 8514
# Exit code where the run is over and a service manager should leave the broker alone.
RUN_IS_OVER = 3

app = typer.Typer(
    help="Average the pseudo-gradients of DiLoCo workers and hand global parameters back.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def main() -> None:
    """Average the pseudo-gradients of DiLoCo workers and hand global parameters back."""


_RUN = "The run"
_OUTER = "Outer optimizer"
_ASYNC = "Asynchronous mode"
_FRAGMENTS = "Streaming fragments"
_REDUCING = "Rounds and reducing"
_SAVING = "Checkpoints"
_WIRE = "Wire and liveness"


def _option(text: str, panel: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel)


class _WithPort(TyperCommand):
    """Takes `--dashboard` with a port behind it or without, which typer has no option for."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for place in range(len(args) - 1, -1, -1):
            if args[place] == "--dashboard" and not "".join(args[place + 1 : place + 2]).isdigit():
                args.insert(place + 1, str(DASHBOARD_PORT))
        return super().parse_args(ctx, args)


@app.command(cls=_WithPort)
def serve(
    mode: Annotated[
        str, _option("sync: rounds, all together; async: each worker by itself.", _RUN)
    ] = "sync",
    workers: Annotated[
        int,
        _option("Round one waits for so many workers; in async mode, how many are planned.", _RUN),
    ] = 1,
    min_workers: Annotated[
        int, _option("A round never closes with fewer contributions.", _RUN)
    ] = 1,
    model: Annotated[
        Path | None,
        _option(
            "Parameters to begin with: .safetensors, a .pt state dict, or a Hugging Face folder. "
            "Without it the first worker provides them.",
            _RUN,
        ),
    ] = None,
    sync_every: Annotated[
        int, _option("H: optimizer steps of a worker between two pushes of a fragment.", _RUN)
    ] = 500,
    outer: Annotated[
        str | None,
        _option(
            "nesterov, dn (Delayed Nesterov), fedbuff or sgd. "
            "Default: nesterov in sync, dn in async.",
            _OUTER,
        ),
    ] = None,
    outer_lr: Annotated[float, _option("Learning rate of the outer optimizer.", _OUTER)] = 0.7,
    outer_momentum: Annotated[float, _option("Momentum of the outer optimizer.", _OUTER)] = 0.9,
    nesterov: Annotated[
        bool, _option("Nesterov's form of the momentum, as in the paper.", _OUTER)
    ] = True,
    dn_buffer: Annotated[
        int | None,
        _option(
            "N of dn and fedbuff: gradients to a momentum step. "
            "Default: the workers in async, 1 in sync.",
            _OUTER,
        ),
    ] = None,
    dn_c: Annotated[float, _option("c of Delayed Nesterov, from 0 to 1/N.", _OUTER)] = 0.0,
    dn_variant: Annotated[
        str, _option("paper, or direct, which counts gradients twice.", _OUTER)
    ] = "paper",
    staleness_weight: Annotated[
        str, _option("none, or poly: s versions old counts (1 + s)^-1/2.", _ASYNC)
    ] = "none",
    max_staleness: Annotated[
        int | None, _option("Refuse pushes that start from older versions.", _ASYNC)
    ] = None,
    dylu: Annotated[
        bool,
        _option("Dynamic Local Updates: fewer steps for slower workers.", _ASYNC, "--dylu"),
    ] = False,
    dylu_min_steps: Annotated[
        int | None, _option("Least steps of a slow worker. Default: as few as fit.", _ASYNC)
    ] = None,
    staging_slots: Annotated[int, _option("Submissions under way at a time.", _ASYNC)] = 2,
    staging_deadline: Annotated[
        float,
        _option("Seconds without progress after which one loses its slot to others.", _ASYNC),
    ] = 30.0,
    num_fragments: Annotated[
        int, _option("P: the model travels in so many parts, one after the other.", _FRAGMENTS)
    ] = 1,
    fragment_pattern: Annotated[
        str,
        _option("strided (layers i, i+P, ...), contiguous or balanced (by bytes).", _FRAGMENTS),
    ] = "strided",
    fragment_plan: Annotated[
        Path | None,
        _option(
            "A split of one's own: JSON, {name or pattern of names: fragment}. Look at it with "
            "diloco-broker plan.",
            _FRAGMENTS,
        ),
    ] = None,
    fragment_sync_delay: Annotated[
        str | None,
        _option(
            "tau: steps between sending a fragment and merging the reply; or auto: merge it as soon "
            "as it is here. Default: auto with several fragments (0 with --deterministic), else 0.",
            _FRAGMENTS,
        ),
    ] = None,
    fragment_update_alpha: Annotated[
        float, _option("Weight of the local parameters in that merge, 0 to 1.", _FRAGMENTS)
    ] = 0.0,
    fragment_merge: Annotated[
        str, _option("alpha, or rebase: keep the steps made since sending.", _FRAGMENTS)
    ] = "alpha",
    fragment_max_delay: Annotated[
        int | None,
        _option(
            "Steps after which a worker waits for a late reply. Default: tau; with auto H/P.",
            _FRAGMENTS,
        ),
    ] = None,
    quorum: Annotated[
        int | None,
        _option("Close a round --grace seconds after so many are in. Default: all.", _REDUCING),
    ] = None,
    grace: Annotated[
        float,
        _option(
            "Seconds to wait for the rest after the quorum; in async mode, for company after "
            "the first.",
            _REDUCING,
        ),
    ] = 0.0,
    late: Annotated[
        str, _option("carry late work into the next round, or drop it.", _REDUCING)
    ] = "carry",
    deterministic: Annotated[
        bool,
        _option(
            "The same bits in any order of arrival; keeps whole submissions.",
            _REDUCING,
            "--deterministic",
        ),
    ] = False,
    weight_by: Annotated[
        str, _option("What a contribution weighs: equal, tokens or samples.", _REDUCING)
    ] = "equal",
    aggregate: Annotated[
        str,
        _option("mean, or clip-median-norm: none counts longer than the median.", _REDUCING),
    ] = "mean",
    save_dir: Annotated[
        Path, _option("Folder for checkpoints; the run in it is gone on with.", _SAVING)
    ] = Path("diloco-run"),
    no_save: Annotated[
        bool, _option("Write and read no checkpoints.", _SAVING, "--no-save")
    ] = False,
    save_every: Annotated[int, _option("Rounds between two checkpoints.", _SAVING)] = 1,
    keep: Annotated[int, _option("Checkpoints that are kept.", _SAVING)] = 3,
    durable: Annotated[
        bool,
        _option(
            "Save each version before anybody gets it; rounds take longer.", _SAVING, "--durable"
        ),
    ] = False,
    resume: Annotated[
        str, _option("auto: the newest sound one; none; or a checkpoint's path.", _SAVING)
    ] = "auto",
    recover: Annotated[
        str, _option("adopt newer versions that workers hold, or rewind.", _SAVING)
    ] = "adopt",
    audit: Annotated[
        Path | None,
        _option(
            "Append to this file, for each version, a line of JSON: what it contains.", _SAVING
        ),
    ] = None,
    bind: Annotated[
        str, _option("Control address; port * picks a free one and prints it.", _WIRE)
    ] = DEFAULT_CONTROL_ADDRESS,
    feed: Annotated[str, _option("Address of the status feed.", _WIRE)] = DEFAULT_FEED_ADDRESS,
    wire_dtype: Annotated[
        str, _option("Dtype of pseudo-gradients on the way up: fp32, bf16, fp16.", _WIRE)
    ] = "bf16",
    reply_dtype: Annotated[
        str, _option("Dtype of parameters on the way down: fp32, bf16, fp16.", _WIRE)
    ] = "fp32",
    heartbeat_timeout: Annotated[
        float, _option("Seconds of silence after which a worker counts as dead; 0: never.", _WIRE)
    ] = 120.0,
    stall_timeout: Annotated[
        float,
        _option("Seconds without a step after which a worker is not waited for; 0: never.", _WIRE),
    ] = 600.0,
    disconnect_grace: Annotated[
        float, _option("Seconds a worker has to come back after its connection broke.", _WIRE)
    ] = 1.0,
    recover_wait: Annotated[
        float,
        _option(
            "Seconds to wait after the start for workers that may hold the run, or newer rounds of it.",
            _WIRE,
        ),
    ] = 10.0,
    insecure: Annotated[
        bool,
        _option(
            "Allow an address other machines reach, without authentication.", _WIRE, "--insecure"
        ),
    ] = False,
    dashboard: Annotated[
        int | None,
        typer.Option(
            metavar="[PORT]",
            min=0,
            max=65535,
            help=f"Show a web page, too, on PORT or {DASHBOARD_PORT}; the log says where.",
            rich_help_panel=_WIRE,
        ),
    ] = None,
    verbose: Annotated[bool, _option("Log more.", _WIRE, "--verbose")] = False,
) -> None:
    """Serve a run until SIGTERM or Ctrl-C. The run survives both: workers train on and come back.

    A second signal ends at once. Exit codes: 0 ended by a signal or by
    shutdown --restarting, 3 the run is over (diloco-broker shutdown), 2 it
    could not start, 1 an error.
    """
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(asctime)s %(levelname)-7s %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )
    from diloco_broker.config import BrokerConfig
    from diloco_broker.shell.loop import Broker
    from diloco_broker.shell.process_memory import keep_freed_memory, keep_what_is_there
    from diloco_broker.storage.model_file import load_model

    try:
        if no_save and resume not in ("auto", "none"):
            raise UsageError(f"--resume {resume} and --no-save exclude each other; leave one out.")
        config = BrokerConfig(
            mode=mode,
            workers=workers,
            min_workers=min_workers,
            sync_every=sync_every,
            outer=outer,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            nesterov=nesterov,
            dn_buffer=dn_buffer,
            dn_c=dn_c,
            dn_variant=dn_variant,
            staleness_weight=staleness_weight,
            max_staleness=max_staleness,
            dylu=dylu,
            dylu_min_steps=dylu_min_steps,
            num_fragments=num_fragments,
            fragment_pattern=fragment_pattern,
            fragment_plan=None if fragment_plan is None else str(fragment_plan),
            fragment_sync_delay=_number_or_text(fragment_sync_delay),
            fragment_update_alpha=fragment_update_alpha,
            fragment_merge=fragment_merge,
            fragment_max_delay=fragment_max_delay,
            deterministic=deterministic,
            weight_by=weight_by,
            aggregate=aggregate,
            quorum=quorum,
            grace=grace,
            late=late,
            staging_slots=staging_slots,
            staging_deadline=staging_deadline,
            save_dir=None if no_save else str(save_dir),
            save_every=save_every,
            keep=keep,
            resume=resume,
            recover=recover,
            durable=durable,
            audit=None if audit is None else str(audit),
            wire_dtype=wire_dtype,
            reply_dtype=reply_dtype,
            bind=bind,
            feed=feed,
            heartbeat_timeout=heartbeat_timeout,
            stall_timeout=stall_timeout,
            disconnect_grace=disconnect_grace,
            recover_wait=recover_wait,
            insecure=insecure,
        )
        broker = Broker(config, load_model(model) if model else None)
    except UsageError as error:
        typer.echo(f"diloco-broker: {error}", err=True)
        raise typer.Exit(2) from None
    if model and broker.resumes:
        logging.getLogger("diloco.broker").warning(
            "--model %s is not used: the run in %s goes on. (--resume none begins afresh.)",
            model,
            save_dir if resume == "auto" else resume,
        )
    keep_freed_memory()
    keep_what_is_there()
    _end_on_signals(broker)
    typer.echo(f"control {broker.address}")
    typer.echo(f"feed {broker.feed_address}")
    source = "" if model else "; the first one provides the parameters"
    noun = "worker" if workers == 1 else "workers"
    waiting = f"Waiting for {workers} {noun}{source}."
    if broker.resumes:
        folder = save_dir if resume == "auto" else resume
        waiting = f"The run in {folder} goes on when its workers are back."
    typer.echo(f"{waiting} Watch with: diloco-top {broker.feed_address}")
    sys.stdout.flush()
    page = None
    if dashboard is not None:
        page = Dashboard(broker.feed_address, broker.address, dashboard)
    try:
        broker.run()
    finally:
        if page is not None:
            page.close()
    if broker.run_is_over:
        raise typer.Exit(RUN_IS_OVER)


def _number_or_text(text: str | None) -> int | str | None:
    """A whole number as one; the configuration says what is wrong with other texts."""
    return int(text) if text is not None and text.isdecimal() else text


def _end_on_signals(broker: Broker) -> None:
    seen: list[int] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if seen:
            os._exit(128 + number)
        seen.append(number)
        broker.request_stop(f"it received {signal.Signals(number).name}", restarting=True)

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)


_others: tuple[Callable[..., None], ...] = (
    *operator.COMMANDS,
    checkpoints.export,
    checkpoints.inspect,
    plan.plan,
)
for command in _others:
    app.command(command.__name__.rstrip("_"))(command)
