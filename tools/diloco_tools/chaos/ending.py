"""The end of a run of the drill: everybody leaves by himself, then everybody pulls the same version."""

from __future__ import annotations

import json
import time

from torch import Tensor

from diloco_protocol.errors import DilocoError
from diloco_tools.chaos.report import Ending
from diloco_tools.chaos.run_watch import Broken, RunWatch
from diloco_tools.chaos.worker import CONTEXT, checksum, named
from diloco_tools.demo.model import GPTConfig, build_model, validation_loss
from diloco_worker import DiLoCoClient, GlobalParameters

LEAVE_WITHIN_S = 40.0
PULL_WITHIN_S = 20.0
EXIT_WITHIN_S = 30.0
BROKER_EXIT_WITHIN_S = 10.0


def bring_to_an_end(watch: RunWatch, held_out: tuple[Tensor, Tensor]) -> Ending:
    """Have everybody leave, pull what there is, and stop the broker.

    Args:
        held_out: windows of text and what comes next, for the loss.

    Raises:
        Broken: somebody hangs.
    """
    crew = watch.crew
    staying = [life for life in crew.lives if not life.was_killed]
    crew.finish.touch()
    watch.wait_until(
        lambda: all(life.ended_at is not None for life in staying),
        LEAVE_WITHIN_S,
        f"Not everybody left within {LEAVE_WITHIN_S:g} s of being asked to.",
    )
    try:
        with DiLoCoClient(crew.address, timeout=PULL_WITHIN_S) as observer:
            final = observer.pull()
    except DilocoError as error:
        raise Broken(f"The final version cannot be pulled: {error}") from None
    crew.pull.touch()
    until = time.monotonic() + EXIT_WITHIN_S
    exits = {life.name: life.child.wait(until - time.monotonic()) for life in staying}
    hung = [name for name, code in exits.items() if code is None]
    if hung:
        raise Broken(f"{', '.join(hung)} did not end within {EXIT_WITHIN_S:g} s of leaving.")
    results = {
        life.name: json.loads(life.result.read_text())
        for life in staying
        if life.pulls and life.result.exists()
    }
    began = time.monotonic()
    crew.broker.process.terminate()
    broker_exit = crew.broker.wait(BROKER_EXIT_WITHIN_S)
    return Ending(
        named(final),
        checksum(final),
        {name: result["checksum"] for name, result in results.items()},
        loss_of(final, held_out),
        exits,
        broker_exit,
        time.monotonic() - began,
    )


def loss_of(final: GlobalParameters, held_out: tuple[Tensor, Tensor]) -> float:
    """Mean loss of these parameters, nats per byte."""
    model = build_model(0, GPTConfig(context=CONTEXT))
    model.load_state_dict(final.tensors)
    return validation_loss(model, *held_out)
