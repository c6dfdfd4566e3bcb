"""Real training with one hostile worker of five: which defence holds against which attack?

SECURITY.md has the same in figures, of longer runs and three seeds.
"""

from functools import cache

import pytest

from simulation.poison import ATTACKS, DEFENCES, Outcome, train

# Of fewer rounds the losses are higher, and as far apart.
outcome = cache(lambda attack, defence: train(attack, defence, seed=0, rounds=10))
HARMLESS, RUINED = 0.08, 0.4  # above the loss without an attack, in nats
# Attacks that a defence does not hold against; of all others there is at most some loss.
RUINS = {
    ("x100", "mean"),
    ("constant", "mean"),
    ("x4, sign-flipped", "mean"),
    ("x4, sign-flipped", "max-delta-norm auto"),
}


def unharmed() -> float:
    found: Outcome = outcome("none", "mean")
    return found.loss


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("defence", DEFENCES)
def test_defence_holds_or_does_not_as_the_page_says(attack: str, defence: str) -> None:
    above = outcome(attack, defence).loss - unharmed()
    if (attack, defence) in RUINS:
        assert above > RUINED
    else:
        assert above < HARMLESS


@pytest.mark.slow
def test_no_defence_keeps_a_worker_from_pushing_all_in_one_direction() -> None:
    for defence in DEFENCES:
        carried = outcome("one direction", defence).carried - outcome("none", defence).carried
        assert carried > 0.5, f"{defence} holds: say so in the page"
