"""The options of a broker once they are known to work together, and what workers are told of them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import PurePath

from diloco_broker.config.declaration import AUTO, Options
from diloco_broker.config.rules import check
from diloco_protocol.addresses import with_scheme
from diloco_protocol.messages import BUFFERS, RunConfig


@dataclass(frozen=True)
class BrokerConfig(Options):
    """Options of a broker, checked; `Options` declares them.

    Raises:
        UsageError: for a value that cannot work, naming it.
    """

    def __post_init__(self) -> None:
        if self.fragment_sync_delay is None:
            overlaps = self.num_fragments > 1 and not self.deterministic
            object.__setattr__(self, "fragment_sync_delay", AUTO if overlaps else 0)
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, PurePath):  # checkpoints hold the options as JSON
                object.__setattr__(self, each.name, str(value))
        for name in ("bind", "feed"):
            object.__setattr__(self, name, with_scheme(getattr(self, name)))
        check(self)

    @property
    def run_config(self) -> RunConfig:
        """The part that workers are told."""
        return RunConfig(
            mode=self.mode,
            sync_every=self.sync_every,
            num_fragments=self.num_fragments,
            fragment_sync_delay=self.least_delay,
            fragment_update_alpha=self.fragment_update_alpha,
            fragment_merge=self.fragment_merge,
            fragment_max_delay=self.fragment_max_delay,
            fragment_delay_auto=self.has_auto_delay,
            dylu=self.dylu,
            weight_by=self.weight_by,
            wire_dtype=self.wire_dtype,
            reply_dtype=self.reply_dtype,
            heartbeat_timeout=self.heartbeat_timeout,
            chunk_elements=self.chunk_elements,
            buffers=BUFFERS,
        )
