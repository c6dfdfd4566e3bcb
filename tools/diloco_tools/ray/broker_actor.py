"""The broker as an actor of Ray: a name by which it is found, and a new life wherever there is room.

Ray starts it again when its process or its node is gone; it goes on from its checkpoints then, at
another address, which it writes where all islands look.
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
    """Of the actor; one run of a name at a time."""
    return f"diloco-broker-{storage.name}"


class BrokerActor:
    """Serves one run. Its methods answer at once: the broker has a thread of its own."""

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
        """Of the control port, and of the feed."""
        return self._broker.address, self._broker.feed_address

    def pid(self) -> int:
        return os.getpid()

    def finish(self) -> Path:
        """End the run, and write its global parameters as a file of their own. Again: the same."""
        self._broker.stop()
        self._storage.final.mkdir(exist_ok=True)
        file = self._storage.final / MODEL
        words = ["export", str(self._storage.checkpoints), "--to", str(file), "--force"]
        output_of([sys.executable, "-m", "diloco_broker", *words])
        return self._storage.final


def start_broker(config: BrokerConfig, storage: Storage) -> Any:
    """The handle of a new actor; it takes nothing of what Ray hands out, and lives again by itself."""
    remote = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(BrokerActor)
    return remote.options(name=name_of(storage)).remote(config, storage)
