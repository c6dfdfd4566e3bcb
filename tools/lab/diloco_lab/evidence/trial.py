"""One training run of an experiment, as a record of all its settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from diloco_lab.driver.records import record_of
from diloco_tools.demo import model as gpt

Arm = Literal["diloco", "alone", "local", "data-parallel"]
Inner = Literal["", "muon"]
Harm = Literal["", "reversed", "enormous"]

MODELS: Mapping[str, gpt.GPTConfig] = {
    "0.4M": gpt.GPTConfig(context=32),
    "0.8M": gpt.GPTConfig(context=32, layers=4),
}


def parameters(model: str) -> tuple[int, ...]:
    """Numbers of elements of each of its tensors.

    >>> sum(parameters("0.4M"))
    430080
    """
    config = MODELS[model]
    width, ends = config.width, (gpt.VOCABULARY * config.width, config.context * config.width)
    block = (3 * width * width, width * width, 4 * width * width, 4 * width * width)
    return (*ends, *(block * config.layers))


# Best for one worker over a thousand steps of four windows; the demo has more and larger ones.
LEARNING_RATE = 1.5e-3


@dataclass(frozen=True)
class Trial:
    """Determines a run to the bit, on machines that compute alike.

    Attributes:
        seed: of parameters, batches, and of who fails.
        arm: DiLoCo with a real broker; one worker alone, or with server="local"; or all replicas with
            one gradient at each step, which is data-parallel training at the same number of tokens.
        workers: M.
        steps: T, optimizer steps of each worker; where speeds differ, on the mean.
        sync_every: H.
        model: one of MODELS.
        batch: windows in each step of each worker.
        lr: peak inner learning rate.
        inner: AdamW; or Muon for the matrices of the blocks, and AdamW for the rest.
        lora: rank of the adapters that are trained, of a model that has been trained before
            (`training.first_trained`); 0: all parameters are trained, from random ones.
        broker: options of `BrokerConfig`, by name.
        speeds: steps per virtual second of each worker; () where all make one. A worker of v steps a
            second has made H of them after H / v seconds, and communication takes none.
        dylu: Dynamic Local Updates: a worker's H is what the broker works out for these speeds.
        drop: probability of a worker's contribution to a round to be lost.
        harm: what the last worker does with its pseudo-gradients.
        every: rounds between two points of the curve; 0: only the last.
        windows: held-out windows of each evaluation.
        data: text file or folder; None: the source of Python's standard library, and for adapters its
            reference manual in English (`pydoc_data`), which is not in that source.
    """

    seed: int = 0
    arm: Arm = "diloco"
    workers: int = 2
    steps: int = 1000
    sync_every: int = 10
    model: str = "0.4M"
    batch: int = 4
    lr: float = LEARNING_RATE
    inner: Inner = ""
    lora: int = 0
    broker: Mapping[str, Any] = field(default_factory=dict)
    speeds: tuple[float, ...] = ()
    dylu: bool = False
    drop: float = 0.0
    harm: Harm = ""
    every: int = 0
    windows: int = 512
    data: str | None = None

    @property
    def rounds(self) -> int:
        """Boundaries of each worker; where speeds differ, on the mean."""
        return self.steps // self.sync_every

    def steps_between(self, worker: int) -> int:
        """H of this worker.

        With Dynamic Local Updates max(1, floor(v / v_max H)) (Liu et al. 2024, arXiv 2401.09135,
        section 5), where a broker arrives once it has heard the speeds.
        """
        if not self.dylu or not self.speeds:
            return self.sync_every
        share = self.speeds[worker] / max(self.speeds) * self.sync_every
        return max(1, int(share + 1e-9))

    @property
    def options(self) -> dict[str, Any]:
        """The options of its broker. Rounds add up in the order of the workers, to be repeatable."""
        usual: dict[str, Any] = {"outer_momentum_warmup": "constant"}
        if not self.is_async:
            usual["deterministic"] = True
        if self.drop:
            usual["weight_by"] = "tokens"
        return usual | dict(self.broker)

    @property
    def is_async(self) -> bool:
        return self.broker.get("mode") == "async"

    @property
    def work(self) -> int:
        """Inner steps of all workers, of which a larger model's count more."""
        size = sum(parameters(self.model)) / sum(parameters("0.4M"))
        return round(self.steps * (1 if self.arm == "alone" else self.workers) * size)

    @property
    def recipe(self) -> gpt.Recipe:
        return gpt.Recipe(self.steps, self.batch, MODELS[self.model].context, self.lr, "cosine")

    @property
    def key(self) -> str:
        """The same for the same trial; a line of JSON."""
        return json.dumps(self.plain(), sort_keys=True)

    def plain(self) -> dict[str, Any]:
        """Its fields for JSON, without empty ones."""
        return {
            name: value for name, value in json.loads(json.dumps(asdict(self))).items() if value
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Trial:
        return record_of(cls, plain)

    def with_changes(self, **changes: Any) -> Trial:
        """A changed copy. Names that are not fields of a trial are options of the broker."""
        own = {each.name for each in fields(self)}
        changed = {name: value for name, value in changes.items() if name in own}
        options = {name: value for name, value in changes.items() if name not in own}
        return replace(self, **{"broker": {**self.broker, **options}, **changed})
