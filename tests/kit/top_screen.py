"""A full screen of diloco-top without a terminal: fake time, a fake feed, a fake broker to steer."""

import asyncio
import math
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.strip import Strip

from diloco_protocol.clients import Answer
from diloco_protocol.feed import Snapshot, parse_snapshot
from diloco_tools.monitor.terminal.application import Top
from kit.feed_snapshots import frame, status, worker
from kit.top_text import matches

FEED = "tcp://10.0.0.1:8513"
PATIENCE_S = 20.0
SMALL, LARGE = (80, 24), (140, 40)
CREW = (
    worker("a100-0", host="cellar", state="waiting", inner_step=500, steps_per_s=12.4),
    worker("a100-1", host="cellar", state="waiting", inner_step=500, steps_per_s=12.1),
    worker("mac-mini", host="attic", health="lost", round=407, beat_age_s=41.0, staleness=5),
    worker("rtx-home", host="desk", health="slow", inner_step=212, beat_age_s=80.0, rejected=2),
    worker("xeon", host="rack-7", sync_every=320, inner_step=96, steps_per_s=2.2, loss=2.9),
)


NOT_FINITE = "Element 77 of chunk 3 is not finite."
REFUSED_LATE = {
    "age_s": 72.0,
    "worker": "rtx-home",
    "text": "Round 410 closed without this push, and late work is dropped.",
}
EVENTS = (
    (90.0, "info", "Round 410 closed in 41.0 s."),
    (53.6, "info", "Round 411 closed in 40.1 s."),
    (
        41.0,
        "warning",
        "mac-mini (attic) is lost: its connection broke and it did not come back "
        "within the 30 s of grace; the round goes on without it.",
    ),
    (12.2, "info", "a100-1 has pushed."),
)


def document(sequence: int = 1, **keys: Any) -> dict[str, Any]:
    """The run that the pictures show, `sequence` seconds into its incarnation."""
    crew = [
        each
        | {
            "bytes_up": each["bytes_up"] + sequence * speed,
            "bytes_down": each["bytes_down"] + sequence * 2 * speed,
            "sync_age_s": 53.6,
        }
        for each, speed in zip(CREW, (19_000_000, 19_000_000, 0, 2_000_000, 7_500_000), strict=True)
    ]
    waiting = {"number": 412, "phase": "open", "age_s": 12.2, "floor": 2}
    names = ["a100-0", "a100-1", "rtx-home", "xeon"]
    whole = status(
        sequence=sequence,
        uptime_s=8000.0 + sequence,
        round=waiting | {"expected": names, "arrived": names[:2], "missing": names[2:]},
        counts={"alive": 4, "participating": 2, "averaged": 3},
        outer={"optimizer": "dn", "lr": 0.7, "momentum": 0.9, "variant": "paper", "buffer": 4},
        fragments=[{"fragment": 0, "version": 411, "buffered": 3, "contributions": 1644}],
        workers=crew,
        totals={
            "rounds": 411,
            "pushes": 1644,
            "rejected": 3,
            "malformed": 1,
            "deaths": 1,
            "bytes_up": 150_000_000_000 + sequence * 47_500_000,
            "bytes_down": 300_000_000_000 + sequence * 95_000_000,
            "refused": {"late": 2, "non_finite": 1},
        },
        last_round={
            "number": 370 + sequence,
            "averaged": 3,
            "weight": 3.0,
            "seconds": 41.24 + 4 * math.sin(sequence),
            "loss": 2.4131 + math.exp(-sequence / 12),
            "delta_norm": 0.0131 * math.exp(-sequence / 40),
        },
        checkpoint={"folder": "/data/run", "round": 411, "age_s": 13.1, "error": None},
        rejections=[REFUSED_LATE, {"age_s": 4000.0, "worker": "xeon", "text": NOT_FINITE}],
        events=[
            {"sequence": place, "age_s": age_s, "level": level, "text": text}
            for place, (age_s, level, text) in enumerate(EVENTS)
        ],
        loop={"longest_turn_ms": 4.81, "cpu_s": 312.0 + sequence / 8, "rss_bytes": 31e7},
    )
    return whole | keys


def named(value: Any) -> str:
    """For the name of a test: the same in each process."""
    return str(getattr(value, "__name__", value))


def screen(*options: dict[str, Any]) -> pytest.MarkDecorator:
    """Has a test run with a `pilot` of these options, or with one after another."""
    names = [" ".join(f"{name}={named(value)}" for name, value in each.items()) for each in options]
    return pytest.mark.parametrize("pilot", options, indirect=True, ids=names)


both = screen({"size": SMALL}, {"size": LARGE})  # for what has another place on a large screen


