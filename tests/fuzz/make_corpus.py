"""Writes the corpus: short inputs that reach far, and what the project's own encoders make.

    PYTHONPATH=tests python -m fuzz.make_corpus

Of many inputs that are drawn by the seed, those are kept that have the most messages handled.
"""

from __future__ import annotations

import random
import shutil

from diloco_protocol.feed import TOPIC
from fuzz import decoding, files, machine, session
from fuzz.__main__ import CORPUS
from kit.core_harness import a_config, a_manifest, a_stage

DRAWN, KEPT = 300, 12


def main() -> None:
    for module, size in ((machine, 300), (session, 300), (files, 40), (decoding, 150)):
        name = module.__name__.rpartition(".")[2]
        folder = CORPUS / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        inputs = [random.Random(f"{name} {n}").randbytes(size) for n in range(DRAWN)]
        reach = {data: module.run(data) / len(data) for data in inputs}
        best = sorted(inputs, key=lambda data: -reach[data])[:KEPT]
        for number, data in enumerate(best):
            (folder / f"drawn-{number:02d}").write_bytes(data)
    for number, reader in enumerate(decoding.READERS):
        if reader is decoding._snapshot:
            line = a_snapshot()
            (CORPUS / "decoding" / "snapshot").write_bytes(bytes([number, 1]) + line)
        elif reader is decoding._frames:
            for kind, header in headers().items():
                length = min(len(header), 399)
                frames = bytes([number, 1, length & 255, length >> 8]) + header
                (CORPUS / "decoding" / f"header-{kind}").write_bytes(frames)


def a_snapshot() -> bytes:
    import json

    stage = a_stage(workers=2)
    stage.joined("a", "b")
    shown = json.dumps(stage.shown()).encode()
    assert not shown.startswith(TOPIC)
    return shown


def headers() -> dict[str, bytes]:
    """One header of each kind of message that a run has."""
    from diloco_protocol.messages import Message, encode

    found: dict[str, bytes] = {}

    class Noting(machine.WatchedStage):
        def happens(self, event: object) -> None:
            message = getattr(event, "message", None)
            if isinstance(message, Message):
                found.setdefault(message.kind, encode(message))
            super().happens(event)  # type: ignore[arg-type]

    stage = Noting(a_config(1), a_manifest(2))
    (worker,) = stage.joined("a")
    worker.pushes(1)
    worker.beats()
    worker.leaves()
    for inbox in stage.inbox.values():
        for message in inbox:
            found.setdefault(message.kind, encode(message))
    return found


if __name__ == "__main__":
    main()
