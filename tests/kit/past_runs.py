"""Lines of a history file, as a broker writes them."""

import json
from pathlib import Path
from typing import Any


def line(kind: str, at: float, **keys: Any) -> dict[str, Any]:
    return {"kind": kind, "at": at, "epoch": "a0", **keys}


def start(at: float, **keys: Any) -> dict[str, Any]:
    settings = {
        "outer": {"optimizer": "nesterov", "lr": 0.7, "momentum": 0.9},
        "sync_every": 500,
        "num_fragments": 1,
        "workers_wanted": 2,
        **keys.pop("settings", {}),
    }
    whole = {
        "version": "0.1.0",
        "run": "3fa2c1d09b11",
        "mode": "sync",
        "control": "tcp://127.0.0.1:8512",
        "feed": "tcp://127.0.0.1:8513",
        "settings": settings,
        "model": {"parameters": 1000, "tensors": 4, "bytes": 4000},
    }
    return line("start", at, **whole | keys)


def closed(at: float, number: int, *names: str, **keys: Any) -> dict[str, Any]:
    """A round whose contributions came from these workers."""
    of_worker = {
        "step": 500 * number,
        "steps_per_s": 12.5,
        "loss": 2.4,
        "staleness": 0,
        "bytes_up": 500 * number,
        "bytes_down": 1000 * number,
    }
    whole = {
        "number": number,
        "fragment": 0,
        "version": number + 1,
        "seconds": 40.0,
        "averaged": len(names),
        "weight": float(len(names)),
        "loss": 2.5,
        "delta_norm": 0.01,
        "staleness": 0,
        "alive": len(names),
        "bytes_up": 1000 * number,
        "bytes_down": 2000 * number,
        "cpu_s": 1.5,
        "rss_bytes": 10**8,
        "longest_turn_ms": 4.0,
        "workers": [{"id": name, "host": f"host-of-{name}", **of_worker} for name in names],
    }
    return line("round", at, **whole | keys)


def event(at: float, text: str, **keys: Any) -> dict[str, Any]:
    return line("event", at, **{"level": "info", "text": text, **keys})


def write(path: Path, *lines: Any) -> Path:
    texts = [each if isinstance(each, bytes) else json.dumps(each).encode() for each in lines]
    path.write_bytes(b"".join(text + b"\n" for text in texts))
    return path


def write_run(folder: Path, rounds: int) -> Path:
    """A whole run: its start, rounds of 40 s by two workers, one event, its end."""
    began = 1_700_000_000.0
    made = [
        closed(began + 40.0 * (number + 1), number, "a", "b", loss=4.0 - 0.01 * number)
        for number in range(rounds)
    ]
    over = began + 40.0 * rounds + 1
    ending = [event(over, "all is well"), line("stop", over + 1, text="it was asked to")]
    return write(folder / "history.jsonl", start(began), *made, *ending)