def snapshot(sequence: int = 1, **keys: Any) -> Snapshot:
    return parse_snapshot(frame(document(sequence, **keys)))


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakeBroker:
    """Answers requests as told; while `busy` it does not answer at all."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, dict[str, object]]] = []
        self.answer = Answer(True, "It was done.")
        self.is_free = threading.Event()
        self.is_free.set()

    def __call__(self, address: str, action: str, arguments: Mapping[str, object]) -> Answer:
        self.requests.append((address, action, dict(arguments)))
        assert self.is_free.wait(PATIENCE_S)
        return self.answer


class ScreenPilot:
    """One screen under test. Its methods are what a user at the keyboard does and sees."""

    def __init__(self, size: tuple[int, int] = SMALL, *, fill: bool = True, **options: Any) -> None:
        """`fill`: the screen has seen some seconds of a run first."""
        self.size, self._fill = size, fill
        self.broker = FakeBroker()
        options = {"address": FEED, "ask": self.broker, "clock": Clock(), **options}
        self.clock = options["clock"]
        self.app = Top(**options)
        self._pilot: Pilot[None] | None = None

    @property
    def pilot(self) -> Pilot[None]:
        assert self._pilot is not None
        return self._pilot

    def play(self, script: Callable[[], Awaitable[None]]) -> None:
        async def run() -> None:
            if self._fill:
                for sequence in range(30, 42):
                    self.clock.now += 1.0
                    for each in (self.app.model, self.app.series):
                        each.update(snapshot(sequence), self.clock.now)
            async with self.app.run_test(size=self.size) as pilot:
                self._pilot = pilot
                await self.until(lambda: bool(self.lines()[-1].strip()))  # the footer comes last
                await script()

        asyncio.run(asyncio.wait_for(run(), 60))

    async def hears(self, news: Snapshot, after_s: float = 0.0) -> None:
        self.clock.now += after_s
        self.app.heard(news)
        await self.pilot.pause()

    async def waits(self, seconds: float) -> None:
        self.clock.now += seconds
        self.app.redraw()
        await self.pilot.pause()

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.pilot.pause()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Let the screen work on what other threads tell it, until something holds."""
        for _ in range(int(PATIENCE_S / 0.01)):
            if holds():
                return
            await self.pilot.pause(0.01)
        raise AssertionError(f"it never came to that:\n{self.text()}")

    async def sees(self, *parts: str) -> None:
        await self.until(lambda: all(part in self.text() for part in parts))

    async def steers_nothing(self, why: str) -> None:
        """No key sends a request; each says why."""
        for key in ("k", "s", "l", "p", "S", "ctrl+x"):
            assert why not in self.flat()
            await self.press(key)
            assert why in self.flat()
            await self.press("escape")
        assert not self.broker.requests

    def lines(self) -> list[str]:
        return [strip.text.rstrip() for strip in self.strips()]

    def strips(self) -> list[Strip]:
        """The same in its colours."""
        return self.app.screen._compositor.render_strips()

    def text(self) -> str:
        return "\n".join(self.lines())

    def shows(self, *parts: str) -> bool:
        """All of this stands there now; in a dialog, wherever its lines break."""
        text = self.text() + self.flat()
        missing = [part for part in parts if part not in text]
        assert not missing, f"{missing} not in\n{text}"
        return True

    def flat(self) -> str:
        """The dialog, or if there is none the screen, in one line: sentences break anywhere."""
        inside = [line.split("│")[1] for line in self.lines() if line.count("│") == 2]
        return " ".join(" ".join(inside or self.lines()).split())

    def matches(self, name: str) -> None:
        """The screen is the stored picture of this name and size."""
        matches(f"{name}_{self.size[0]}x{self.size[1]}.txt", self.text())

    def workers(self) -> list[str]:
        """Ids in the table, in their order."""
        return [worker.id for worker in self.app.table.listed]

    def marked(self) -> str | None:
        """The worker under the cursor of the table."""
        worker = self.app.table.marked
        return None if worker is None else worker.id

    def header_is(self, fresh: str) -> bool:
        """The whole first line has the colour of a feed that is LATE or STALE."""
        return self.app.screen_stack[0].query_one("#header").has_class(fresh)


def shown(
    news: Mapping[str, Any], size: tuple[int, int] = SMALL, keys: Sequence[str] = (), **options: Any
) -> str:
    """What the full screen shows of one snapshot, after these keys."""
    pilot = ScreenPilot(size, fill=False, **options)
    found: list[str] = []

    async def script() -> None:
        await pilot.hears(parse_snapshot(frame(news)))
        await pilot.press(*keys)
        found.append(pilot.text())

    pilot.play(script)
    return found[0]
