"""What the demo found: the records, the summary that is written, and the table that is printed."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

from diloco_protocol.dtypes import SIZES


def option(default: Any, told: str) -> Any:
    """A field that is an option of the command line, and its help."""
    return field(default=default, metadata={"help": told})


@dataclass(frozen=True)
class Settings:
    """Everything that decides how a demo goes, apart from the text itself."""

    steps: int = option(1500, "Inner steps of each worker, and of the single worker.")
    workers: int = option(2, "DiLoCo workers.")
    seed: int = option(0, "Decides parameters and batches.")
    sync_every: int = option(50, "H: inner steps between two rounds; divides the steps.")
    batch: int = option(8, "Windows in each inner step.")
    context: int = option(64, "Bytes in each window.")
    schedule: str = "cosine"
    lr: float = option(3e-3, "Peak learning rate of the DiLoCo workers' AdamW.")
    single_lr: float = option(3e-3, "Peak learning rate of the single worker's AdamW.")
    outer_lr: float = option(0.8, "Learning rate of the broker's outer optimizer.")
    outer_momentum: float = option(0.5, "Nesterov momentum of the outer optimizer.")
    wire_dtype: str = "bf16"
    reply_dtype: str = "fp32"
    data: str | None = None

    def complaint(self) -> str | None:
        """One sentence about the first setting that cannot work, or None."""
        for name in ("steps", "workers", "sync_every", "batch", "context"):
            if getattr(self, name) < 1:
                return f"--{name.replace('_', '-')} is {getattr(self, name)} but must be at least 1"
        if self.steps % self.sync_every:
            return (
                f"--steps {self.steps} is not a multiple of --sync-every {self.sync_every}: the last "
                f"{self.steps % self.sync_every} steps would be lost; "
                f"take {self.rounds * self.sync_every or self.sync_every} steps"
            )
        return None

    @property
    def rounds(self) -> int:
        return self.steps // self.sync_every


@dataclass(frozen=True)
class WorkerResult:
    """What one worker says at its end."""

    name: str
    seconds: float  # training and communication
    seconds_waited: float  # of these, the time in which training stood still for a round
    bytes_up: int
    bytes_down: int

    @classmethod
    def from_record(cls, name: str, record: Mapping[str, Any]) -> "WorkerResult":
        """From the last line of a worker's log; KeyError if a figure is missing."""
        metrics = record["sync_metrics"]
        return cls(
            name,
            float(record["seconds"]),
            float(metrics["seconds_waited"]),
            int(metrics["bytes_up"]),
            int(metrics["bytes_down"]),
        )


@dataclass(frozen=True)
class Point:
    """Validation loss, in nats per byte, after this many inner steps of each worker."""

    step: int
    val_loss: float


@dataclass(frozen=True)
class Results:
    """Both runs of a demo."""

    settings: Settings
    parameters: int  # trainable
    rounds: int
    workers: tuple[WorkerResult, ...]
    diloco_curve: tuple[Point, ...]  # of the global model
    single_curve: tuple[Point, ...]
    single_seconds: float

    @property
    def bytes_up(self) -> int:
        return sum(worker.bytes_up for worker in self.workers)

    @property
    def bytes_down(self) -> int:
        return sum(worker.bytes_down for worker in self.workers)

    @property
    def seconds_waited(self) -> float:
        """Mean over the workers."""
        return sum(worker.seconds_waited for worker in self.workers) / len(self.workers)

    @property
    def diloco_seconds(self) -> float:
        """Of the slowest worker."""
        return max(worker.seconds for worker in self.workers)

    @property
    def bytes_data_parallel(self) -> int:
        return data_parallel_bytes(self.settings, self.parameters)


def data_parallel_bytes(settings: Settings, parameters: int) -> int:
    """Bytes that data-parallel training would have sent: gradients up, parameters down, every step.

    steps x workers x trainable parameters x (up + down bytes for each at our wire dtypes).
    """
    per_parameter = SIZES[settings.wire_dtype].element + SIZES[settings.reply_dtype].element
    return settings.steps * settings.workers * parameters * per_parameter


def data_parallel_formula(settings: Settings, parameters: int) -> str:
    """The formula of `data_parallel_bytes` with its figures, for people."""
    return (
        f"data-parallel bytes = steps x workers x trainable parameters x (up + down bytes) = "
        f"{settings.steps} x {settings.workers} x {parameters:,} x "
        f"({SIZES[settings.wire_dtype].element} in {settings.wire_dtype} + "
        f"{SIZES[settings.reply_dtype].element} in {settings.reply_dtype}) = "
        f"{data_parallel_bytes(settings, parameters):,}"
    )


def summary(results: Results) -> dict[str, Any]:
    """What goes into summary.json."""
    settings = results.settings
    return {
        "single": {
            "val_loss": results.single_curve[-1].val_loss,
            "steps": settings.steps,
            "seconds": results.single_seconds,
            "curve": [asdict(point) for point in results.single_curve],
        },
        "diloco": {
            "val_loss": results.diloco_curve[-1].val_loss,
            "workers": settings.workers,
            "rounds": results.rounds,
            "steps": settings.steps,
            "seconds": results.diloco_seconds,
            "seconds_waited": results.seconds_waited,
            "curve": [asdict(point) for point in results.diloco_curve],
        },
        "bytes": {
            "up": results.bytes_up,
            "down": results.bytes_down,
            "data_parallel": results.bytes_data_parallel,
            "data_parallel_formula": data_parallel_formula(settings, results.parameters),
        },
        "parameters": results.parameters,
        "settings": asdict(settings),
    }


def table(results: Results) -> Table:
    """The small table that ends the demo."""
    settings = results.settings
    sent = results.bytes_up + results.bytes_down
    per_step = f"every {settings.sync_every} steps"
    shown = Table(title=f"{results.parameters:,} parameters, {settings.steps} steps each")
    shown.add_column("")
    shown.add_column("single worker", justify="right")
    shown.add_column(f"DiLoCo, {settings.workers} workers", justify="right", style="bold")
    rows = [
        (
            "validation loss (nats per byte)",
            f"{results.single_curve[-1].val_loss:.4f}",
            f"{results.diloco_curve[-1].val_loss:.4f}",
        ),
        ("rounds", "-", f"{results.rounds} ({per_step})"),
        ("bytes on the wire, up", "-", megabytes(results.bytes_up)),
        ("bytes on the wire, down", "-", megabytes(results.bytes_down)),
        (
            "data-parallel would have sent",
            "-",
            f"{megabytes(results.bytes_data_parallel)} ({results.bytes_data_parallel / sent:.0f}x)"
            if sent
            else megabytes(results.bytes_data_parallel),
        ),
        ("seconds of training", f"{results.single_seconds:.0f}", f"{results.diloco_seconds:.0f}"),
        ("of these in communication (mean)", "-", f"{results.seconds_waited:.1f}"),
    ]
    for row in rows:
        shown.add_row(*row)
    return shown


def megabytes(count: int) -> str:
    """A number of bytes for people, in units of 10^6.

    >>> megabytes(1_234_567)
    '1.2 MB'
    """
    return f"{count / 1e6:,.1f} MB"
