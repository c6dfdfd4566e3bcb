"""A place in which the commands of a page work: a folder, brokers on free ports, workers that train.

What a page writes as an example is replaced by what is here: addresses (`ADDRESSES`), folders
(`FOLDERS`), files that a reader would have (`Place.lay`), and a `--yes` where a command would ask.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from diloco_broker import Broker, BrokerConfig
from diloco_broker.storage.key_folder import KeyFolder
from diloco_protocol.roles import Peer, Role
from diloco_worker import DiLoCoWorker
from kit.page_commands import PAGES, Command, fences, name_of
from kit.page_options import OURS, app_of
from kit.paths import ROOT
from kit.process_kit import LOCAL, Processes, wait_for
from kit.web_commands import started

# Of examples: which of a broker's two addresses they stand for.
ADDRESSES = {
    "tcp://10.0.0.1:8512": "control",
    "tcp://127.0.0.1:8512": "control",
    "10.0.0.1:8512": "control",
    "tcp://10.0.0.1:8513": "feed",
    "tcp://127.0.0.1:8513": "feed",
}
# Of the reader's machines: the folder of this place that each is.
FOLDERS = {
    "/etc/diloco": "etc",
    "/etc/systemd/system": "units",
    "/shared": "shared",
    "/var/lib/diloco/run": "diloco-run",  # of the broker without keys
}
# Files of ours that a command copies.
SOURCES = "tools/services/"
# Of diloco-broker: these go on, and can look at their options alone.
SERVING = {"serve", "relay", "standby"}
# These ask before they do it, where there is a terminal.
ASKING = {"kick", "stop-all", "shutdown"}
# A submission needs an engine: without it the files are written, and can be looked at.
NEEDS_ENGINE = "--submit"
# Commands of ours that end soon; another one is run here if it stands in this list.
RUN = {"diloco-broker", "diloco-launch", "diloco-report", "diloco-top", "diloco-worker"}
SHELL = {"mkdir", "echo", "printf", "cp", "export"}
WEB = {
    "diloco-dashboard": "diloco_tools.monitor.web",
    "diloco-exporter": "diloco_tools.monitor.metrics.cli",
}
# diloco-top ends with 1 where a run is not healthy: of one that has just begun either may be.
# Scripts that pages call train.py: one that makes an optimizer step, and one that is quick.
SAYS = "import sys; print('trained', *sys.argv[1:])\n"
TRAINS = "import torch; model = torch.nn.Linear(8, 1); torch.optim.SGD(model.parameters()).step()\n"
MAY_END = {"diloco-top": {0, 1}}
GUESTS = [
    Peer(Role.WORKER, "gpu-0"),
    Peer(Role.WORKER, "gpu-1"),
    Peer(Role.OPERATOR, "launcher"),
    Peer(Role.MONITOR, "display"),
]
WITHIN_S = 60.0


class BrokenOff(Exception):
    """A member of a run is not needed any more."""


class Members:
    """Two workers that train at a broker until it is over, each in a thread."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.is_over = threading.Event()
        self.joined = threading.Semaphore(0)
        self.threads = [
            threading.Thread(target=self.train, args=(n,)) for n in ("rtx-home", "gpu-1")
        ]
        for thread in self.threads:
            thread.start()
        for thread in self.threads:
            assert self.joined.acquire(timeout=WITHIN_S), f"{thread} has not joined"

    def train(self, name: str) -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with (
            suppress(BrokenOff),
            DiLoCoWorker(model, optimizer, server=self.broker.address, worker_id=name) as diloco,
        ):
            self.joined.release()
            while not diloco.should_stop:
                if self.is_over.wait(0.005):
                    raise BrokenOff  # else it would give its last delta to a broker that may come back
                loss = model(torch.randn(4, 8)).pow(2).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                diloco.report(loss=loss, tokens=4)
                if diloco.should_save:
                    diloco.saved()

    def end(self) -> None:
        self.is_over.set()
        for thread in self.threads:
            thread.join(WITHIN_S)
            assert not thread.is_alive()


