"""Two of three workers read the same data: the broker names them, from the bytes that they sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diloco_broker import Broker
from diloco_tools.monitor.report.page import page_of
from diloco_tools.monitor.report.reading import read_run
from kit.whole_run import an_mlp, make_config, run

WAYS: dict[str, dict[str, Any]] = {
    "streaming": {},
    "staged": {"deterministic": True, "wire_dtype": "bf16"},
    "quantised fragments": {"num_fragments": 2, "wire_dtype": "int4z"},
}


@pytest.mark.parametrize("way", WAYS)
def test_workers_on_the_same_data_are_named_in_the_log_and_in_the_report(
    way: str, tmp_path: Path
) -> None:
    folder = str(tmp_path / "run")
    workers = [an_mlp(data) for data in (0, 0, 1)]
    with Broker(make_config(workers=3, sync_every=4, save_dir=folder, **WAYS[way])) as broker:
        run(broker, workers, steps=12)
    found = [each for each in read_run(Path(folder)).said if "identical updates" in each.text]
    assert [each.count for each in found] == [1]
    assert found[0].text.startswith("w0 and w1 sent")
    assert "w0 and w1 sent identical updates" in page_of(read_run(Path(folder)))
