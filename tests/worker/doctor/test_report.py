"""What the doctor says of dtypes: none where they are good enough, else the mildest that are."""

from __future__ import annotations

import pytest

from diloco_protocol.chunks import CHUNK_ELEMENTS
from diloco_worker.doctor.report import Estimate, _sentences
from diloco_worker.doctor.round_cost import Exchange, Line

GIGABIT = 125e6


def a_run(
    rate: float, *, step_time: float | None = 0.5, sync_every: int = 500, is_whole: bool = False
) -> Estimate:
    """124 million parameters, bf16 up and fp32 down, over a line of this rate both ways."""
    exchange = Exchange(124_000_000, 2.0, 4.0, CHUNK_ELEMENTS, is_whole=is_whole)
    return Estimate(exchange, Line(rate, rate, 0.01), "bf16", "fp32", sync_every, step_time)


@pytest.mark.parametrize(
    ("rate", "is_whole", "named"),
    [
        (GIGABIT / 6, False, "--wire-dtype bf16 --reply-dtype bf16"),
        (GIGABIT / 40, False, "--wire-dtype int4z --reply-dtype int4z"),
        (GIGABIT / 3.2, True, "--wire-dtype bf16 --reply-dtype bf16"),
        (GIGABIT / 5, True, "--wire-dtype int8 --reply-dtype int8"),
        (GIGABIT / 10, True, "--wire-dtype int4 --reply-dtype int4"),
        # Not enough, and none takes fewer.
        (GIGABIT / 40, True, "--wire-dtype int4z --reply-dtype int4z"),
    ],
)
def test_mildest_dtypes_that_are_good_enough_are_named(
    rate: float, is_whole: bool, named: str
) -> None:
    found = a_run(rate, is_whole=is_whole)
    assert found.utilisation is not None and found.utilisation < 0.95
    said = _sentences(found)[-1]
    assert named in said, [(e.wire_dtype, e.reply_dtype, e.utilisation) for e in found.shorter]
    _, wire, _, reply = named.split()
    chosen = found.with_dtypes(wire, reply)
    assert f"training has {chosen.utilisation:.0%} of the time" in said


def test_nothing_is_said_where_fewer_bytes_take_no_less_time() -> None:
    """A line that is all round trips."""
    exchange = Exchange(1000, 2.0, 4.0, CHUNK_ELEMENTS)
    found = Estimate(exchange, Line(1e9, 1e9, 0.5), "bf16", "fp32", 10, 1.0)
    assert not found.shorter
    assert len(_sentences(found)) == 2
