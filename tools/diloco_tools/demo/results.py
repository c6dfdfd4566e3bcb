"""What the demo found: the summary that is written, and the table that is printed."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from diloco_protocol.dtypes import SIZES
from diloco_tools.demo.settings import Settings

Record = Mapping[str, Any]


def summary(
    settings: Settings,
    parameters: int,
    *,
    workers: Sequence[Record],
    diloco_curve: Sequence[Record],
    single: Record,
    single_curve: Sequence[Record],
) -> dict[str, Any]:
    """What goes into summary.json; KeyError if a figure is missing.

    Args:
        parameters: trainable ones of the model.
        workers, single: the last record of each log.
        diloco_curve, single_curve: of the global model and the single worker, `val_loss` in nats per
            byte after `step` inner steps of each worker.
    """
    synced = [worker["sync_metrics"] for worker in workers]
    data_parallel, formula = data_parallel_bytes(settings, parameters)
    return {
        "single": {
            "val_loss": single_curve[-1]["val_loss"],
            "steps": settings.steps,
            "seconds": single["seconds"],
            "curve": single_curve,
        },
        "diloco": {
            "val_loss": diloco_curve[-1]["val_loss"],
            "workers": settings.workers,
            "rounds": settings.rounds,
            "steps": settings.steps,
            "seconds": max(worker["seconds"] for worker in workers),
            "seconds_waited": sum(each["seconds_waited"] for each in synced) / len(synced),
            "curve": diloco_curve,
        },
        "bytes": {
            "up": sum(each["bytes_up"] for each in synced),
            "down": sum(each["bytes_down"] for each in synced),
            "data_parallel": data_parallel,
            "data_parallel_formula": formula,
            "int4z_computed": few_bits_bytes(settings, parameters),
        },
        "parameters": parameters,
        "settings": asdict(settings),
    }


def data_parallel_bytes(settings: Settings, parameters: int) -> tuple[int, str]:
    """Bytes that data-parallel training would have sent, and the formula with its figures.

    Gradients up, parameters down, at every step: steps x workers x trainable parameters x (up + down
    bytes for each at our wire dtypes).
    """
    up, down = (SIZES[name].element for name in (settings.wire_dtype, settings.reply_dtype))
    count = round(settings.steps * settings.workers * parameters * (up + down))
    return count, (
        f"data-parallel bytes = steps x workers x trainable parameters x (up + down bytes) = "
        f"{settings.steps} x {settings.workers} x {parameters:,} x "
        f"({up:g} in {settings.wire_dtype} + {down:g} in {settings.reply_dtype}) = {count:,}"
    )


def few_bits_bytes(settings: Settings, parameters: int) -> int:
    """Bytes that the same rounds would have sent with int4z both ways: computed, not measured.

    Each worker takes the first version whole, in fp32; then about 2.2 bits a parameter up and down.
    """
    a_round = 2 * SIZES["int4z"].element * parameters
    return round(settings.workers * (4 * parameters + settings.rounds * a_round))


def table(found: Record) -> Table:
    """The small table that ends the demo, of its summary."""
    single, diloco, sent = found["single"], found["diloco"], found["bytes"]
    data_parallel = megabytes(sent["data_parallel"])
    if moved := sent["up"] + sent["down"]:
        data_parallel += f" ({sent['data_parallel'] / moved:.0f}x)"
    shown = Table(title=f"{found['parameters']:,} parameters, {diloco['steps']} steps each")
    shown.add_column("")
    shown.add_column("single worker", justify="right")
    shown.add_column(f"DiLoCo, {diloco['workers']} workers", justify="right", style="bold")
    per_step = f"every {found['settings']['sync_every']} steps"
    losses = (f"{each['val_loss']:.4f}" for each in (single, diloco))
    shown.add_row("validation loss (nats per byte)", *losses)
    shown.add_row("rounds", "-", f"{diloco['rounds']} ({per_step})")
    shown.add_row("bytes on the wire, up", "-", megabytes(sent["up"]))
    shown.add_row("bytes on the wire, down", "-", megabytes(sent["down"]))
    computed = megabytes(sent["int4z_computed"])
    shown.add_row("both ways in int4z (computed)", "-", f"about {computed}")
    shown.add_row("data-parallel would have sent", "-", data_parallel)
    seconds = (f"{each['seconds']:.0f}" for each in (single, diloco))
    shown.add_row("seconds of training", *seconds)
    shown.add_row("of these in communication (mean)", "-", f"{diloco['seconds_waited']:.1f}")
    return shown


def megabytes(count: int) -> str:
    """A number of bytes for people, in units of 10^6.

    >>> megabytes(1_234_567)
    '1.2 MB'
    """
    return f"{count / 1e6:,.1f} MB"
