"""Training scripts for other people's frameworks: run in two processes, killed and resumed once.

A script is `python SCRIPT NAME`, with DILOCO_SERVER in its environment. It trains the model of
`kit.tiny_task` for STEPS steps on the examples of NAME, saves a checkpoint after each SAVE_EVERY steps,
goes on from the newest, calls `tiny_task.die_if_asked(step)` after each step, and ends with
`tiny_task.write_result(name, model)`.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kit.paths import KIT
from kit.process_kit import Processes
from kit.tiny_task import DIES_AT

PLAIN = KIT / "plain_script.py"
# A round waits for a killed worker until it is back, so that not a bit depends on the moment.
PATIENT = {
    "workers": 2,
    "min_workers": 2,
    "sync_every": 4,
    "disconnect_grace": 0.2,
    "chunk_elements": 4096,
}

# Seconds to import, in each of five processes.
HEAVY = ("transformers.trainer", "peft", "lightning")
# Of one script, on a machine that has much else to do.
WITHIN_S = 150.0


def needs(
    *libraries: str, how: str = "`make test-integrations` installs it"
) -> pytest.MarkDecorator:
    """Skips, with the reason, tests of libraries that are not installed."""
    missing = [name for name in libraries if find_spec(name) is None]
    return pytest.mark.skipif(
        bool(missing), reason=f"{', '.join(missing)} cannot be imported; {how}"
    )


def trained(
    processes: Processes, script: Path = PLAIN, dies_at: int | None = None
) -> dict[str, Tensor]:
    """The tensors of worker b's model behind a run of two.

    After step `dies_at` worker a kills itself, and is started again.
    """
    processes.begin_with(*(name for name in HEAVY if find_spec(name.partition(".")[0])))
    address = processes.broker(**PATIENT).address()
    env = {"DILOCO_SERVER": address}
    b = processes.run(str(script), "b", **env)
    if dies_at is not None:
        first = processes.run(str(script), "a", **env, **{DIES_AT: str(dies_at)})
        assert first.ends(WITHIN_S) == -9, first.output
    a = processes.run(str(script), "a", **env)
    for child in (a, b):
        assert child.ends(WITHIN_S) == 0, child.output
    result: dict[str, Tensor] = torch.load(processes.folder / "b.pt", weights_only=True)
    return result
