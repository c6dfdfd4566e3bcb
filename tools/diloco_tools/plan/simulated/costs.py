"""Costs: CPU seconds of a broker and of a worker, calibrated once.

They come from rounds of `make lan` at 1 Gb/s with 10 to 151 million parameters on an idle machine (see
its tables), with compiled kernels, and are divided as in docs/performance.md. A codec in a round takes
up to twice its time alone: processes share memory bandwidth, norms and finiteness are checked,
errors are fed back. The same costs hold for all rows of the validation and all plans; on a slower
machine a plan is optimistic. No row has int4 or a sparse codec: theirs are estimates.
"""

from __future__ import annotations

from dataclasses import dataclass

from diloco_protocol.dtypes import SPARSE_KEPT

GIGA = 1e9
# CPU seconds of the broker per billion elements, one way.
ENCODE = {
    "fp32": 0.3,
    "bf16": 0.1,
    "fp16": 0.1,
    "int8": 0.5,
    "int4": 0.7,
    "int4z": 0.9,
    **dict.fromkeys(SPARSE_KEPT, 6.0),
}
DECODE = {
    "fp32": 0.3,
    "bf16": 0.1,
    "fp16": 0.1,
    "int8": 0.1,
    "int4": 0.12,
    "int4z": 0.2,
    **dict.fromkeys(SPARSE_KEPT, 1.5),
}


@dataclass(frozen=True)
class Costs:
    """Seconds of one core per GB on the wire, per billion elements, or per message.

    Attributes:
        wire: ZeroMQ's thread, at each end, per GB in or out.
        keys: additionally with encryption.
        message: the loop, per chunk in or out.
        fold: adding a decoded chunk to the accumulator.
        step: the outer step of a chunk, and preparing the reply.
        freeze: computing a worker's delta.
        land: merging new parameters into a worker's model.
        left_out: computing the quantization error of a counted push, on the training thread when the
            reply has arrived.
        awake: the broker, per second of an exchange, for bytes that arrive in small portions.
        unevenness: half of the workers that share a link send faster than the mean by this share, and
            half slower: connections through one dropping queue are unfair within seconds. A chunk
            returns when the last worker has sent it, so this lengthens rounds with equally large
            pushes and replies, and hardly those with larger replies.
    """

    wire: float = 0.35
    keys: float = 0.8
    message: float = 0.0001
    fold: float = 0.35
    step: float = 0.5
    freeze: float = 0.5
    land: float = 0.3
    left_out: float = 0.75
    awake: float = 0.07
    unevenness: float = 0.21
