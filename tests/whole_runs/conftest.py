"""Each whole run with a broker in the test's process is taped, and its tape replays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from diloco_broker.config import BrokerConfig
from diloco_broker.core.tape import replay
from diloco_broker.shell.loop import Loop
from diloco_broker.storage.tape_file import read_tape

# Tests about memory measure that of the process, which a tape adds to.
NOT_TAPED = ("test_memory", "test_group_memory")


@pytest.fixture(autouse=True)
def every_run_replays(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[None]:
    if request.path.stem in NOT_TAPED:
        yield
        return
    folder, numbers, make = tmp_path_factory.mktemp("tapes"), count(), Loop.__init__

    def with_tape(loop: Loop, config: BrokerConfig, *arguments: Any, **others: Any) -> None:
        config = replace(config, tape=str(folder / f"tape-{next(numbers)}"))
        make(loop, config, *arguments, **others)

    monkeypatch.setattr(Loop, "__init__", with_tape)
    yield
    for file in sorted(folder.iterdir()):
        with read_tape(file) as tape:
            for step in replay(tape.core, tape.entries):
                assert step.difference is None, f"{file.name}: {step.difference} at {step.about}"
