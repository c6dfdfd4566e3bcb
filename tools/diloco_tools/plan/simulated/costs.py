"""What work costs: CPU seconds of a broker and of a worker, calibrated once.

They come from the CPU seconds of a broker and of its workers in rounds of `make lan` at 1 Gb/s with 126
million parameters, where machine and load are named; the shares of the parts are those of
docs/performance.md. What a codec takes in a round is two to four times what it takes alone: memory is
shared by all processes of the machine, norms and finiteness are looked at, and errors are fed back. The
same costs hold for all rows of the validation, and for all plans. A faster machine costs less, so a
plan errs to the careful side there.
"""

from __future__ import annotations

from dataclasses import dataclass

GIGA = 1e9
# CPU seconds of the broker for a billion elements, one way.
ENCODE = {
    "fp32": 0.3,
    "bf16": 0.1,
    "fp16": 0.1,
    "int8": 3.3,
    "int4": 3.6,
    "int4z": 3.4,
    "top64": 5.0,
}
DECODE = {
    "fp32": 0.3,
    "bf16": 0.1,
    "fp16": 0.1,
    "int8": 0.8,
    "int4": 1.6,
    "int4z": 1.5,
    "top64": 1.5,
}


@dataclass(frozen=True)
class Costs:
    """Seconds of one core: for a GB on the wire, for a billion elements, or for a message.

    Attributes:
        wire: of ZeroMQ's thread, at each end, for a GB in or out.
        keys: the same, more, where everything is encrypted.
        message: of the loop, for a chunk in or out, whatever is in it.
        fold: to add a decoded chunk up.
        step: the outer step of a chunk, and laying out what is sent.
        freeze: a worker's delta.
        land: a worker's new parameters into the model.
        left_out: to work out what few bits have left out of a push that has counted, which the thread
            that trains does when its reply is here.
        awake: of the broker for each second of an exchange, in which bytes come in small numbers.
        unevenness: half of the workers send by so much faster than the mean where they share a line, and
            half by so much slower. Connections through one queue that drops packets do not get the same
            within seconds. A chunk comes back when the last worker has sent it, so this lengthens
            rounds in which both ways carry the same, and hardly those whose replies are larger.
    """

    wire: float = 0.35
    keys: float = 0.8
    message: float = 0.00015
    fold: float = 0.9
    step: float = 3.0
    freeze: float = 1.1
    land: float = 1.2
    left_out: float = 4.0
    awake: float = 0.07
    unevenness: float = 0.3
