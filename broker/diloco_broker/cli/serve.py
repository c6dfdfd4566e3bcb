"""`diloco-broker serve`: runs the broker until a signal or `diloco-broker shutdown` stops it."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diloco_broker.cli import failing_in_a_sentence
from diloco_broker.cli.config_options import DEFAULTS, MOST_USED_PANEL, all_declared, as_number
from diloco_broker.cli.dashboard_process import Dashboard, key_of_page
from diloco_broker.config.declaration import RUN, SAVING, WIRE
from diloco_protocol.clients.address_file import write_address
from diloco_protocol.clients.command_line import with_options
from diloco_protocol.clients.help_page import Command
from diloco_protocol.errors import UsageError

if TYPE_CHECKING:
    from diloco_broker.config import BrokerConfig
    from diloco_broker.shell.broker import Broker, Service

# Modules that import torch, which takes seconds, are imported where they are used.

DASHBOARD_PORT = 8514
# Exit code when the run is over and a service manager should not restart the broker.
RUN_IS_OVER = 3
# The command saves by default; the class `Broker` does not.
_DEFAULTS = DEFAULTS | {"save_dir": Path("diloco-run")}


class WithPort(Command):
    """Parses `--dashboard` with an optional port, which typer does not support."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for place in range(len(args) - 1, -1, -1):
            if args[place] == "--dashboard" and not "".join(args[place + 1 : place + 2]).isdigit():
                args.insert(place + 1, str(DASHBOARD_PORT))
        return super().parse_args(ctx, args)


@with_options(all_declared(_DEFAULTS))
def serve(  # noqa: PLR0917  each is an option
    context: typer.Context,
    model: Annotated[
        Path | None,
        typer.Option(
            help="Initial parameters: a .safetensors file, a .pt state dict, or a Hugging Face folder. "
            "Default: those of the first worker.",
            rich_help_panel=MOST_USED_PANEL,
        ),
    ] = None,
    no_save: Annotated[
        bool,
        typer.Option(
            "--no-save", help="Do not write or read checkpoints.", rich_help_panel=SAVING.title
        ),
    ] = False,
    dashboard: Annotated[
        int | None,
        typer.Option(
            metavar="[PORT]",
            min=0,
            max=65535,
            help=f"Also serve a web page on PORT, default {DASHBOARD_PORT}; the log has its address.",
            rich_help_panel=MOST_USED_PANEL,
        ),
    ] = None,
    address_file: Annotated[
        Path | None,
        typer.Option(
            help="File to which the broker writes its addresses. Workers with "
            "DILOCO_SERVER=file:///PATH find it there, also after it has moved.",
            rich_help_panel=WIRE.title,
        ),
    ] = None,
    over_is_success: Annotated[
        bool,
        typer.Option(
            "--over-is-success",
            help="Exit with 0 instead of 3 when the run is over, for launchers that treat any non-zero "
            "exit code as a failure.",
            rich_help_panel=RUN.title,
        ),
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Check the options and exit.", rich_help_panel=RUN.title)
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Log more.", rich_help_panel=WIRE.title)
    ] = False,
    **options: Any,
) -> None:
    """Serve a run until SIGTERM or Ctrl-C. The run survives both: workers continue and reconnect.

    A second signal exits at once. Exit codes: 0 stopped by a signal, by shutdown
    --restarting, or by --max-rounds, --token-budget or --max-time, 3 the run
    is over (diloco-broker shutdown), 2 it could not start, 1 an error.
    """
    log_to_stderr(verbose)
    with failing_in_a_sentence():
        if no_save:
            _save_nothing(options)
        keys: Path | None = options["keys"]
        key = key_of_page(keys) if keys is not None and dashboard is not None else None
        config = config_of(options, context)
        if check:
            typer.echo("The options are valid.")
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
    """Write the address file. It stays when the broker exits; its next incarnation replaces it."""
    try:
        write_address(file, broker.address, broker.feed_address)
    except OSError as error:
        raise UsageError(
            f"--address-file {file} cannot be written: {error.strerror}; give a file in a folder that "
            "is writable by this user."
        ) from None


