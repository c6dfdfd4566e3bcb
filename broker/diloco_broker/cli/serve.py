"""`diloco-broker serve`: the daemon, until a signal or `diloco-broker shutdown` ends it."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diloco_broker.cli.config_options import DEFAULTS, MOST_USED_PANEL, all_declared
from diloco_broker.cli.dashboard_process import Dashboard, key_of_page
from diloco_broker.cli.failures import failing_in_a_sentence
from diloco_broker.config.declaration import RUN, SAVING, WIRE
from diloco_protocol.clients.address_file import write_address
from diloco_protocol.clients.command_line import with_options
from diloco_protocol.clients.help_page import Command
from diloco_protocol.errors import UsageError

if TYPE_CHECKING:
    from diloco_broker.config import BrokerConfig
    from diloco_broker.shell.broker import Broker, Service

# Whatever imports torch is imported where it is used: that takes seconds, which no other command has.

DASHBOARD_PORT = 8514
# Exit code where the run is over and a service manager should leave the broker alone.
RUN_IS_OVER = 3
# The daemon saves by itself, a `Broker` only where it is told.
_DEFAULTS = DEFAULTS | {"save_dir": Path("diloco-run")}


class WithPort(Command):
    """Takes `--dashboard` with a port behind it or without, which typer has no option for."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for place in range(len(args) - 1, -1, -1):
            if args[place] == "--dashboard" and not "".join(args[place + 1 : place + 2]).isdigit():
                args.insert(place + 1, str(DASHBOARD_PORT))
        return super().parse_args(ctx, args)


@with_options(all_declared(_DEFAULTS))
def serve(  # noqa: PLR0917  each is an option
    model: Annotated[
        Path | None,
        typer.Option(
            help="Parameters to begin with: .safetensors, a .pt state dict, or a Hugging Face folder. "
            "Without it the first worker provides them.",
            rich_help_panel=MOST_USED_PANEL,
        ),
    ] = None,
    no_save: Annotated[
        bool,
        typer.Option(
            "--no-save", help="Write and read no checkpoints.", rich_help_panel=SAVING.title
        ),
    ] = False,
    dashboard: Annotated[
        int | None,
        typer.Option(
            metavar="[PORT]",
            min=0,
            max=65535,
            help=f"Show a web page, too, on PORT or {DASHBOARD_PORT}; the log says where.",
            rich_help_panel=MOST_USED_PANEL,
        ),
    ] = None,
    address_file: Annotated[
        Path | None,
        typer.Option(
            help="Write the addresses of this broker there: workers with "
            "DILOCO_SERVER=file:///PATH find it, also where it moves to.",
            rich_help_panel=WIRE.title,
        ),
    ] = None,
    over_is_success: Annotated[
        bool,
        typer.Option(
            "--over-is-success",
            help="End with 0, not 3, when the run is over, for launchers that take any other code for a "
            "failure.",
            rich_help_panel=RUN.title,
        ),
    ] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Say whether the options are good, and serve nothing.",
            rich_help_panel=RUN.title,
        ),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Log more.", rich_help_panel=WIRE.title)
    ] = False,
    **options: Any,
) -> None:
    """Serve a run until SIGTERM or Ctrl-C. The run survives both: workers train on and come back.

    A second signal ends at once. Exit codes: 0 ended by a signal, by shutdown
    --restarting, or by --max-rounds, --token-budget or --max-time, 3 the run
    is over (diloco-broker shutdown), 2 it could not start, 1 an error.
    """
    log_to_stderr(verbose)
    with failing_in_a_sentence():
        if no_save:
            _save_nothing(options)
        keys: Path | None = options["keys"]
        key = key_of_page(keys) if keys is not None and dashboard is not None else None
        config = config_of(options)
        if check:
            typer.echo("The options are good.")
            raise typer.Exit
        broker = _broker(config, model)
        if address_file is not None:
            _write(address_file, broker)
    prepare(broker)
    _greet(broker, options, model)
    page = None
    if dashboard is not None:
        page = Dashboard(broker.feed_address, broker.address, dashboard, key)
    try:
        broker.run()
    finally:
        if page is not None:
            page.close()
    if broker.run_is_over and not broker.is_complete and not over_is_success:
        raise typer.Exit(RUN_IS_OVER)


