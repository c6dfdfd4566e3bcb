"""Results of the benchmark and of the demo, made up."""

from __future__ import annotations

from diloco_tools.bench.report.figures import Figure, Report
from diloco_tools.demo.results import Point, Results, Settings, WorkerResult


def report(*figures: Figure, skipped: tuple[str, ...] = ()) -> Report:
    about = {"cores": 2}
    return Report("diloco-bench all", "2026-01-01T00:00:00+00:00", 1.0, about, figures, skipped)


SETTINGS = Settings(steps=100, workers=2, sync_every=25, wire_dtype="bf16", reply_dtype="fp32")


RESULTS = Results(
    settings=SETTINGS,
    parameters=1000,
    rounds=4,
    workers=(
        WorkerResult("worker-0", seconds=5.0, seconds_waited=1.0, bytes_up=10, bytes_down=20),
        WorkerResult("worker-1", seconds=6.0, seconds_waited=3.0, bytes_up=12, bytes_down=22),
    ),
    diloco_curve=(Point(50, 3.0), Point(100, 2.0)),
    single_curve=(Point(50, 3.5), Point(100, 2.5)),
    single_seconds=4.0,
)
