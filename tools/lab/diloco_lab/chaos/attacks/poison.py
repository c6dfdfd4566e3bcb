"""One of five workers with a key sends pseudo-gradients that do harm; what becomes of the parameters.

Five workers pull parameters towards a target, each with noise of its own, so that what a round comes to
is known: the mean square of what is left is the loss. The broker is a real one, in this process, and so
are the connections.
"""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from diloco_broker import Broker, BrokerConfig
from diloco_lab.chaos.attacks.peers import Scene
from diloco_protocol import VersionId, messages
from diloco_protocol.errors import DilocoError
from diloco_protocol.records import from_plain
from diloco_worker import DiLoCoClient, manifest_of

WORKERS, ROUNDS, ELEMENTS = 5, 8, 1000
TARGET, NOISE, STEP = 1.0, 0.1, 0.5
PATIENCE_S = 30.0
NAME = "weight"
# What a defence may leave, in losses of five honest workers with the same rounds. One of five can shift
# a robust average within the spread of the others, which is a few times what their noise leaves.
MOST_TIMES = 5.0

Poison = Callable[[Tensor], Tensor]
POISONS: Mapping[str, Poison | None] = {
    "x100": lambda delta: 100 * delta,
    "sign-flipped": lambda delta: -delta,
    "constant": lambda delta: torch.full_like(delta, 10.0),
    "small, one way": lambda delta: torch.full_like(delta, delta.norm() / (2 * ELEMENTS**0.5)),
    "NaN": None,  # which our own worker would not send
}
DEFENCES: Mapping[str, dict[str, Any]] = {
    "none": {},
    "max-delta-norm auto": {"max_delta_norm": "auto"},
    "clip-median-norm": {"aggregate": "clip-median-norm"},
    "coordinate-median": {"aggregate": "coordinate-median"},
    "trimmed-mean": {"aggregate": "trimmed-mean"},
}
# What is known not to help: the norm of a pseudo-gradient says nothing of its direction, and what is
# small and always in one direction carries the parameters along it whatever is done (see POISON.md),
# though the loss hardly shows it.
HELPLESS = {
    ("max-delta-norm auto", "sign-flipped"),
    ("clip-median-norm", "sign-flipped"),
    ("clip-median-norm", "constant"),  # cut to the usual length, in a direction as bad
    *((defence, "small, one way") for defence in DEFENCES),
}


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ELEMENTS))


def honestly(delta: Tensor) -> Tensor:
    return delta


def final_loss(poison: Poison | None, defence: Mapping[str, Any]) -> tuple[float, int]:
    """The loss after all rounds, and how many of the last worker's pushes were refused.

    Without a `poison` the last worker speaks for itself, sends NaN in the first round, and leaves.
    """
    noise = torch.Generator().manual_seed(1)
    refused = 0
    config = BrokerConfig(
        workers=WORKERS - (poison is None),
        sync_every=1,
        outer="sgd",
        outer_lr=1.0,
        wire_dtype="fp32",
        bind="tcp://127.0.0.1:*",
        feed="tcp://127.0.0.1:*",
        **defence,
    )
    with Broker(config) as broker, contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(DiLoCoClient(broker.address, worker_id=f"w{n}", timeout=PATIENCE_S))
            for n in range(WORKERS - (poison is None))
        ]
        started = [client.join(Weights()) for client in clients]
        found = started[0]
        if poison is None:
            refused += is_nan_refused(broker.address)
        for number in range(ROUNDS):
            for client in clients:
                error = NOISE * torch.randn(ELEMENTS, generator=noise)
                delta = STEP * (found.tensors[NAME] - TARGET + error)
                if client is clients[-1] and poison is not None:
                    delta = poison(delta)
                try:
                    client.push({NAME: delta}, steps=1)
                except DilocoError:  # the round goes on without it
                    refused += 1
            found = clients[0].pull(after=number)
            for client in clients[1:]:
                with contextlib.suppress(DilocoError):  # its push was dropped
                    client.pull(after=number)
        return float((found.tensors[NAME] - TARGET).square().mean()), refused


def is_nan_refused(address: str) -> bool:
    """Join as the last worker, push NaN, and leave; whether the broker refuses it."""
    scene = Scene(address, seconds=PATIENCE_S)
    try:
        with scene.peer() as control, scene.peer() as bulk:
            control.say(messages.Join(f"w{WORKERS - 1}", manifest_of(Weights())))
            welcome = control.hear("welcome")
            if welcome is None:
                raise DilocoError("the last worker could not join")
            session = welcome["session"]
            bulk.say(messages.Credit(8, session))
            base = from_plain(VersionId, welcome["versions"][0], "version")
            control.say(
                messages.Push(session, 41, 0, 1, "fp32", base, buffers=messages.BUFFERS, steps=1)
            )
            if control.hear("grant") is None:
                raise DilocoError("the push was not granted")
            chunk = messages.encode(messages.Chunk(0, 0, session, 41))
            bulk.send(chunk, struct.pack("<f", math.nan) * ELEMENTS)
            answer = control.hear("error", "ack")
            control.say(messages.Leave(session))
            control.hear(within_s=0.5)
            return answer is not None and answer["kind"] == "error"
    finally:
        scene.close()


def results() -> list[dict[str, Any]]:
    """The loss of each poison under each defence, and of honest workers."""
    rows = []
    for defence, options in DEFENCES.items():
        honest, _ = final_loss(honestly, options)
        for name, poison in POISONS.items():
            loss, refused = final_loss(poison, options)
            rows.append(
                {
                    "defence": defence,
                    "poison": name,
                    "honest": honest,
                    "loss": loss,
                    "refused": refused,
                    "held": loss <= MOST_TIMES * honest,
                }
            )
    return rows


def is_defence(row: Mapping[str, Any]) -> bool:
    """Whether it should hold: NaN is refused by every broker."""
    if row["poison"] == "NaN":
        return True
    return row["defence"] != "none" and (row["defence"], row["poison"]) not in HELPLESS


def broken(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence for each poison that a defence has not held."""
    return [
        f"{each['poison']} under {each['defence']}: loss {each['loss']:.3g}, "
        f"that of honest workers {each['honest']:.3g}"
        for each in rows
        if not each["held"] and is_defence(each)
    ]


class Poisons:
    """The role "poison"."""

    def __init__(self, _: object) -> None:
        torch.set_num_threads(1)

    def results(self) -> dict[str, Any]:
        return {"rows": results()}
