"""What is measured: each public function with a pool of processes is a part of the benchmark.

Its first sentence and its keywords are those of its command; see `bench.__main__`. Here are the options
that several of them have.
"""

from __future__ import annotations

from typing import Annotated

import typer

from diloco_lab.bench.sizes import SIZES
from diloco_lab.driver.options import choice, numbers

Size = Annotated[str, choice("--parameters", SIZES, "Model", several=False)]
Sizes = Annotated[str, choice("--parameters", SIZES, "Models, with commas")]
ReplyDtypes = Annotated[
    str, choice("--reply-dtype", ("fp32", "bf16", "fp16"), "On the way down, with commas")
]
Workers = Annotated[str, numbers("Numbers of workers, with commas.", 64)]
Repeats = Annotated[
    int, typer.Option(min=1, help="Measurements of each figure, in turn with its limit.")
]
