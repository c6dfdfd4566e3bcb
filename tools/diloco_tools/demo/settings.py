"""The settings of a demo."""

from dataclasses import dataclass

from diloco_tools.options import option


@dataclass(frozen=True)
class Settings:
    """All settings of a demo; with the text they determine the result."""

    steps: int = option(1500, "Inner steps of each worker, and of the single workers.")
    workers: int = option(2, "DiLoCo workers.")
    seed: int = option(0, "Seed of parameters and batches.")
    sync_every: int = option(50, "H: inner steps between two rounds; divides the steps.")
    batch: int = option(8, "Windows in each inner step.")
    context: int = option(64, "Bytes in each window.")
    schedule: str = "cosine"
    lr: float = option(3e-3, "Peak learning rate of the DiLoCo workers' AdamW.")
    single_lr: float = option(3e-3, "Peak learning rate of the single workers' AdamW.")
    outer_lr: float = option(0.8, "Learning rate of the broker's outer optimizer.")
    outer_momentum: float = option(0.5, "Nesterov momentum of the outer optimizer.")
    wire_dtype: str = "bf16"
    reply_dtype: str = "fp32"
    data: str | None = None

    def complaint(self) -> str | None:
        """One sentence about the first invalid setting, or None."""
        for name in ("steps", "workers", "sync_every", "batch", "context"):
            if getattr(self, name) < 1:
                return f"--{name.replace('_', '-')} must be positive, got {getattr(self, name)}"
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
