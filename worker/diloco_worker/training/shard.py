"""Which share of the data a worker has, for samplers: what the environment says, else the broker."""

from __future__ import annotations

import os
from collections.abc import Mapping

from diloco_protocol import UsageError
from diloco_worker.transport.inbox import Inbox

INDEX, COUNT = "DILOCO_SHARD_INDEX", "DILOCO_NUM_SHARDS"


def shard(link: Inbox | None, environ: Mapping[str, str] | None = None) -> tuple[int, int]:
    """Index and count. `link` is None where there is no run.

    Raises UsageError where the variables name no share (both or none), or the broker gives none.
    """
    environ = os.environ if environ is None else environ
    told = [environ.get(name, "").strip() for name in (INDEX, COUNT)]
    if any(told):
        try:
            index, count = (int(text) for text in told)
        except ValueError:
            index, count = -1, 0
        if not 0 <= index < count:
            raise UsageError(
                f"{INDEX} is {told[0]!r:.40} and {COUNT} is {told[1]!r:.40}; they must be an index "
                "from 0 and a number above it, or both be left out."
            )
        return index, count
    if link is None:
        return 0, 1
    if link.shard is None:
        raise UsageError(
            f"This broker gives its workers no shares of the data; set {INDEX} and {COUNT}, or start a "
            "newer broker."
        )
    return link.shard
