"""A thread that works beside the loop: in order, within its bounds, and never in the way of an end."""

import threading

import pytest

from diloco_broker.storage.background import Background
from kit.process_kit import wait_for

LONG_S = 20.0


def test_newer_work_replaces_what_has_waited_longest() -> None:
    go_on, begun, done = threading.Event(), threading.Event(), []

    def do(work: str) -> None:
        begun.set()
        go_on.wait(LONG_S)
        done.append(work)

    background = Background[str, None]("test", do, most=1)
    background.add("first")
    assert begun.wait(LONG_S)
    background.add("second")
    background.add("third")
    go_on.set()
    assert background.finish(LONG_S) and done == ["first", "third"]
    background.close()


@pytest.mark.parametrize("forget", [False, True])
def test_closing_ends_after_what_waits_or_after_what_is_in_progress(forget: bool) -> None:
    go_on, begun, done = threading.Event(), threading.Event(), []

    def do(work: str) -> None:
        begun.set()
        go_on.wait(LONG_S)
        done.append(work)

    background = Background[str, None]("test", do)
    background.add("first")
    assert begun.wait(LONG_S)
    background.add("second")
    background.close(forget=forget)
    go_on.set()
    assert background.finish(LONG_S)
    assert done == (["first"] if forget else ["first", "second"])


def test_nobody_waits_for_work_that_has_failed_or_for_a_thread_that_did_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(work: str) -> None:
        raise RuntimeError(work)

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    background = Background[str, None]("failing", fails)
    background.add("broken")
    assert background.finish(LONG_S)
    wait_for(lambda: "failing" not in {each.name for each in threading.enumerate()})

    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    background = Background[str, None]("test", fails)
    with pytest.raises(RuntimeError, match="new thread"):
        background.add("never")
    assert not background.finish()
