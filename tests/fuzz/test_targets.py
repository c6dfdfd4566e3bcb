"""What fuzzing has kept still does no harm, nor some inputs drawn now; a failure is written down."""

from importlib import import_module

import pytest

from fuzz import __main__ as fuzz


@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_corpus_and_inputs_like_it_do_no_harm(target: str) -> None:
    run = import_module(f"fuzz.{target}").run
    known = fuzz.corpus(target)
    assert len(known) >= 10
    messages = sum(run(fuzz.drawn(target, 1, number, known)) for number in range(len(known) + 10))
    assert messages > len(known)
