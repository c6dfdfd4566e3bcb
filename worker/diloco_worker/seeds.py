"""Another seed for each copy of an unmodified script, so that each shuffles in an order of its own.

A script seeds torch alike wherever it runs, and torch itself begins with the same seed in each process,
so all workers of it would train on the same batches.
"""

from __future__ import annotations

import torch
from torch import Generator

SEEDS = 1 << 63


def shift_seeds(offset: int) -> None:
    """Add this to each seed that `torch.manual_seed` is given from now on, and to that of now.

    Generators that the script makes, and those of random and numpy, are left as they are.
    """
    if not offset:
        return
    given = torch.manual_seed

    def manual_seed(seed: int) -> Generator:
        """As torch's, with the offset of this worker."""
        return given((int(seed) + offset) % SEEDS)

    torch.manual_seed = torch.random.manual_seed = manual_seed
    given((torch.initial_seed() + offset) % SEEDS)
