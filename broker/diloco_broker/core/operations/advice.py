"""A warning about outer momentum in runs that published results say it harms: short runs and adapters.

Momentum pays off after hundreds of rounds. A run that ends before, or that only trains small adapters of
a trained model, is better with a plain average of its workers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from diloco_broker.core import effects
from diloco_broker.core.state import RunState
from diloco_protocol.manifest import Kind

FEWEST_ROUNDS = 50  # of each fragment
_ADAPTER = re.compile(r"lora_|adapter", re.IGNORECASE)  # in the names that PEFT and torchtune give


def look(state: RunState, made: int) -> effects.Effects:
    """Warn once in a broker's incarnation, before the round after `made` closed ones."""
    config = state.config
    if state.is_advised or state.has_own_optimizer or not config.has_momentum:
        return
    reasons = [*_adapters(state), *_short(state, made)]
    if reasons:
        state.is_advised = True
        yield effects.warning(
            f"The run {' and '.join(reasons)}; outer momentum (here {config.outer_momentum:g}) often "
            "harms such runs. For an average without memory: diloco-broker serve --preset finetune."
        )


def _adapters(state: RunState) -> Iterator[str]:
    manifest = state.model.manifest
    entries = () if manifest is None else manifest.entries
    names = (each.name for each in entries if each.kind is Kind.TRAINABLE)
    if _ADAPTER.search(next(names, "")) and all(map(_ADAPTER.search, names)):
        yield "trains adapters only"


def _short(state: RunState, made: int) -> Iterator[str]:
    config, totals = state.config, state.totals
    # Rounds in which each fragment is stepped once.
    cycle = config.num_fragments * config.outer_schedule.size
    planned = []
    if config.max_rounds is not None:
        planned.append((config.max_rounds / cycle, f"--max-rounds {config.max_rounds}"))
    if config.token_budget is not None and made >= cycle and totals.tokens:
        cycles = config.token_budget / totals.tokens * made / cycle
        planned.append((cycles, f"--token-budget {config.token_budget}"))
    rounds, why = min(planned, default=(FEWEST_ROUNDS, ""))
    if rounds < FEWEST_ROUNDS:
        yield f"has only about {rounds:.0f} rounds of each fragment ({why})"
