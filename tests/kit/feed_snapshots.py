"""Snapshots as a broker sends them, and a feed without a broker."""

from __future__ import annotations

import json
from typing import Any

import zmq

from diloco_protocol.feed import FEED_VERSION, TOPIC, Snapshot, parse_snapshot

PATIENCE_S = 20.0  # for what ought to happen at once


def worker(name: str, **keys: Any) -> dict[str, Any]:
    return {
        "id": name,
        "host": f"host-of-{name}",
        "pid": 4242,
        "state": "training",
        "health": "ok",
        "round": 412,
        "inner_step": 212,
        "sync_every": 500,
        "step": 205_712,
        "steps_per_s": 5.23,
        "loss": 2.4131,
        "tokens": 420_000_000,
        "beat_age_s": 0.4,
        "staleness": 0,
        "bytes_up": 38_000_000,
        "bytes_down": 76_400_000,
        "pushes": 411,
        "rejected": 0,
        "delta_norm": 1.25,
        "times_usual": 1.0,
        "extra": {},
        **keys,
    }


def bare_frame(**keys: Any) -> bytes:
    """A snapshot with these keys and those that each has, as it is published."""
    document = {"feed": FEED_VERSION, "sequence": 1, "epoch": "a0", "state": "training"}
    return TOPIC + json.dumps(document | keys).encode()


def bare_snapshot(**keys: Any) -> Snapshot:
    return parse_snapshot(bare_frame(**keys))


def bare_worker(name: str, **keys: Any) -> dict[str, Any]:
    return {"id": name, "health": "ok", "beat_age_s": 0.5, **keys}


def status(**keys: Any) -> dict[str, Any]:
    return {
        "feed": 1,
        "sequence": 7,
        "epoch": "ab12",
        "run": "3fa2c1d09b11",
        "version": "0.1.0",
        "control": "tcp://127.0.0.1:8512",
        "uptime_s": 8000.0,
        "mode": "sync",
        "state": "training",
        "waiting_for": None,
        "round": {
            "number": 412,
            "fragment": 0,
            "phase": "open",
            "age_s": 12.2,
            "expected": ["a100-0", "mac", "rtx", "xeon"],
            "arrived": ["a100-0"],
            "missing": ["mac", "rtx", "xeon"],
            "floor": 1,
        },
        "counts": {"alive": 5, "due": 5, "participating": 4, "averaged": 3},
        "model": {"parameters": 151_200_000, "tensors": 291, "bytes": 604_800_000},
        "outer": {"optimizer": "nesterov", "lr": 0.7, "momentum": 0.9, "nesterov": True},
        "sync_every": 500,
        "wire_dtype": "bf16",
        "reply_dtype": "fp32",
        "workers_wanted": 2,
        "fragments": [{"fragment": 0, "version": 411, "tag": "deadbeef"}],
        "workers": [worker("a100-0", state="waiting"), worker("rtx")],
        "totals": {
            "rounds": 411,
            "pushes": 1644,
            "rejected": 6,
            "malformed": 9,
            "bytes_up": 150_000_000_000,
            "bytes_down": 300_000_000_000,
            "deaths": 1,
        },
        "last_round": {
            "number": 411,
            "seconds": 41.24,
            "averaged": 3,
            "weight": 3.0,
            "loss": 2.4131,
            "delta_norm": 0.0131,
        },
        "events": [
            {"sequence": n, "age_s": 90.0 - n, "level": "info", "text": f"round {n} closed"}
            for n in range(1, 21)
        ],
        "loop": {"longest_turn_ms": 4.81, "cpu_s": 312.0, "rss_bytes": 310_000_000},
        **keys,
    }


def frame(document: Any) -> bytes:
    return TOPIC + json.dumps(document).encode()


LOST = status(
    workers=[
        worker("mac-mini-of-the-second-floor", health="lost", beat_age_s=41.0, staleness=5),
        worker("rtx", health="slow", beat_age_s=3.1),
        worker("a100-0"),
    ]
)


class Publisher:
    """A broker's feed without a broker. Sends only once it has a subscriber: no sleeps."""

    def __init__(self, address: str = "tcp://127.0.0.1:*") -> None:
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.XPUB)
        self._socket.linger = 0
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # tells of each subscriber, not only the first
        self._socket.bind(address)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def await_subscriber(self) -> None:
        while self._socket.poll(int(1000 * PATIENCE_S)):
            if self._socket.recv() == b"\x01" + TOPIC:
                return
        raise TimeoutError("no display subscribed")

    def send(self, *payloads: bytes) -> None:
        for payload in payloads:
            self._socket.send(payload)

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self, deliver: bool = False) -> None:
        self._socket.close(linger=int(1000 * PATIENCE_S) if deliver else 0)
        self._context.term()
