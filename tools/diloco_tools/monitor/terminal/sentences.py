"""What the dialogs of diloco-top say: what is asked, and what would come of it. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from diloco_protocol.feed import DEAD, Snapshot, Worker
from diloco_protocol.monitor.fields import OF_WORKER, TOP, UNEASY, columns
from diloco_protocol.monitor.rows import Listed, cell
from diloco_protocol.quantities import NONE, plural
from diloco_tools.monitor.terminal.glyphs import QUIET, STYLES, Glyphs
from diloco_tools.monitor.terminal.keys import Key, sign


def kick(worker: Worker, snapshot: Snapshot, glyphs: Glyphs) -> Text:
    """Removing a worker: what happens to its work, to it, and to the round."""
    if worker.health == DEAD:
        return Text("It is dead. The run no longer waits for it, and it leaves the table.")
    said = (
        "The round no longer waits for it. It is notified; it trains on alone or stops, and does not "
        "come back by itself. "
    )
    if worker.inner_step > 0:
        said += f"Its {worker.inner_step} steps since its last push are lost to the run. "
    if worker.level:
        said = said.replace("The round", "Its relay does it, and", 1)
    if worker.workers is not None:
        said = (
            "The round no longer waits for this relay, which ends. The workers downstream wait until a "
            "relay is started there again. "
        )
    gone = 1 if worker.workers is None else worker.workers
    left = max(0, snapshot.counts.alive - gone * (worker.health != "lost"))
    said += f"{plural(left, 'worker')} {'is' if left == 1 else 'are'} left."
    text = Text(glyphs.printable(said))
    floor = snapshot.round.floor if snapshot.round and not worker.level else 0
    if snapshot.mode != "async" and left < max(1, floor):
        needs = f" The round needs {floor}: the run will wait for workers to join."
        text.append(needs if left or floor else " The run will wait.", STYLES[UNEASY])
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
    text = Text("A closing round is finished; an open one is abandoned. ")
    if saved is not None:
        text.append(glyphs.printable(f"The broker saves to {saved.folder}, "))
    elif snapshot is not None and "checkpoint" in snapshot.raw:
        text.append("The broker saves NOTHING (it has no save folder), ", STYLES[UNEASY])
    else:
        text.append("The broker saves if it has a save folder, ")
    return text.append(
        "notifies its workers that the run is over, and exits. To restart it soon: "
        "diloco-broker shutdown --restarting"
    )


def rate_change(old: float | None, typed: str, glyphs: Glyphs) -> tuple[float | None, str]:
    """The number that was typed if it may be asked for, and what to say of it so far."""
    before = f"{old:g}" if old is not None else glyphs.none
    try:
        new = float(typed)
    except ValueError:
        wrong = f"{typed!r} is not a number" if typed.strip() else "type the new one"
        return None, f"outer learning rate {before} {glyphs.arrow} ?   ({wrong})"
    if not (math.isfinite(new) and new > 0):
        return None, f"outer learning rate {before} {glyphs.arrow} ?   (it has to be above 0)"
    return new, f"outer learning rate {before} {glyphs.arrow} {new:g}"


def details(listed: Listed, glyphs: Glyphs) -> Text:
    """Everything that the feed says about one worker."""
    worker = listed.worker
    rows = [("", "as its relay reports")] if worker.level else []
    rows += [("Process", str(worker.pid))] if worker.pid else []
    for field in OF_WORKER:
        value, said = field.value(worker) if not field.title else 0, cell(field, listed).text
        is_usual = value is None or (field.path in ("processes", "connections") and value == 1)
        if not is_usual and said != NONE and field.path != "sync_every":
            unit = f" {field.unit}" if field.unit not in ("", "pushes", "tokens") else ""
            rows.append((field.label, said + unit))
    rows += [("Warning", worker.warning)] if worker.warning else []
    rows += ((str(key), str(value)) for key, value in worker.extra.items())
    text = Text()
    for label, value in rows:
        text.append(f"{glyphs.printable(label)[:24]:<25}", QUIET)
        text.append(glyphs.printable(value) + "\n")
    text.rstrip()
    return text


def help_page(keys: Sequence[Key], glyphs: Glyphs) -> Table:
    """All keys of this mode, and what the columns mean."""
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", style="bold", min_width=11)
    for key in (key for key in keys if key.told):
        table.add_row(sign(key, glyphs), key.told)
    table.add_row("", "")
    words = {field.title.upper(): field.help for field in columns(TOP)}
    words["~"] = "before inner steps: estimated from the worker's pace since its last report"
    words["curves"] = (
        f"scaled by their newer half; {glyphs.above} {glyphs.below} mark older values beyond that"
    )
    words["LIVE"] = "data under 3 s old; LATE up to 10 s; then STALE"
    for word, meaning in words.items():
        table.add_row(word, meaning)
    return table
