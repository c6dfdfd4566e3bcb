"""What the dialogs of diloco-top say: what is asked, and what would come of it. Pure."""

import math
from collections.abc import Sequence

from rich.text import Text

from diloco_protocol.feed import DEAD, Snapshot, Worker
from diloco_tools.monitor.feed.series import Rate
from diloco_tools.top.drawing import facts
from diloco_tools.top.drawing.keys import Key, sign
from diloco_tools.top.drawing.notation import (
    QUIET,
    UNEASY,
    Glyphs,
    byte_size,
    duration,
    number,
    scaled,
)


def kick(worker: Worker, snapshot: Snapshot, glyphs: Glyphs) -> Text:
    """Removing a worker: what happens to its work, to it, and to the round."""
    if worker.health == DEAD:
        return Text("It is dead. The run no longer counts on it, and it leaves the table.")
    said = (
        "The round no longer waits for it. It is told; it trains on alone or stops, and does not "
        "come back by itself. "
    )
    if worker.inner_step > 0:
        said += f"Its {worker.inner_step} steps since its last push are lost to the run. "
    if worker.level:
        said = said.replace("The round", "Its relay does it, and", 1)
    if worker.workers is not None:
        said = (
            "The round no longer waits for this relay, which ends. The workers behind it wait until a "
            "relay is started there again. "
        )
    gone = 1 if worker.workers is None else worker.workers
    left = max(0, snapshot.counts.alive - gone * (worker.health != "lost"))
    said += f"{facts.plural(left, 'worker')} {'is' if left == 1 else 'are'} left."
    text = Text(glyphs.printable(said))
    floor = snapshot.round.floor if snapshot.round and not worker.level else 0
    if snapshot.mode != "async" and left < max(1, floor):
        needs = f" The round needs {floor}: the run will wait for workers to join."
        text.append(needs if left or floor else " The run will wait.", UNEASY)
    return text


def kick_title(worker: Worker, glyphs: Glyphs) -> str:
    return glyphs.printable(f"Kick {worker.id}" + (f" on {worker.host}?" if worker.host else "?"))


PAUSE = Text(
    "No round closes then, except one that is closing already: workers train to their next boundary "
    "and wait there. Nothing is lost. p again lets the run go on."
)


def shutdown(snapshot: Snapshot | None, glyphs: Glyphs) -> Text:
    """Ending the run: what is kept, and what the workers do."""
    saved = snapshot.checkpoint if snapshot else None
    text = Text("A round that is closing is finished; one that is open is given up. ")
    if saved is not None:
        text.append(glyphs.printable(f"The broker saves to {saved.folder}, "))
    elif snapshot is not None and "checkpoint" in snapshot.raw:
        text.append("The broker saves NOTHING, for it has no save folder, ", UNEASY)
    else:
        text.append("The broker saves if it has a save folder, ")
    return text.append(
        "tells its workers that the run is over, and ends. To have it back soon: "
        "diloco-broker shutdown --restarting"
    )


def shutdown_word(snapshot: Snapshot | None) -> str:
    """What has to be typed: the run's name as the header shows it."""
    return (facts.run_name(snapshot) if snapshot else "") or "shutdown"


def rate_change(old: float | None, typed: str, glyphs: Glyphs) -> tuple[float | None, str]:
    """The number that was typed if it may be asked for, and what to say of it so far."""
    before = f"{old:g}" if old is not None else glyphs.none
    try:
        new = float(typed)
    except ValueError:
        wrong = f"{typed!r} is no number" if typed.strip() else "type the new one"
        return None, f"outer learning rate {before} {glyphs.arrow} ?   ({wrong})"
    if not (math.isfinite(new) and new > 0):
        return None, f"outer learning rate {before} {glyphs.arrow} ?   (it has to be above 0)"
    return new, f"outer learning rate {before} {glyphs.arrow} {new:g}"


def _of_several(worker: Worker) -> Sequence[tuple[str, str]]:
    if worker.processes <= 1:
        return ()
    return [("processes", f"{worker.processes}, {worker.connections} of them connected")]


def _of_relay(worker: Worker) -> Sequence[tuple[str, str]]:
    return [] if worker.workers is None else [("relay of", facts.plural(worker.workers, "worker"))]