class Place:
    """See the head of this module. `env` is what the page's `export` has set."""

    def __init__(self, folder: Path, processes: Processes) -> None:
        self.folder = folder
        self.processes = processes
        self.env: dict[str, str] = {}
        self._stack = ExitStack()
        self._open: Broker | None = None
        self._of_open = self._stack.enter_context(ExitStack())
        self._keyed: dict[Path, Broker] = {}
        for name in FOLDERS.values():
            (folder / name).mkdir()

    def close(self) -> None:
        self._stack.close()

    # What commands find here.

    def open_broker(self) -> Broker:
        """One without keys, with a run that two workers are in and of which a checkpoint is saved."""
        if self._open is not None:
            return self._open
        save_dir = self.folder / "diloco-run"
        options = LOCAL | {"workers": 2, "sync_every": 5, "save_dir": str(save_dir)}
        self._open = self._of_open.enter_context(Broker(BrokerConfig(**options)))
        self._of_open.callback(Members(self._open).end)
        self._of_open.callback(self._open.stop)  # first: it ends whatever the members wait for
        wait_for(lambda: [*save_dir.glob("checkpoint-*/checkpoint.json")], WITHIN_S)
        return self._open

    def keyed_broker(self, keys: Path) -> Broker:
        """One that lets in whoever has a key of this folder, with nobody in its run."""
        if keys not in self._keyed:
            folder = KeyFolder.make(keys) if not keys.exists() else KeyFolder(keys)
            folder.add_all(guest for guest in GUESTS if not _file_of(keys, guest).exists())
            options: dict[str, Any] = LOCAL | {"workers": 2, "save_dir": None, "keys": str(keys)}
            self._keyed[keys] = self._stack.enter_context(Broker(BrokerConfig(**options)))
        return self._keyed[keys]

    def lay(self, command: Command) -> None:
        """Put the files there that a reader has before this command."""
        words = set(command.words)
        if "model.safetensors" in words and "export" not in words:
            names = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
            names += [f"model.layers.{number}.mlp.weight" for number in range(12)]
            save_file(
                {name: torch.zeros(4, 4) for name in names}, self.folder / "model.safetensors"
            )
        if "split.json" in words:
            page = next(page for page in PAGES if name_of(page) == command.page)
            (split,) = (each.text for each in fences(page) if each.language == "json")
            (self.folder / "split.json").write_text(split)
        if _serves(command.words) and (keys := _after("--keys", command.words)) is not None:
            folder = self.folder / keys
            KeyFolder.make(folder) if not folder.exists() else None
        for option in ("--parent-keys", "--hub-keys"):
            if (key := _after(option, command.words)) is not None:
                # The folder is at the other broker; the key was brought here.
                self._brought(key)
        if "train.py" in words:
            (self.folder / "train.py").write_text(TRAINS if "--auto" in command.words else SAYS)

    def _brought(self, key: str) -> None:
        """A key like worker-north.key, made where its broker is and carried here."""
        there = KeyFolder.make(self.folder / "keys-of-the-other-broker")
        role, _, name = Path(key).stem.partition("-")
        there.add_all([Peer(Role(role), name)])
        shutil.copy(there.path / "clients" / key, self.folder / key)

    # Running them.

    def run(self, command: Command) -> None:
        """Run it, and see that it ends well.

        Raises:
            AssertionError: it does not, or nothing here knows how to run it.
        """
        self.lay(command)
        words = self._replaced(command)
        program = words[0]
        if program in SHELL:
            self._by_shell(command)
        elif program == "scp":
            shutil.copy(
                self.folder / words[1], self.folder
            )  # the other machine's home is this folder
        elif program == "curl":
            self._by_curl(command, words)
        elif program in WEB:
            with self._web(program, words[1:]) as address:
                assert urllib.request.urlopen(address, timeout=WITHIN_S).status == 200
        elif program in RUN:
            self._ours(command, words)
        else:
            raise AssertionError(f"{command}: nothing here runs {program}; see RUN and NOT_RUN")

    def _ours(self, command: Command, words: Sequence[str]) -> None:
        program = words[0]
        env = {**self.env, **dict(command.variables), **self._defaults(command)}
        if words[1:2] == ["run"]:  # it hands signals on, so it has a process of its own
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            child = self.processes.run(
                "-m", program.replace("-", "_"), *words[1:], PATH=path, **env
            )
            code, said = child.ends(WITHIN_S), child.output
        else:
            result = CliRunner(env=env).invoke(app_of(OURS[program]), list(words[1:]))
            code, said = result.exit_code, result.output + repr(result.exception or "")
        assert code in MAY_END.get(program, {0}), f"{command}: exit code {code}\n{said}"
        if "shutdown" in words:
            self._of_open.close()
            self._open = None

    def _by_shell(self, command: Command) -> None:
        text = self._with_folders(command.text)
        done = subprocess.run(
            ["bash", "-euc", f"{text} && env -0"],
            cwd=self.folder,
            env={"PATH": os.environ["PATH"], "HOME": str(self.folder)},
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        exported = re.findall(r"(\w+)=", command.text) if command.words[0] == "export" else []
        after = dict(each.partition("=")[::2] for each in done.stdout.split("\0") if "=" in each)
        self.env |= {name: after[name] for name in exported}

    @contextmanager
    def _web(self, program: str, words: Sequence[str]) -> Iterator[str]:
        """The address of a page or an exporter that has begun, on a free port."""
        options = [
            word
            for word, before in zip(words, ["", *words], strict=False)
            if "--port" not in (word, before)
        ]
        with started(WEB[program], *options) as (_, address):
            yield address

    def _by_curl(self, command: Command, words: Sequence[str]) -> None:
        """What a page shows of its own way in for programs: with the address and token of a real one."""
        feed = self.open_broker().feed_address
        with self._web("diloco-dashboard", ["--feed", feed]) as address:
            site, _, token = address.partition("/?token=")
            made = [
                re.sub(r"http://127.0.0.1:\d+", site, word).replace("$TOKEN", token)
                for word in words
            ]

            def is_done() -> bool:
                """The page has heard of the broker, and the broker has done it."""
                done = subprocess.run(
                    [*made, "--silent", "--max-time", "20"],
                    capture_output=True,
                    text=True,
                    check=False,
                )
                assert done.returncode == 0, f"{command}: {done.stderr}"
                return bool(json.loads(done.stdout).get("ok"))

            wait_for(is_done)

    # Examples and what stands for them here.

    def _replaced(self, command: Command) -> list[str]:
        words = [self._with_folders(word) for word in command.words]
        keys = self._keys(words)
        for number, word in enumerate(words):
            if (of := ADDRESSES.get(word)) is not None:
                broker = self.keyed_broker(keys[0]) if keys else self.open_broker()
                words[number] = broker.address if of == "control" else broker.feed_address
            elif keys and words[number - 1] == "--keys":
                words[number] = str(keys[1])
        if NEEDS_ENGINE in words:
            words.remove(NEEDS_ENGINE)
        if _serves(words):
            words.append("--check")
        elif words[:1] == ["diloco-broker"] and ASKING.intersection(words):
            words.append("--yes")
        return words

    def _with_folders(self, text: str) -> str:
        for name, here in FOLDERS.items():
            text = text.replace(name, str(self.folder / here))
        return text.replace(SOURCES, f"{ROOT / SOURCES}/")

    def _keys(self, words: Sequence[str]) -> tuple[Path, Path] | None:
        """The folder of the keys that a client names, and the file that it means."""
        if "--keys" not in words or _serves(words):
            return None
        given = self.folder / words[words.index("--keys") + 1]
        folder = given.parent.parent if given.parent.name == "clients" else self.folder / "keys"
        self.keyed_broker(folder)
        return folder, folder / "clients" / given.name

    def _defaults(self, command: Command) -> dict[str, str]:
        """Where a command of ours looks that is told of no address: a broker without keys."""
        if _serves(command.words) or "--keys" in command.words:
            return {}
        if command.words[0] in ("diloco-broker", "diloco-top", "diloco-report"):
            broker = self.open_broker()
            return {"DILOCO_SERVER": broker.address, "DILOCO_FEED": broker.feed_address}
        return {}


def _serves(words: Sequence[str]) -> bool:
    """Does the command go on until it is ended, and only look at its options with --check?"""
    return words[0] == "diloco-broker" and words[1] in SERVING


def _after(option: str, words: Sequence[str]) -> str | None:
    return words[words.index(option) + 1] if option in words else None


def _file_of(keys: Path, guest: Peer) -> Path:
    return keys / "allowed" / guest.role.value / f"{guest.name}.pub"