def _save_nothing(options: dict[str, Any]) -> None:
    resume = options["resume"]
    if resume not in ("auto", "none"):
        raise UsageError(f"--resume {resume} and --no-save exclude each other; omit one of them.")
    options["save_dir"] = None


def config_of(options: dict[str, Any], context: typer.Context) -> BrokerConfig:
    """The validated configuration of these options; raises UsageError.

    With a preset, prints the options that it sets.
    """
    from diloco_broker.config import BrokerConfig
    from diloco_broker.config.presets import preset, summary

    name = options.pop("preset")
    delay = options["fragment_sync_delay"]
    if delay is not None and delay.isdecimal():  # BrokerConfig rejects words other than auto
        options["fragment_sync_delay"] = int(delay)
    options |= {each: as_number(options[each]) for each in ("grace", "max_delta_norm")}
    if name is None:
        return BrokerConfig(**options)
    for each in preset(name):
        source = context.get_parameter_source(each)
        if source is not None and source.name == "DEFAULT":
            del options[each]
    config = BrokerConfig.from_preset(name, **options)
    typer.echo(summary(name, options))
    return config


def _broker(config: BrokerConfig, model: Path | None) -> Broker:
    from diloco_broker.shell.broker import Broker
    from diloco_broker.standby.record import read_standby
    from diloco_broker.storage.model_file import load_model

    found = None if config.save_dir is None else read_standby(Path(config.save_dir))
    if found is not None and found.term is None:
        raise UsageError(
            f"{config.save_dir} is the folder of a standby that has not taken over; start it with "
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
        waiting = "It continues when its workers reconnect."
        most = broker.config.max_rounds
        if most is not None and most <= broker.rounds:
            waiting = (
                f"It ends at once: it has made {broker.rounds} rounds, and --max-rounds {most} counts "
                "from its beginning. To continue, give a larger number."
            )
        if model:
            text = "Ignored --model %s: the broker resumed %s (--fresh starts a new run)."
            logging.getLogger("diloco.broker").warning(text, model, broker.resumed)
    else:
        typer.echo(f"A new run, saved in {folder}." if folder else "A new run, which is not saved.")
        source = "" if model else "; the first one provides the parameters"
        waiting = f"Waiting for {workers} worker{'s'[: workers != 1]}{source}."
    typer.echo(f"{waiting} Watch with: diloco-top {broker.feed_address}{keys_of(broker)}")
    if broker.config.standby:
        typer.echo(
            "Workers can join after the standby has connected; start it with the options of this "
            f"broker: diloco-broker standby --of {broker.address}"
        )
    sys.stdout.flush()


def log_to_stderr(verbose: bool) -> None:
    """Log to stderr with the time; standard output is for addresses."""
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(asctime)s %(levelname)-7s %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )


def prepare(broker: Service) -> None:
    """Prepare this process for serving, and print the addresses."""
    from diloco_broker.shell.process_memory import (
        allow_connections,
        keep_freed_memory,
        keep_what_is_there,
    )

    allow_connections(broker.config.max_workers)
    keep_freed_memory()
    keep_what_is_there()
    end_on_signals(broker)
    typer.echo(f"control {broker.address}")
    typer.echo(f"feed {broker.feed_address}")


def end_on_signals(broker: Service) -> None:
    """Make the first SIGTERM or SIGINT stop the broker cleanly, and the second exit at once."""
    seen: list[int] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if seen:
            os._exit(128 + number)
        seen.append(number)
        broker.request_stop(f"it received {signal.Signals(number).name}", restarting=True)

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)


def keys_of(broker: Service) -> str:
    """The --keys option that a command to this broker needs; empty if it requires no keys."""
    keys = broker.config.keys
    return f" --keys {shlex.quote(keys)}" if keys else ""
