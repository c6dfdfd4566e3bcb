"""Custom splits of the model: read from a file or made by a function, and compared with a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from diloco_protocol.errors import UsageError
from diloco_protocol.fragments import OWN, Choose, FragmentPlan, OwnSplit
from diloco_protocol.manifest import Manifest, summarise

if TYPE_CHECKING:  # both import torch, which takes seconds; `diloco-broker plan` does not need it
    from diloco_broker.config import BrokerConfig
    from diloco_broker.storage.checkpoint_format import Checkpoint

Split = Callable[[Manifest], FragmentPlan]


def read_split(path: Path) -> OwnSplit:
    """Read the file of --fragment-plan; raises UsageError if it is not a split."""
    source = f"--fragment-plan {path}"
    try:
        return OwnSplit.from_json(path.read_text("utf-8"), source)
    except OSError as error:
        raise UsageError(f"{source} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UsageError(f"{source} is not JSON: it is not text.") from None


def make_split(config: BrokerConfig, choose: Choose | None) -> Split | None:
    """The custom split of the model, by a file or the function given to `Broker`; None for a pattern.

    Raises UsageError for contradictory options or an invalid file.
    """
    pieces = config.num_fragments
    if choose is not None:
        if config.fragment_plan is not None or config.fragment_pattern != "strided":
            raise UsageError(
                "fragment_plan is a function, but the configuration has a file or a pattern as well; "
                "remove one of them."
            )
        return lambda manifest: FragmentPlan.by(manifest, pieces, choose)
    if config.fragment_plan is None:
        return None
    split = read_split(Path(config.fragment_plan))
    if split.num_fragments != pieces:
        raise UsageError(
            f"{split.source} has {split.num_fragments} fragments, but --num-fragments is {pieces}; "
            f"give --num-fragments {split.num_fragments}."
        )
    return split.plan


def check_same(config: BrokerConfig, split: Split | None, found: Checkpoint, path: Path) -> None:
    """Reject a split that differs from the checkpoint's, because the split numbers the chunks of a run.

    If both use the same pattern, the checkpoint's split is kept, even if this release splits by that
    pattern differently. Otherwise UsageError names the parameters that would change their fragment.
    """
    record, before = found.record, found.config.get("fragment_pattern")
    if split is None and before == config.fragment_pattern:
        return
    if split is None:
        plan = FragmentPlan.of(record.manifest, config.num_fragments, config.fragment_pattern)
        given = f"--fragment-pattern {config.fragment_pattern}"
    else:
        plan = split(record.manifest)
        given = f"--fragment-plan {config.fragment_plan or '(the function)'}"
    entries = record.manifest.entries
    moved = [
        f"{entry.name} in fragment {now} instead of {was}"
        for entry, was, now in zip(entries, record.plan, plan.numbers(record.manifest), strict=True)
        if was != now
    ]
    if moved:
        had = "the same --fragment-plan" if before == OWN else f"--fragment-pattern {before}"
        raise UsageError(
            f"{given} splits the model differently from the checkpoint {path}: "
            f"{summarise(moved)}; give {had}, or --resume none to start a new run."
        )
