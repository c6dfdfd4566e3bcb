"""Measures a run over two sites that loses a relay, a site's line or the hub for a while.

The hub may have a standby, which relays know too. Workers train all the time: steps are pauses of a
given length, with parameters that change.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from diloco_lab.bench.process_pool import BrokerProcess
from diloco_lab.driver.options import START_WITHIN_S, broker_command
from diloco_lab.network.namespaces import FAST, HUB, STANDBY, Place, dtypes, now
from diloco_lab.network.sites.rounds import SITES, WAN, WORKERS, join, start_relay
from diloco_lab.network.sites.tables import Loss
from diloco_tools.processes import Child, wait_for_line

PAIR = ("int4z", "int4z")
STEP_S, EVERY = 0.05, 20  # rounds of one second and the exchange
AWAY_S = 12.0
# A cut line is only noticed by its silence: rounds wait this long for a site.
HEARTBEAT_TIMEOUT_S = 5.0
PORT = 8512
ALL_WORKERS = SITES * WORKERS


class Tree:
    """A hub, its relays, and workers that train until the end. Each process keeps its address."""

    def __init__(self, place: Place, folder: Path, *, with_standby: bool) -> None:
        self.place, self.folder, self.with_standby = place, folder, with_standby
        self.parent = self.address = place.network.at(HUB, PORT)
        self.hub = self.start_hub()
        if with_standby:
            address = place.network.at(STANDBY, PORT)
            self.standby = self._start("standby", STANDBY, address, of=self.address)
            self.parent = f"{self.address},{address}"
        self.relays = [self.start_relay(site) for site in range(SITES)]

    def train(self, size: str) -> None:
        """Have all workers join, and train from now on."""
        for each in self.relays:
            wait_for_line(each, "control", START_WITHIN_S)
        servers = [self.place.network.at(f"relay-{site}", PORT) for site in range(SITES)]
        join(self.place.trainers(), size, servers)
        for trainer in self.place.trainers():
            trainer.tell("simulate", steps=None, step_s=STEP_S, drift_every=EVERY)

    def start_relay(self, site: int) -> Child:
        return start_relay(self.place, self.parent, site, PAIR[0], PORT)

    def start_hub(self) -> BrokerProcess:
        return self._start("serve", HUB, self.address, standby=self.with_standby)

    def kill_hub(self) -> None:
        self.hub.close()
        self.hub.child.kill()

    def _start(self, word: str, member: str, address: str, **options: object) -> BrokerProcess:
        command = broker_command(
            word,
            inside=self.place.network.inside(member),
            bind=address,
            feed=f"ipc://{self.folder}/{member}",
            insecure=True,
            no_ipc=True,
            relays=True,
            durable=True,
            workers=ALL_WORKERS,
            sync_every=EVERY,
            save_dir=self.folder / f"run-{member}",
            heartbeat_timeout=HEARTBEAT_TIMEOUT_S,
            **dtypes(PAIR),
            **options,
        )
        name = f"{member}-{len(self.place.pool.all)}"
        return BrokerProcess(self.place.pool.start(name, command))

    def end(self) -> None:
        """Kill the workers, which would wait for each other to leave, and end the rest."""
        self.hub.close()
        self.place.pool.dismiss("trainer-")
        for each in self.relays:
            each.end()
        self.hub.child.end()
        if self.with_standby:
            self.standby.close()
            self.standby.child.end()

    @property
    def rounds(self) -> int:
        return self.hub.wait_for(lambda _: True).totals.rounds

    def next_round_of(self, workers: int, since: float) -> float:
        """Seconds from `since` to the end of the next round that averages this many workers."""
        made = self.rounds
        self.hub.wait_for(lambda s: s.totals.rounds > made and s.counts.averaged == workers)
        return time.monotonic() - since


@contextlib.contextmanager
def a_tree(place: Place, size: str, *, with_standby: bool = False) -> Iterator[Tree]:
    place.network.set_wan(FAST)
    with TemporaryDirectory(prefix="diloco-") as folder:
        tree = Tree(place, Path(folder), with_standby=with_standby)
        try:
            tree.train(size)
            place.network.set_wan(WAN)
            tree.next_round_of(ALL_WORKERS, time.monotonic())
            yield tree
        finally:
            tree.end()


def losses(place: Place, size: str) -> Iterator[Loss]:
    """One loss after the other; the run is complete again before the next."""
    network = place.network
    with a_tree(place, size) as tree:

        def relay_comes_back() -> None:
            tree.relays[0] = tree.start_relay(0)

        yield _of_a_site(tree, "relay killed (-9)", tree.relays[0].kill, relay_comes_back)
        what = "line of a site cut"
        yield _of_a_site(tree, what, lambda: network.cut(0), lambda: network.mend(0))
        tree.kill_hub()
        back_at = time.monotonic()
        tree.hub = tree.start_hub()  # with its checkpoints
        whole = tree.next_round_of(ALL_WORKERS, back_at)
        yield Loss("hub killed (-9), started again at once", None, None, whole, 0, now())
    with a_tree(place, size, with_standby=True) as tree:
        yield _hub_with_a_standby(tree)


def _of_a_site(
    tree: Tree, what: str, lose: Callable[[], None], comes_back: Callable[[], None]
) -> Loss:
    """A site is away for some seconds while the others continue."""
    before, lost_at = tree.rounds, time.monotonic()
    lose()
    others = tree.next_round_of(ALL_WORKERS - WORKERS, lost_at)
    time.sleep(max(0.0, lost_at + AWAY_S - time.monotonic()))
    made, back_at = tree.rounds - before, time.monotonic()
    comes_back()
    whole = tree.next_round_of(ALL_WORKERS, back_at)
    return Loss(what, back_at - lost_at, others, whole, made, now())


def _hub_with_a_standby(tree: Tree) -> Loss:
    """The hub is killed for good: until the standby has made a round of all workers."""
    before, killed_at = tree.rounds, time.monotonic()
    tree.kill_hub()
    made = tree.standby.wait_for(
        lambda s: s.totals.rounds > 0 and s.counts.averaged == ALL_WORKERS
    ).round
    whole = time.monotonic() - killed_at
    number = -1 if made is None else made.number
    if number < before:
        raise tree.standby.child.failure(f"went back to round {number} from {before}")
    return Loss("hub killed (-9), its standby takes over", None, None, whole, 0, now())