def _write(file: Path, broker: Broker) -> None:
    """Kept when the broker ends: its next life replaces it, and meanwhile it costs a worker nothing."""
    try:
        write_address(file, broker.address, broker.feed_address)
    except OSError as error:
        raise UsageError(
            f"--address-file {file} cannot be written: {error.strerror}; give a file in a folder that "
            "this user may write in."
        ) from None


def _save_nothing(options: dict[str, Any]) -> None:
    resume = options["resume"]
    if resume not in ("auto", "none"):
        raise UsageError(f"--resume {resume} and --no-save exclude each other; leave one out.")
    options["save_dir"] = None


def config_of(options: dict[str, Any]) -> BrokerConfig:
    """The options of the command line, checked; raises UsageError."""
    from diloco_broker.config import BrokerConfig

    delay = options["fragment_sync_delay"]
    if delay is not None and delay.isdecimal():  # the configuration refuses other texts than auto
        options["fragment_sync_delay"] = int(delay)
    with contextlib.suppress(TypeError, ValueError):  # None, or a text, as above
        options["max_delta_norm"] = float(options["max_delta_norm"])
    return BrokerConfig(**options)


def _broker(config: BrokerConfig, model: Path | None) -> Broker:
    from diloco_broker.shell.broker import Broker
    from diloco_broker.standby.record import read_standby
    from diloco_broker.storage.model_file import load_model

    found = None if config.save_dir is None else read_standby(Path(config.save_dir))
    if found is not None and found.term is None:
        raise UsageError(
            f"{config.save_dir} is the folder of a standby, which has not taken over: start it with "
            "diloco-broker standby, or give this broker another --save-dir."
        )
    term = 0 if found is None else found.term or 0
    return Broker(config, load_model(model) if model else None, term=term)


def _greet(broker: Broker, options: dict[str, Any], model: Path | None) -> None:
    workers, resume = options["workers"], options["resume"]
    folder = broker.config.save_dir
    if broker.resumed:
        source = folder if resume == "auto" else resume
        typer.echo(
            f"Resuming {broker.resumed} (in {source}). For a new run: --fresh, which moves this one "
            "aside, or another --save-dir."
        )
        waiting = "It goes on when its workers are back."
        most = broker.config.max_rounds
        if most is not None and most <= broker.rounds:
            waiting = (
                f"It ends at once: --max-rounds {most} counts from its beginning, and it has made "
                f"{broker.rounds}. To go on give more than that."
            )
        if model:
            text = "--model %s is not used: the broker resumed %s (--fresh begins a new run)."
            logging.getLogger("diloco.broker").warning(text, model, broker.resumed)
    else:
        typer.echo(f"A new run, saved in {folder}." if folder else "A new run, which is not saved.")
        source = "" if model else "; the first one provides the parameters"
        waiting = f"Waiting for {workers} worker{'s'[: workers != 1]}{source}."
    typer.echo(f"{waiting} Watch with: diloco-top {broker.feed_address}{keys_of(broker)}")
    if broker.config.standby:
        typer.echo(
            "Workers are let in once the standby is here: diloco-broker standby --of "
            f"{broker.address}, with the options of this broker."
        )
    sys.stdout.flush()


def log_to_stderr(verbose: bool) -> None:
    """What a daemon says stands in its log with the time; standard output is for addresses."""
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(asctime)s %(levelname)-7s %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )


def prepare(broker: Service) -> None:
    """Fit this process for serving, and print the addresses."""
    from diloco_broker.shell.open_files import allow_connections
    from diloco_broker.shell.process_memory import keep_freed_memory, keep_what_is_there

    allow_connections(broker.config.max_workers)
    keep_freed_memory()
    keep_what_is_there()
    end_on_signals(broker)
    typer.echo(f"control {broker.address}")
    typer.echo(f"feed {broker.feed_address}")


def end_on_signals(broker: Service) -> None:
    """Let the first SIGTERM or SIGINT stop the broker in good order, and the second end it at once."""
    seen: list[int] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if seen:
            os._exit(128 + number)
        seen.append(number)
        broker.request_stop(f"it received {signal.Signals(number).name}", restarting=True)

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)


def keys_of(broker: Service) -> str:
    """The option that a command to this broker needs."""
    keys = broker.config.keys
    return f" --keys {shlex.quote(keys)}" if keys else ""
