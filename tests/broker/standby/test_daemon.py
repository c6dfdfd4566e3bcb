"""A standby beside a hub, with sockets, in threads: keys, its folder, what it is told."""

import errno
import logging
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco_broker import Broker, BrokerConfig
from diloco_broker.config.broker_config import run_differences
from diloco_broker.standby import core, daemon
from diloco_broker.standby.daemon import StandbyBroker
from diloco_broker.standby.record import read_standby
from diloco_broker.storage.key_folder import KeyFolder
from diloco_protocol.clients import Operator
from diloco_protocol.clients.keys import find_keys
from diloco_protocol.errors import Unreachable, UsageError
from diloco_protocol.roles import Peer, Role
from diloco_worker import DiLoCoClient
from kit.process_kit import LOCAL, PATIENCE_S, wait_for


def config_of(folder: Path, **options: Any) -> BrokerConfig:
    return BrokerConfig(**LOCAL | {"save_dir": str(folder), "lease": 1.0} | options)


def holds_lease(hub: Broker, keys: Any = None) -> bool:
    with Operator(hub.address, keys=keys) as operator:
        return bool(operator.ask("status").data["standby"]["holds_lease"])


def is_replaced(hub: Broker) -> bool:
    with Operator(hub.address) as operator:
        return bool(operator.ask("status").data["standby"]["is_replaced"])


@pytest.mark.parametrize(
    ("hub", "option", "word"),
    [
        *((each, {}, "address") for each in ("8512", "http://hub", "tcp://hub:99999")),
        # At a takeover its broker would not continue from the copy.
        *(("tcp://127.0.0.1:9", each, "hub") for each in ({"fresh": True}, {"resume": "none"})),
    ],
)
def test_start_that_leads_nowhere_is_refused(
    tmp_path: Path, hub: str, option: dict[str, Any], word: str
) -> None:
    with pytest.raises(UsageError, match=word):
        StandbyBroker(config_of(tmp_path / "copy", **option), hub)
    assert not (tmp_path / "copy").exists()


def test_standby_needs_an_operators_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = KeyFolder.make(tmp_path / "keys")
    keys.add_all([Peer(Role.OPERATOR, "anna"), Peer(Role.WORKER, "gpu-0")])
    shutil.copytree(tmp_path / "keys", tmp_path / "other")
    operator, worker = (
        find_keys(tmp_path / "keys" / "clients" / f"{name}.key", Role.OPERATOR)
        for name in ("operator-anna", "worker-gpu-0")
    )
    hub = Broker(config_of(tmp_path / "hub", standby=True, keys=str(tmp_path / "keys")))
    options = config_of(tmp_path / "copy", keys=str(tmp_path / "other"))
    with hub:
        refused = StandbyBroker(options, hub.address, keys=worker).start()
        wait_for(lambda: "gpu-0" in caplog.text)
        refused.stop()
        assert not holds_lease(hub, operator)
        standby = StandbyBroker(options, hub.address, keys=operator).start()
        wait_for(lambda: holds_lease(hub, operator))
        with Operator(standby.address, keys=worker) as asked:
            assert not asked.ask("promote").ok
        standby.stop()


def test_of_both_addresses_the_one_that_has_the_run_is_steered(tmp_path: Path) -> None:
    hub = Broker(config_of(tmp_path / "hub", standby=True))
    standby = StandbyBroker(config_of(tmp_path / "copy"), hub.address)
    with hub:
        standby.start()
        wait_for(lambda: holds_lease(hub))
        for both in (f"{standby.address},{hub.address}", f"{hub.address},{standby.address}"):
            with Operator(both) as operator:
                assert operator.ask("set", outer_lr=0.5).ok
                assert operator.address == hub.address
                assert not operator.ask("promote").ok
        wait_for(lambda: standby.config.outer_lr == 0.5)
        with Operator(standby.address, timeout=30.0) as operator:
            assert operator.ask("promote", force=True).ok
        with Operator(both, timeout=30.0) as operator:
            wait_for(lambda: standby.is_hub)
            changed = operator.ask("set", outer_lr=0.6)
            assert changed.data["changes"][0]["before"] == 0.5, "set at the hub before"
            assert operator.address == standby.address
            wait_for(lambda: is_replaced(hub))
            standby.stop()
            with pytest.raises(Unreachable, match="standby"):
                operator.ask("set", outer_lr=0.7)


