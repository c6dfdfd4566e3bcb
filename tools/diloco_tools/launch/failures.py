"""How the launchers end where they were asked for something that cannot be."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from diloco_protocol.errors import UsageError
from diloco_tools.terminal import fail


@contextlib.contextmanager
def failing_in_a_sentence() -> Iterator[None]:
    """End with exit code 2 and the sentence of a UsageError."""
    try:
        yield
    except UsageError as error:
        fail("diloco-launch", str(error), code=2)
