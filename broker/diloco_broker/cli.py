"""`diloco-broker`: the daemon's command line."""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from diloco_broker.config import DEFAULT_BIND, DEFAULT_FEED, BrokerConfig
from diloco_broker.loop import Broker
from diloco_broker.model_file import load_model
from diloco_protocol.errors import UsageError

app = typer.Typer(
    help="Average the pseudo-gradients of DiLoCo workers and hand global parameters back.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def main() -> None:
    """Average the pseudo-gradients of DiLoCo workers and hand global parameters back."""


@app.command()
def serve(
    workers: Annotated[int, typer.Option(help="Round one waits for so many workers.")] = 1,
    min_workers: Annotated[
        int, typer.Option(help="A round never closes with fewer contributions.")
    ] = 1,
    model: Annotated[
        Path | None,
        typer.Option(
            help="Parameters to begin with: .safetensors, a .pt state dict, or a Hugging Face "
            "folder. Without it the first worker provides them."
        ),
    ] = None,
    bind: Annotated[
        str, typer.Option(help="Control address; port * picks a free one and prints it.")
    ] = DEFAULT_BIND,
    feed: Annotated[str, typer.Option(help="Address of the status feed.")] = DEFAULT_FEED,
    sync_every: Annotated[
        int, typer.Option(help="H: optimizer steps of a worker between two pushes.")
    ] = 500,
    outer_lr: Annotated[float, typer.Option(help="Learning rate of the outer optimizer.")] = 0.7,
    outer_momentum: Annotated[float, typer.Option(help="Momentum of the outer optimizer.")] = 0.9,
    nesterov: Annotated[
        bool, typer.Option(help="Nesterov's form of the momentum, as in the paper.")
    ] = True,
    wire_dtype: Annotated[
        str, typer.Option(help="Dtype of pseudo-gradients on the way up: fp32, bf16, fp16.")
    ] = "bf16",
    reply_dtype: Annotated[
        str, typer.Option(help="Dtype of parameters on the way down: fp32, bf16, fp16.")
    ] = "fp32",
    heartbeat_timeout: Annotated[
        float,
        typer.Option(help="Seconds of silence after which a worker counts as dead; 0: never."),
    ] = 120.0,
    disconnect_grace: Annotated[
        float, typer.Option(help="Seconds a worker has to come back after its connection broke.")
    ] = 1.0,
    recover_wait: Annotated[
        float,
        typer.Option(
            help="Seconds to wait for all workers when one holds a version of an earlier run."
        ),
    ] = 10.0,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure", help="Allow an address other machines reach, without authentication."
        ),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log more.")] = False,
) -> None:
    """Serve a run until SIGTERM or Ctrl-C; a second signal ends at once."""
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(asctime)s %(levelname)-7s %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )
    try:
        config = BrokerConfig(
            workers=workers,
            min_workers=min_workers,
            sync_every=sync_every,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            nesterov=nesterov,
            wire_dtype=wire_dtype,
            reply_dtype=reply_dtype,
            bind=bind,
            feed=feed,
            heartbeat_timeout=heartbeat_timeout,
            disconnect_grace=disconnect_grace,
            recover_wait=recover_wait,
            insecure=insecure,
        )
        broker = Broker(config, load_model(model) if model else None)
    except UsageError as error:
        typer.echo(f"diloco-broker: {error}", err=True)
        raise typer.Exit(2) from None
    _end_on_signals(broker)
    typer.echo(f"control {broker.address}")
    typer.echo(f"feed {broker.feed_address}")
    source = "" if model else "; the first one provides the parameters"
    noun = "worker" if workers == 1 else "workers"
    typer.echo(
        f"Waiting for {workers} {noun}{source}. Watch with: diloco-top {broker.feed_address}"
    )
    sys.stdout.flush()
    broker.run()


def _end_on_signals(broker: Broker) -> None:
    seen: list[int] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if seen:
            os._exit(128 + number)
        seen.append(number)
        broker.request_stop(f"it received {signal.Signals(number).name}")

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
