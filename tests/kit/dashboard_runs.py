"""What the dashboard is shown in a browser: a live run, and the address of its page."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from diloco_broker import Broker
from diloco_worker import DiLoCoClient
from kit.dashboard_server import TOKEN, Site
from kit.feed_snapshots import PATIENCE_S
from kit.whole_run import make_config, mlp


@contextmanager
def a_run(workers: int = 2, **options: Any) -> Iterator[tuple[Broker, list[DiLoCoClient]]]:
    """A live broker, and clients that have joined it."""
    clients = []
    with Broker(make_config(workers=workers, **options)) as broker:
        try:
            for number in range(workers):
                client = DiLoCoClient(broker.address, worker_id=f"w{number}", timeout=PATIENCE_S)
                client.join(mlp())
                clients.append(client)
            yield broker, clients
        finally:
            for client in clients:
                client.leave()


def with_token(site: Site, token: str = TOKEN) -> str:
    return f"{site.address}/?token={token}"
