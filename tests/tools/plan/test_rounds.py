"""What rounds take on given lines: small cases by hand, and how answers hang together."""

from dataclasses import replace
from typing import Any

import pytest

from diloco_protocol.chunks import CHUNK_ELEMENTS
from diloco_protocol.dtypes import WIRE_DTYPES
from diloco_protocol.errors import UsageError
from diloco_tools.plan.answer import Answer, answer
from diloco_tools.plan.question import USABLE, Question
from diloco_tools.plan.simulated.costs import Costs

# Work takes no time, and lines are shared evenly: what is left is bytes over rates.
FREE = Costs(
    wire=0.0,
    keys=0.0,
    message=0.0,
    fold=0.0,
    step=0.0,
    freeze=0.0,
    land=0.0,
    left_out=0.0,
    awake=0.0,
    unevenness=0.0,
)
NO_CODECS = {"wire_dtype": "bf16", "reply_dtype": "bf16"}
BYTE = 8 / USABLE  # bits of a line that carry one of ours
CHUNK = float(CHUNK_ELEMENTS)


@pytest.fixture(autouse=True)
def codecs_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker's own, which have no factor: tests of CPU set what they need."""
    for table in ("ENCODE", "DECODE"):
        for module in ("broker", "worker"):
            free = dict.fromkeys(WIRE_DTYPES, 0.0)
            monkeypatch.setattr(f"diloco_tools.plan.simulated.{module}.{table}", free)


def asked(**fields: Any) -> Question:
    """Ten chunks of 2 bytes a parameter each way, a line of 1 MB/s, steps of a second."""
    usual: dict[str, Any] = {
        "parameters": 10 * CHUNK_ELEMENTS,
        "workers": 1,
        "broker_link": 1e6 * BYTE,
        "links": (1e12,),
        "delays": (0.0,),
        "sync_every": 100,
        **NO_CODECS,
    }
    return Question(**usual | fields)


def found(pieces: int | None = None, **fields: Any) -> Answer:
    return answer(asked(**fields), FREE, pieces)


WAY_S = 10 * CHUNK * 2 / 1e6  # of all chunks one way


def test_one_worker_takes_its_bytes_over_the_rate() -> None:
    """The ninth chunk comes down while the tenth goes up, so the last one is left."""
    one = found()
    assert one.measured.exchange_s == pytest.approx(WAY_S * 1.1, rel=1e-6)
    assert one.waits_s == pytest.approx(WAY_S * 1.1, rel=1e-6)
    assert one.utilisation == pytest.approx(100 / (100 + WAY_S * 1.1), rel=1e-6)
    assert one.measured.bytes_up == one.measured.bytes_down == pytest.approx(20 * CHUNK)


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_workers_share_the_brokers_line(workers: int) -> None:
    shared = found(workers=workers).measured.exchange_s
    assert shared == pytest.approx(workers * WAY_S * 1.1, rel=1e-6)


def test_all_wait_for_the_worker_on_the_slowest_line() -> None:
    lines = (1e6 * BYTE, 1e6 * BYTE, 0.5e6 * BYTE)
    slow = found(workers=3, broker_link=1e12, links=lines)
    assert slow.waits_s == pytest.approx(2 * WAY_S * 1.1, rel=0.06)
    assert slow.least_utilisation == pytest.approx(slow.utilisation, rel=0.06)


@pytest.mark.parametrize(
    "fields", [{}, {"reply_dtype": "fp32"}, {"is_whole": True}, {"delays": (0.1,)}]
)
@pytest.mark.parametrize("up", [0.3e6, 1e6])
def test_closed_formula_of_one_worker_says_the_same(up: float, fields: dict[str, Any]) -> None:
    """The slower way and one chunk of the other, or both where pushes count whole; three round trips."""
    question = asked(broker_link=up * BYTE, **fields)
    sent = 2.0 * question.parameters / up
    received = sent * (2 if question.reply_dtype == "fp32" else 1)
    chunks = question.parameters / CHUNK_ELEMENTS
    streamed = max(sent + received / chunks, sent / chunks + received)
    expected = sent + received if question.is_whole else streamed
    expected += 3 * question.delays[0]
    assert answer(question, FREE).measured.exchange_s == pytest.approx(expected, rel=0.02)


def test_a_window_limits_what_a_long_line_carries() -> None:
    """A push has at most 16 chunks in flight, so a round trip of a second carries 16 a second."""
    far = found(parameters=640 * CHUNK_ELEMENTS, broker_link=1e12, delays=(1.0,), is_whole=True)
    assert far.measured.exchange_s >= 640 / 16 * 2


def test_what_does_not_fit_behind_training_is_waited_for() -> None:
    """With tau = 5 of one second, a fragment of 11.5 s is waited for 6.5 s, four times."""
    fields: dict[str, Any] = {"fragments": 4, "parameters": 40 * CHUNK_ELEMENTS}
    streams = found(**fields, delay_steps=5)
    takes = streams.measured.exchange_s
    assert takes == pytest.approx(WAY_S * 1.1, rel=1e-6)
    assert streams.waits_s == pytest.approx(4 * (takes - 5), rel=1e-6)
    assert streams.hidden == pytest.approx(5 / takes, rel=1e-6)
    waits = found(**fields, delay_steps=0).waits_s
    assert waits == pytest.approx(4 * takes, rel=1e-6)


def test_asynchronous_workers_do_not_wait_for_a_slow_one() -> None:
    lines = (10e6 * BYTE, 10e6 * BYTE, 0.5e6 * BYTE)
    fields: dict[str, Any] = {"workers": 3, "broker_link": 1e12, "links": lines}
    apart, together = found(mode="async", **fields), found(**fields)
    fast_apart = apart.measured.trains_s[0] / apart.measured.cycle_s[0]
    fast_together = together.measured.trains_s[0] / together.measured.cycle_s[0]
    assert fast_together < 0.85
    assert fast_apart > 0.95


def test_work_takes_cpu_time_of_the_cores_that_there_are() -> None:
    slow = replace(FREE, fold=1000.0)  # for a billion: 5.2 s for each push
    fields: dict[str, Any] = {"broker_link": 1e12, "workers": 2}
    alone = answer(asked(**fields), slow)
    folds = 2 * 10 * CHUNK * 1000 / 1e9
    assert alone.measured.exchange_s == pytest.approx(folds, rel=0.001)
    assert alone.measured.broker_cpu_s == pytest.approx(folds, rel=0.001)
    busy = replace(slow, freeze=1000.0)
    apart = answer(asked(**fields), busy)
    shared = answer(asked(**fields, cores=1), busy)
    assert apart.waits_s == pytest.approx(folds + folds / 2, rel=0.001)
    assert shared.waits_s == pytest.approx(2 * folds, rel=0.001)


def test_lines_on_which_no_connection_would_live_are_refused() -> None:
    """A chunk of a reply, 2 MiB, takes longer than the 30 s after which a worker begins again."""
    with pytest.raises(UsageError, match="too slow"):
        found(broker_link=0.06e6 * BYTE, reply_dtype="fp32")
    assert found(broker_link=0.08e6 * BYTE, reply_dtype="fp32").utilisation > 0
