"""Results of the benchmark and of the demo, made up."""

from typing import Any

from diloco_lab.bench.report.figures import Figure, Report
from diloco_tools.demo.results import summary
from diloco_tools.demo.settings import Settings


def report(*figures: Figure, skipped: tuple[str, ...] = ()) -> Report:
    about = {"cores": 2}
    return Report(
        "python -m diloco_lab.bench all", "2026-01-01T00:00:00+00:00", 1.0, about, figures, skipped
    )


SETTINGS = Settings(steps=100, workers=2, sync_every=25, wire_dtype="bf16", reply_dtype="fp32")


def last_record(seconds: float, waited: float, up: int, down: int) -> dict[str, Any]:
    synced = {"seconds_waited": waited, "bytes_up": up, "bytes_down": down, "pushes": 4}
    return {"done": True, "step": 100, "seconds": seconds, "sync_metrics": synced}


RESULTS = summary(
    SETTINGS,
    1000,
    workers=[last_record(5.0, 1.0, 10, 20), last_record(6.0, 3.0, 12, 22)],
    diloco_curve=[{"step": 50, "val_loss": 3.0}, {"step": 100, "val_loss": 2.0}],
    single=last_record(4.0, 0.0, 0, 0),
    single_curve=[{"step": 50, "val_loss": 3.5}, {"step": 100, "val_loss": 2.5}],
    same_tokens=last_record(8.0, 0.0, 0, 0),
    same_tokens_curve=[{"step": 50, "val_loss": 2.75}, {"step": 100, "val_loss": 1.75}],
)
