"""The broker as a named actor of Ray.

Ray restarts it when its process or its node is gone. It then resumes from its checkpoints at another
address, which it writes to the address file that all islands read.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from diloco_broker import Broker, BrokerConfig
from diloco_protocol.clients.address_file import write_address
from diloco_tools.launch.commands import output_of
from diloco_tools.ray.storage import Storage

MODEL = "model.safetensors"


def name_of(storage: Storage) -> str:
    """The name of the actor; only one run of a name may be active."""
    return f"diloco-broker-{storage.name}"


class BrokerActor:
    """Serves one run. Its methods return at once: the broker runs in its own thread."""

    def __init__(self, config: BrokerConfig, storage: Storage) -> None:
        logging.basicConfig(format="diloco-broker: %(message)s", level=logging.INFO)
        host = ray.util.get_node_ip_address()
        host = f"[{host}]" if ":" in host else host
        self._storage = storage
        self._broker = Broker(
            replace(
                config,
                bind=f"tcp://{host}:*",
                feed=f"tcp://{host}:*",
                save_dir=str(storage.checkpoints),
                keys=str(storage.keys),
            ),
            initial=None,
        ).start()
        write_address(storage.address_file, self._broker.address, self._broker.feed_address)

    def addresses(self) -> tuple[str, str]:
        """The addresses of the control port and of the feed."""
        return self._broker.address, self._broker.feed_address

    def pid(self) -> int:
        return os.getpid()

    def finish(self) -> Path:
        """End the run, and export its global parameters. Idempotent."""
        self._broker.stop()
        self._storage.final.mkdir(exist_ok=True)
        file = self._storage.final / MODEL
        words = ["export", str(self._storage.checkpoints), "--to", str(file), "--force"]
        output_of([sys.executable, "-m", "diloco_broker", *words])
        return self._storage.final


def start_broker(config: BrokerConfig, storage: Storage) -> Any:
    """The handle of a new actor; it reserves no resources, and Ray restarts it."""
    remote = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(BrokerActor)
    return remote.options(name=name_of(storage)).remote(config, storage)
