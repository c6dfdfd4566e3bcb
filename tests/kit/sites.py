"""Hubs with relays in one process, each in a thread of its own, and clients for workers."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from diloco_broker import Broker, BrokerConfig
from diloco_broker.relay.daemon import RelayBroker
from diloco_protocol.clients import Keys
from diloco_worker import DiLoCoClient
from kit.process_kit import PATIENCE_S, wait_for

ANYWHERE = "tcp://127.0.0.1:*"


def a_model() -> nn.Module:
    """Parameters, float buffers and an integer buffer: all segments that travel."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(24, 24), nn.BatchNorm1d(24), nn.Linear(24, 8))


def options(**given: Any) -> BrokerConfig:
    usual: dict[str, Any] = {"wire_dtype": "fp32", "bind": ANYWHERE, "feed": ANYWHERE}
    return BrokerConfig(**usual | given)


S = TypeVar("S", bound="Sites")


class Sites:
    """A hub, relays and workers: whatever was begun is ended with it.

    `make` makes the model that the hub begins with and each worker has.
    """

    def __init__(self, make: Callable[[], nn.Module] = a_model) -> None:
        self._make = make
        self._pieces = 1
        self._opened = ExitStack()
        self.clients: dict[str, DiLoCoClient] = {}

    def __enter__(self: S) -> S:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def hub(self, workers: int, *, has_model: bool = True, **given: Any) -> Broker:
        config = options(workers=workers, **{"relays": True} | given)
        self._pieces = config.num_fragments
        hub = Broker(config, self._make().state_dict() if has_model else None)
        self._serve(hub)
        return hub

    def relay(self, hub: Broker | RelayBroker | str, name: str) -> RelayBroker:
        """A relay that the hub has admitted."""
        relay = self.begin_relay(hub, name)
        wait_for(lambda: relay.is_connected)
        return relay

    def begin_relay(
        self, hub: Broker | RelayBroker | str, name: str, shows: Keys | None = None, **given: Any
    ) -> RelayBroker:
        """A relay that the hub may refuse. `shows` is its key for the hub."""
        where = hub if isinstance(hub, str) else hub.address
        relay = RelayBroker(options(**given), where, name=name, keys=shows)
        self._serve(relay)
        return relay

    def _serve(self, broker: Broker | RelayBroker) -> None:
        self._opened.callback(broker.stop)
        broker.start()

    def workers(self, at: Broker | RelayBroker, *names: str) -> list[DiLoCoClient]:
        """Workers that have joined, and hold the run's parameters."""
        made = []
        for name in names:
            client = DiLoCoClient(at.address, worker_id=name, timeout=PATIENCE_S)
            self._opened.callback(client.leave)
            client.join(self._make())
            self.clients[name] = client
            made.append(client)
        return made

    def delta(self, name: str, number: int) -> dict[str, Tensor]:
        """What a worker sends in a round: differences of parameters, values of buffers."""
        generator = torch.Generator().manual_seed(1000 * sum(map(ord, name)) + number)
        made: dict[str, Tensor] = {}
        model = self._make()
        frozen = {key for key, each in model.named_parameters() if not each.requires_grad}
        for key, value in model.state_dict().items():
            if key in frozen or not value.isfinite().all():
                continue
            if value.is_floating_point():
                made[key] = torch.randn(value.shape, generator=generator)
            else:
                made[key] = torch.randint(0, 100, value.shape, generator=generator)
        return made

    def push(self, *names: str, number: int) -> None:
        """Each of these sends its push of the round; all of each is in then."""
        fragment = number % self._pieces if self._pieces > 1 else None
        for name in names:
            self.clients[name].push(self.delta(name, number), fragment=fragment)

    def pull(self, *names: str) -> dict[str, Tensor]:
        """What each of these has, which must be the same, once its push is in a version."""
        found = [self.clients[name].pull().tensors for name in names]
        for other in found[1:]:
            assert_same(found[0], other)
        return dict(found[0])

    def rounds(self, numbers: Sequence[int], *names: str) -> dict[str, Tensor]:
        """All of these take part in each of these rounds. Returns the final parameters."""
        final: dict[str, Tensor] = {}
        for number in numbers:
            self.push(*names, number=number)
            final = self.pull(*names)
        return final


def assert_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    """To the bit."""
    torch.testing.assert_close(dict(one), dict(other), rtol=0, atol=0)


def assert_close(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    """Up to the rounding of fp32: sums are made in another order."""
    torch.testing.assert_close(dict(one), dict(other), rtol=2e-5, atol=2e-6)


def star(numbers: Sequence[int], *names: str, **given: Any) -> dict[str, Tensor]:
    """What the same rounds come to where all workers are at one broker."""
    with Sites() as sites:
        hub = sites.hub(len(names), relays=False, **given)
        sites.workers(hub, *names)
        return sites.rounds(numbers, *names)


def ledger_of(broker: Broker) -> dict[str, list[int]]:
    """Push ids by worker, as the broker's current version names them; oldest first."""
    ledger = broker._loop.core.state.versions[0].ledger
    return {name: [each.push_id for each in pushes] for name, pushes in ledger.pushes.items()}