def test_a_standby_whose_options_do_not_fit_leaves_the_run_to_the_hub(tmp_path: Path) -> None:
    model = {f"layers.{n}.weight": torch.zeros(4, 4) for n in range(2)}
    options = {"num_fragments": 2, "sync_every": 10}
    hub = Broker(config_of(tmp_path / "hub", standby=True, recover_wait=0.0, **options), model)
    standby = StandbyBroker(config_of(tmp_path / "copy"), hub.address)
    with hub:
        standby.start()
        module = torch.nn.Module()
        module.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(2))
        with DiLoCoClient(hub.address, worker_id="a", timeout=PATIENCE_S) as client:
            client.join(module)
            with Operator(standby.address) as operator:
                wait_for(lambda: operator.ask("status").data["misfit"] is not None)
                for force in (False, True):
                    result = operator.ask("promote", force=force)
                    assert not result.ok
                    assert "--num-fragments is 1" in result.text and "has 2" in result.text
            assert not is_replaced(hub)
        standby.stop()
    record = read_standby(tmp_path / "copy")
    assert record is not None and record.term is None and not standby.is_hub


def test_a_standby_whose_disk_is_full_stays_one_and_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    standby = StandbyBroker(config_of(tmp_path / "copy"), "tcp://127.0.0.1:9").start()
    with monkeypatch.context() as full, Operator(standby.address) as operator:

        def refuses(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        full.setattr(daemon, "write_standby", refuses)
        operator.ask("promote", force=True)
        wait_for(lambda: "retrying: " in caplog.text)
        assert not standby.is_hub
        assert "hears_hub" in operator.ask("status").data
    wait_for(lambda: standby.is_hub)
    standby.stop()


def test_internal_error_does_not_end_the_standby(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Broker(config_of(tmp_path / "hub", standby=True))
    standby = StandbyBroker(config_of(tmp_path / "copy"), hub.address)
    with hub:
        standby.start()
        wait_for(lambda: holds_lease(hub))
        with monkeypatch.context() as odd, Operator(standby.address) as operator:
            for name in ("receive", "receive_from_hub"):
                odd.setattr(core.Standby, name, lambda *_: iter([1 // 0]))
            assert not operator.ask("status").ok
            wait_for(lambda: not holds_lease(hub))
        wait_for(lambda: holds_lease(hub))
        standby.stop()


def test_a_standby_needs_a_folder_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--save-dir"):
        StandbyBroker(BrokerConfig(**LOCAL), "tcp://127.0.0.1:9")
    first = StandbyBroker(config_of(tmp_path), "tcp://127.0.0.1:9")
    with pytest.raises(UsageError):
        StandbyBroker(config_of(tmp_path), "tcp://127.0.0.1:9")
    first.close()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"name": 5, "term": null, "settings": {}}',
        '{"name": "a", "term": 0, "settings": {}}',
        '{"name": "a", "term": null, "settings": 5}',
    ],
)
def test_what_a_standby_remembers_is_believed_or_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "standby.json").write_text(text)
    with pytest.raises(UsageError, match=r"standby\.json cannot be read"):
        read_standby(tmp_path)


def test_settings_of_the_hub_outlive_the_process_of_its_standby(tmp_path: Path) -> None:
    hub = Broker(config_of(tmp_path / "hub", standby=True))
    standby = StandbyBroker(config_of(tmp_path / "copy"), hub.address)
    with hub, Operator(hub.address) as operator:
        standby.start()
        assert operator.ask("set", workers=3, outer_lr=0.5, max_rounds=100).ok
        wait_for(lambda: standby.config.max_rounds == 100)
        standby.stop()
        again = StandbyBroker(config_of(tmp_path / "copy"), hub.address)
        assert (again.config.workers, again.config.outer_lr) == (3, 0.5)
        again.start()
        assert operator.ask("set", max_rounds=0).ok
        wait_for(lambda: again.config.max_rounds is None)
        again.stop()


def test_unfit_settings_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hub = Broker(config_of(tmp_path / "hub", standby=True, workers=3, min_workers=2))
    standby = StandbyBroker(config_of(tmp_path / "copy", mode="async"), hub.address)
    with hub:
        standby.start()
        wait_for(lambda: "--min-workers" in caplog.text)
        assert standby.config.min_workers == 1
        standby.stop()


def test_options_that_are_not_the_hubs_are_named(tmp_path: Path) -> None:
    ours = config_of(tmp_path)
    of_the_run = {"wire_dtype": "int8", "stall_timeout": 7.0, "outer_lr": 0.5}
    theirs = of_the_run | {"keep": 9, "fresh": True, "tape": "tape"}
    texts = run_differences(asdict(config_of(tmp_path / "other", **theirs)), ours)
    assert ["--wire-dtype int8" in texts[0], "--stall-timeout 7" in texts[1]] == [True, True]
    assert len(texts) == 2, "it follows what operators set, and has folders of its own"
    assert not run_differences(asdict(ours), ours)


@pytest.fixture(autouse=True)
def _logs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
