"""A run under schedules, restarted and steered on its way, beside the formulas in a plain loop."""

from pathlib import Path
from typing import Any

import pytest
import torch

from diloco_broker import Broker, BrokerConfig
from diloco_worker import DiLoCoClient
from kit.process_kit import LOCAL

# Learning rate and momentum of each step, written down. In six rounds the rate falls from 0.8 to 0.2 and
# the momentum rises from 0.3 to 0.9; after the fourth step the rate is said to fall to 0.4 in ten.
RATES = [(0.8, 0.3), (0.7, 0.4), (0.6, 0.5), (0.5, 0.6), (0.64, 0.7), (0.6, 0.8), (0.56, 0.9)]
SCHEDULES = {"outer_lr": 0.8, "outer_lr_schedule": "linear:6:0.25"}
WARMUP = {"outer_momentum_warmup": "linear:6:0.3"}
STEERED = {"outer_lr_schedule": "linear:10:0.5"}


@pytest.mark.parametrize(
    "options",
    [WARMUP, {"mode": "async", "outer": "sgd", "outer_momentum_warmup": "constant"}],
    ids=["rounds", "asynchronous, no momentum"],
)
def test_steps_follow_schedules_through_a_restart(options: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(7, 5)
    theta = {name: value.detach().clone() for name, value in model.named_parameters()}
    m = {name: torch.zeros_like(value) for name, value in theta.items()}
    config = BrokerConfig(**{**LOCAL, **SCHEDULES, **options, "save_dir": str(tmp_path)})

    def steps(client: DiLoCoClient, first: int, last: int) -> None:
        for lr, momentum in RATES[first:last]:
            gradient = {name: torch.randn_like(value) for name, value in theta.items()}
            client.push(gradient)
            got = client.pull()
            for name, g in gradient.items():
                m[name] = momentum * m[name] + g
                has_momentum = options is WARMUP
                theta[name] -= lr * (g + momentum * m[name] if has_momentum else g)
                torch.testing.assert_close(got.tensors[name], theta[name], rtol=1e-5, atol=1e-5)

    for first, last in ((0, 3), (3, len(RATES))):
        with (
            Broker(config) as broker,
            DiLoCoClient(broker.address, worker_id="w", timeout=20) as client,
        ):
            client.join(model)
            steps(client, first, min(last, 4))
            if last > 4:
                assert client.control("set", **STEERED).ok
                steps(client, 4, last)
