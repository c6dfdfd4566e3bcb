"""The results of a demo: the summary in its file, and the printed table."""

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
    same_tokens: Record,
    same_tokens_curve: Sequence[Record],
) -> dict[str, Any]:
    """The contents of summary.json; KeyError if a figure is missing.

    Args:
        parameters: trainable parameters of the model.
        workers, single, same_tokens: the last record of each log. `single` trained for the steps of one
            DiLoCo worker, `same_tokens` on as many tokens as all of them together.
        diloco_curve, single_curve, same_tokens_curve: for the global model and each baseline `val_loss`
            in nats per byte after `step` inner steps of each worker.
    """
    synced = [worker["sync_metrics"] for worker in workers]
    data_parallel, formula = data_parallel_bytes(settings, parameters)
    tokens = settings.steps * settings.batch * settings.context  # of one worker
    return {
        "single": {
            "val_loss": single_curve[-1]["val_loss"],
            "steps": settings.steps,
            "tokens": tokens,
            "seconds": single["seconds"],
            "curve": single_curve,
        },
        "same_tokens": {
            "val_loss": same_tokens_curve[-1]["val_loss"],
            "steps": settings.steps,
            "batch": settings.workers * settings.batch,
            "tokens": settings.workers * tokens,
            "seconds": same_tokens["seconds"],
            "curve": same_tokens_curve,
        },
        "diloco": {
            "val_loss": diloco_curve[-1]["val_loss"],
            "workers": settings.workers,
            "rounds": settings.rounds,
            "steps": settings.steps,
            "tokens": settings.workers * tokens,
            "seconds": max(worker["seconds"] for worker in workers),
            "seconds_waited": sum(each["seconds_waited"] for each in synced) / len(synced),
            "curve": diloco_curve,
        },
        "bytes": {
            "up": sum(each["bytes_up"] for each in synced),
            "down": sum(each["bytes_down"] for each in synced),
            "data_parallel": data_parallel,
            "data_parallel_formula": formula,
            "int4z_computed": quantized_bytes(settings, parameters),
        },
        "parameters": parameters,
        "settings": asdict(settings),
    }


def data_parallel_bytes(settings: Settings, parameters: int) -> tuple[int, str]:
    """Bytes that data-parallel training would send, and the formula with its figures.

    Gradients up and parameters down at every step: steps x workers x trainable parameters x (bytes per
    parameter up + down in our wire dtypes).
    """
    up, down = (SIZES[name].element for name in (settings.wire_dtype, settings.reply_dtype))
    count = round(settings.steps * settings.workers * parameters * (up + down))
    return count, (
        f"data-parallel bytes = steps x workers x trainable parameters x (up + down bytes) = "
        f"{settings.steps} x {settings.workers} x {parameters:,} x "
        f"({up:g} in {settings.wire_dtype} + {down:g} in {settings.reply_dtype}) = {count:,}"
    )


def quantized_bytes(settings: Settings, parameters: int) -> int:
    """Bytes that the same rounds would send with int4z both ways: computed, not measured.

    Each worker receives the complete first version in fp32, then about 2.2 bits a parameter up and down.
    """
    a_round = 2 * SIZES["int4z"].element * parameters
    return round(settings.workers * (4 * parameters + settings.rounds * a_round))


def table(found: Record) -> Table:
    """The table of a summary, printed at the end of the demo."""
    single, same_tokens, diloco = found["single"], found["same_tokens"], found["diloco"]
    sent, runs = found["bytes"], (single, same_tokens, diloco)
    shown = Table(title=f"{found['parameters']:,} parameters, {diloco['steps']} steps each")
    shown.add_column("")
    shown.add_column("one worker,\nsame steps", justify="right")
    shown.add_column("one worker,\nsame tokens", justify="right")
    shown.add_column(f"DiLoCo,\n{diloco['workers']} workers", justify="right", style="bold")
    shown.add_row("validation loss, nats per byte", *(f"{each['val_loss']:.4f}" for each in runs))
    shown.add_row("tokens (bytes of text)", *(f"{each['tokens']:,}" for each in runs))
    shown.add_row("seconds of training", *(f"{each['seconds']:.0f}" for each in runs))
    waited = f"{diloco['seconds_waited']:.1f}"
    shown.add_row("  of these in communication (mean)", "-", "-", waited)
    shown.add_row("rounds", "-", "-", str(diloco["rounds"]))
    shown.add_row("sent up", "-", "-", megabytes(sent["up"]))
    shown.add_row("sent down", "-", "-", megabytes(sent["down"]))
    shown.add_row("  both in int4z (computed)", "-", "-", megabytes(sent["int4z_computed"]))
    return shown


def traffic(found: Record) -> str:
    """The bytes of data-parallel training, absolute and relative to DiLoCo's."""
    sent, workers = found["bytes"], found["diloco"]["workers"]
    moved = sent["up"] + sent["down"]
    ratio = (
        f", {sent['data_parallel'] / moved:.0f}x the {megabytes(moved)} of DiLoCo" if moved else ""
    )
    return (
        f"Data-parallel training of {workers} workers, for the steps and tokens of the middle column, "
        f"would have sent {megabytes(sent['data_parallel'])}{ratio}."
    )


def megabytes(count: int) -> str:
    """A number of bytes in units of 10^6.

    >>> megabytes(1_234_567)
    '1.2 MB'
    """
    return f"{count / 1e6:,.1f} MB"
