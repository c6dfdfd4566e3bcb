"""What work costs: CPU seconds of a broker and of a worker, calibrated once.

The rates of codecs are those that were measured on one core for a chunk of 524,288 elements, and each
side has one factor for all of them, which makes up for what a run does besides (finding NaN, norms,
copies, headers). The factors were found with `make lan` on the machine that it names, and are the same
for all rows: 2 virtual cores. A faster machine costs less, so a plan errs to the careful side there.
"""

from __future__ import annotations

from dataclasses import dataclass

GIGA = 1e9
# Seconds a billion elements: fp32 bytes over the measured GB/s of one core.
ENCODE = {
    "fp32": 4 / 15,
    "bf16": 4 / 50,
    "fp16": 4 / 50,
    "int8": 4 / 5.4,
    "int4": 4 / 3.8,
    "int4z": 4 / 2.7,
    "top64": 4 / 0.88,
}
DECODE = {
    "fp32": 4 / 15,
    "bf16": 4 / 63,
    "fp16": 4 / 63,
    "int8": 4 / 23,
    "int4": 4 / 9.2,
    "int4z": 4 / 6.2,
    "top64": 4 / 9.2,
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
        broker_codec, worker_codec: times what a codec costs alone.
    """

    wire: float = 0.25
    keys: float = 0.8
    message: float = 0.0001
    fold: float = 0.3
    step: float = 1.5
    freeze: float = 0.9
    land: float = 0.9
    broker_codec: float = 1.0
    worker_codec: float = 1.0
