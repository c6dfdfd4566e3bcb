"""diloco-top on one screen: a real PUB socket on loopback, the real command, the text it prints."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from diloco_broker.cli.status_text import as_text
from diloco_protocol.feed import MAX_SNAPSHOT_BYTES, TOPIC
from diloco_tools.monitor.feed.listener import FeedSubscriber
from diloco_tools.monitor.feed.model import FeedModel
from diloco_tools.monitor.terminal.text import charset, screen
from kit.feed_snapshots import LOST, PATIENCE_S, Publisher, frame, status, worker
from kit.strange_feeds import strange_feeds
from kit.top_text import drawn, matches, plain, scene, sending, top, top_of

NO_ADDRESSES = ["8513", "", "tcp://h:", "tcp://h:0", "tcp://h:65536", "udp://h:1"]
NO_ADDRESSES += ["ipc:///tmp/\x1bx", "é"]
NO_FEED = ("no feed from tcp://127.0.0.1:1 ", "start diloco-broker serve")
NO_TIMES = ("0", "-1", "nan", "inf")


class TestCommand:
    @pytest.mark.parametrize(("document", "code"), [(status(), 0), (LOST, 1)], ids=["well", "lost"])
    def test_one_screen_is_printed_and_the_exit_code_says_how_the_run_is(
        self, publisher: Publisher, document: dict[str, Any], code: int
    ) -> None:
        result = top_of(publisher, document)
        assert result.exit_code == code, result.output
        printed = "\n".join(line.rstrip() for line in result.stdout.splitlines())
        assert printed == drawn(document, address=publisher.address)
        assert result.stderr == ""

    def test_json_is_the_snapshot_with_the_verdict_beside_it(self, publisher: Publisher) -> None:
        result = top_of(publisher, LOST | {"weather": "fine"}, "--json")
        assert result.exit_code == 1, result.output
        (line,) = result.stdout.splitlines()
        printed = json.loads(line)
        lost = "mac-mini-of-the-second-floor is lost, last heard 41 s ago"
        reasons = [lost, "rtx is slow, last heard 3.1 s ago"]
        monitor = {"verdict": "degraded", "reasons": reasons, "inner_steps": {}}
        assert printed.pop("monitor") == monitor
        assert printed == LOST | {"weather": "fine"}

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            *(
                ((address, "--once"), (ascii(address), "must be an address"))
                for address in NO_ADDRESSES
            ),
            *((("--timeout", s), ("--timeout must be",)) for s in NO_TIMES),
            *(
                (("tcp://127.0.0.1:1", *output, "--timeout", "0.1"), NO_FEED)
                for output in (("--once",), ("--json",), ("--follow", "--json"))
            ),
        ],
    )
    def test_bad_use_exits_with_2(self, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
        result = top(*arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        (sentence,) = result.stderr.splitlines()
        assert all(word in sentence for word in words)

    @pytest.mark.parametrize(
        ("payload", "sentence"),
        [
            (TOPIC + b"{garbage", "no snapshot from {} within 1.5 s: 1 unreadable"),
            (frame(status(feed=2)), "feed version 2 and this program reads version 1"),
        ],
    )
    def test_a_feed_that_cannot_be_read_exits_2_and_says_so(
        self, publisher: Publisher, payload: bytes, sentence: str
    ) -> None:
        with sending(publisher, payload) as address:
            result = top(address, "--timeout", "1.5")
        assert result.exit_code == 2
        assert sentence.format(address) in result.stderr


class TestColour:
    @pytest.mark.parametrize(
        ("environment", "shown"),
        [
            (
                {"FORCE_COLOR": "1"},
                ("\x1b[31m○ lost\x1b[0m", "\x1b[33m◐ slow\x1b[0m", "\x1b[32m● ok  \x1b[0m"),
            ),
            ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, ("○ lost",)),
            ({}, ("○ lost ",)),
        ],
        ids=["terminal", "NO_COLOR", "pipe"],
    )
    def test_is_for_terminals_that_want_it(
        self, publisher: Publisher, environment: dict[str, str], shown: tuple[str, ...]
    ) -> None:
        text = top_of(publisher, LOST, **environment).stdout
        assert all(each in text for each in shown)
        has_colour = re.search(r"\x1b\[[0-9;]*3[0-7]m", text) is not None
        assert has_colour == (environment == {"FORCE_COLOR": "1"})
        assert ("\x1b" in text) == bool(environment)

    def test_an_encoding_without_the_signs_gets_ascii(self, publisher: Publisher) -> None:
        odd = status(workers=[worker("café", health="lost"), worker("b", health="slow")])
        result = top_of(publisher, odd, charset="ascii")
        assert result.exit_code == 1, result.output
        assert result.stdout_bytes.isascii()
        for shown in ("+ LIVE", "! DEGRADED", "x lost", "! slow", "caf?"):
            assert shown in result.stdout


class TestScreen:
    def test_before_the_first_snapshot_there_is_a_screen(self) -> None:
        text = plain(screen(scene(FeedModel(), 0.0), 80), 80)
        assert "no snapshot has arrived yet" in text

    @given(
        document=strange_feeds(),
        width=st.sampled_from([80, 100, 140]),
        encoding=st.sampled_from(["utf-8", "ascii", "latin-1", "no-such-encoding"]),
    )
    def test_lines_fit_the_terminal(
        self, document: dict[str, Any], width: int, encoding: str
    ) -> None:
        assert as_text(document), "`status` has lines for any feed, too"
        text = drawn(document, width, charset(encoding))
        assert max(cell_len(line) for line in text.split("\n")) <= max(width, 80)
        assert text.replace("\n", "").isprintable()
        if encoding != "no-such-encoding":
            text.encode(encoding)


class TestSubscriber:
    def test_garbage_is_counted_and_the_next_snapshot_read(self, publisher: Publisher) -> None:
        odd = (b"", b"\xff", b"[]", b" " * MAX_SNAPSHOT_BYTES, b'{"feed": 1}')
        with FeedSubscriber(publisher.address) as feed:
            publisher.await_subscriber()
            for count, garbage in enumerate(odd, start=1):
                publisher.send(TOPIC + garbage)
                for _ in range(int(PATIENCE_S / 0.01)):
                    assert feed.receive(timeout_s=0.01) is None
                    if feed.malformed == count:
                        break
                assert feed.malformed == count
                assert ("too many for a snapshot" in feed.last_error) == (count == 4)
            assert "snapshot.sequence is missing" in feed.last_error
            publisher.send(b"gossip {}", frame(status()))
            received = feed.receive(timeout_s=PATIENCE_S)
            feed.close()  # once more when it is left, which does no harm
        assert received is not None
        assert received.sequence == 7
        assert feed.malformed == 5, "what has another topic is not for us"

    def test_a_slow_reader_gets_the_newest_and_only_that(self, publisher: Publisher) -> None:
        with FeedSubscriber(publisher.address) as feed:
            publisher.await_subscriber()
            feed._socket.monitor("inproc://ended", zmq.EVENT_DISCONNECTED)  # in place of its own
            with feed._context.socket(zmq.PAIR) as ended:
                ended.connect("inproc://ended")
                publisher.send(*(frame(status(sequence=n)) for n in range(1, 101)))
                publisher.close(deliver=True)
                assert ended.poll(int(1000 * PATIENCE_S)), "the connection ends after the last"
            newest = feed.receive(timeout_s=PATIENCE_S)
            assert newest is not None
            assert newest.sequence == 100
            assert feed.receive(timeout_s=0.0) is None

    def test_a_flood_of_garbage_ends_in_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Flood:
            closed = False
            frames = 0

            def poll(self, _timeout_ms: int) -> list[tuple[Flood, int]]:
                return [(self, zmq.POLLIN)]

            def recv(self) -> bytes:
                self.frames += 1
                assert self.frames < 1_000_000, "still reading, long after the timeout"
                return TOPIC

        with FeedSubscriber("tcp://127.0.0.1:1") as feed:
            with monkeypatch.context() as flooded:
                flood = Flood()
                flooded.setattr(feed, "_socket", flood)
                flooded.setattr(feed, "_poller", flood)
                assert feed.receive(timeout_s=0.01) is None
            assert feed.malformed > 0


# What diloco-top prints of each kind of run: the stored text, line by line.


BUFFERED = {"optimizer": "dn", "lr": 0.7, "momentum": 0.9, "variant": "paper", "buffer": 4}
# A name with control characters, and an event with markup, which is shown as text.
STRANGE = {
    "workers": [worker("a\x1b[2J\nb\u202e")],
    "events": [{"sequence": 1, "text": "left\r\x1b]0;x\x07 [red]now[/red]", "level": "error"}],
}
TOO_MANY = [worker(f"w{n}", health="lost") for n in range(9)]


DOCUMENTS: dict[str, dict[str, Any]] = {
    "healthy": status(),
    "some_lost": LOST,
    "bare": {"feed": 1, "sequence": 1, "epoch": "a0"},
    "names_of_unknown_peers": status(**STRANGE),
    "many_in_trouble": status(workers=TOO_MANY),
    "asynchronous": status(
        mode="async",
        fragments=[{"fragment": 0, "version": 14, "gradients": 14, "buffered": 2}],
        outer=BUFFERED,
        reducer={"staged": True, "submissions": 2, "waiting": 1},
        last_round={"number": 13, "seconds": 1.0, "averaged": 1, "staleness": 3, "loss": 2.5},
    ),
    "fragments": status(
        fragments=[{"fragment": n, "version": 7 - n, "buffered": n} for n in range(3)],
        fragment_sync_delay=2,
        fragment_update_alpha=0.5,
        outer=BUFFERED,
    ),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_text_is_the_stored_one(name: str) -> None:
    matches(f"once_{name}.txt", drawn(DOCUMENTS[name]))
