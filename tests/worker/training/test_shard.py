"""Which share of the data a worker samples: what the environment says, else the broker."""

from __future__ import annotations

import pytest

from diloco_protocol import UsageError
from diloco_protocol.messages import Join
from diloco_worker.core.session import Session
from diloco_worker.shell.inbox import Inbox
from diloco_worker.training.shard import shard
from kit.session_harness import MANIFEST


def an_inbox() -> Inbox:
    return Inbox(Session(Join("me", MANIFEST), lambda: 1))


def test_variables_win_over_what_the_broker_says() -> None:
    inbox = an_inbox()
    inbox.shard = (1, 4)
    assert shard(inbox, {}) == (1, 4)
    assert shard(inbox, {"DILOCO_SHARD_INDEX": "2", "DILOCO_NUM_SHARDS": "8"}) == (2, 8)


def test_a_worker_alone_has_all_of_it() -> None:
    assert shard(None, {}) == (0, 1)


@pytest.mark.parametrize("told", [("2", ""), ("", "2"), ("2", "2"), ("-1", "2"), ("a", "2")])
def test_variables_that_name_no_share_are_refused(told: tuple[str, str]) -> None:
    environ = dict(zip(("DILOCO_SHARD_INDEX", "DILOCO_NUM_SHARDS"), told, strict=True))
    with pytest.raises(UsageError, match="index from 0"):
        shard(None, environ)


def test_a_broker_that_gives_no_shares_is_named_with_the_remedy() -> None:
    with pytest.raises(UsageError, match="set DILOCO_SHARD_INDEX and DILOCO_NUM_SHARDS"):
        shard(an_inbox(), {})