def _as_told_by_its_relay(worker: Worker, none: str) -> Sequence[tuple[str, str]]:
    """The same of one behind a relay, of which the broker knows what that has told."""
    pace, counted = worker.steps_per_s, worker.sync_age_s
    return (
        ("id", worker.id),
        *_of_relay(worker),
        ("host", worker.host),
        ("health, state", f"{worker.health}, {worker.state}, as its relay has told"),
        ("round", none if worker.round is None else str(worker.round)),
        ("inner steps", f"{worker.inner_step} of {worker.sync_every} since its last boundary"),
        ("all steps", str(worker.step)),
        ("speed", none if pace is None else f"{scaled(pace)} steps/s"),
        ("loss", number(worker.loss, none) if worker.loss_is_finite else "not finite"),
        ("last heard", f"{duration(worker.beat_age_s)} ago, by its relay"),
        ("last counted", none if counted is None else f"{duration(counted)} ago"),
        ("staleness", f"{facts.plural(worker.staleness, 'version')} behind"),
        ("pushes", str(worker.pushes)),
    )


def details(worker: Worker, rate: Rate | None, glyphs: Glyphs) -> Text:
    """Everything that the feed says about one worker."""
    none = glyphs.none
    if worker.level:
        return _lines(_as_told_by_its_relay(worker, none), glyphs)
    rows: Sequence[tuple[str, str]] = (
        ("id", worker.id),
        *_of_relay(worker),
        ("host, process", f"{worker.host}, {worker.pid}"),
        *_of_several(worker),
        ("health, state", f"{worker.health}, {worker.state}"),
        *([("warning", worker.warning)] if worker.warning else ()),
        *([("same as", f"the updates of {worker.same_as}")] if worker.same_as else ()),
        ("round", none if worker.round is None else str(worker.round)),
        ("inner steps", f"{worker.inner_step} of {worker.sync_every} since its last boundary"),
        ("all steps", f"{worker.step}, {scaled(worker.tokens)} tokens since it joined"),
        ("speed", none if worker.steps_per_s is None else f"{scaled(worker.steps_per_s)} steps/s"),
        ("loss", number(worker.loss, none) if worker.loss_is_finite else "not finite"),
        ("last heard", f"{duration(worker.beat_age_s)} ago"),
        (
            "last counted",
            none if worker.sync_age_s is None else f"{duration(worker.sync_age_s)} ago",
        ),
        ("staleness", f"{facts.plural(worker.staleness, 'version')} behind"),
        ("sent", _bytes(worker.bytes_up, rate.up if rate else None)),
        ("received", _bytes(worker.bytes_down, rate.down if rate else None)),
        ("pushes", f"{worker.pushes}, {worker.rejected} rejected"),
        *((str(key), str(value)) for key, value in worker.extra.items()),
    )
    return _lines(rows, glyphs)


def _lines(rows: Sequence[tuple[str, str]], glyphs: Glyphs) -> Text:
    text = Text()
    for label, value in rows:
        text.append(f"{glyphs.printable(label)[:14]:<15}", QUIET)
        text.append(glyphs.printable(value) + "\n")
    text.rstrip()
    return text


def _bytes(count: int, rate: float | None) -> str:
    return byte_size(count) + (f", now {byte_size(rate)}/s" if rate is not None else "")


WORDS = (
    ("alive", "here; participating: in this round; averaged: in the last"),
    ("INNER/H", "inner steps since its boundary, of its H; ~: by its pace"),
    ("BEAT, SYNC", "since it was last heard; since its work last counted"),
    ("OLD", "staleness: versions that its parameters are behind"),
    ("TX/S, RX/S", "bytes a second it sends, receives; SENT, GOT: in all"),
    ("curves", "scaled by their newer half; {above} {below} mark what is beyond that"),
    ("LIVE", "news under 3 s old; LATE to 10 s; then STALE, ages go on"),
)


def help_page(keys: Sequence[Key], glyphs: Glyphs) -> Text:
    """All keys of this mode, and what the short words mean."""
    text = Text()
    for key in (key for key in keys if key.sign):
        text.append(f"{sign(key, glyphs):>9}  ", "bold").append(key.told + "\n")
    for word, meaning in WORDS:
        text.append(f"\n{word:<11}", "bold").append(
            meaning.format(above=glyphs.above, below=glyphs.below)
        )
    return text
