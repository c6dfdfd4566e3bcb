"""Files that are damaged, cut short, or written to do harm: each gets a sentence, nothing is lost.

An input is a choice of the file, and of what is done to a sound one. Checkpoints get a sum that fits, as
one who means harm would write it.
"""

import contextlib
import copy
import hashlib
import io
import json
import struct
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as as_safetensors

from diloco_broker.cli import checkpoint_report
from diloco_broker.config import BrokerConfig
from diloco_broker.storage import checkpoint, resume
from diloco_broker.storage.checkpoint import MANIFEST, Damaged
from diloco_broker.storage.key_folder import KeyFolder
from diloco_broker.storage.model_file import load_model, model_of
from diloco_broker.storage.model_header import read_header
from diloco_protocol.clients.keys import read_keys
from diloco_protocol.errors import UsageError
from diloco_protocol.feed import FeedError
from diloco_protocol.fragments import OwnSplit
from diloco_protocol.roles import Peer, Role
from diloco_tools.monitor.feed.history_lines import line_of
from fuzz.draws import Draws
from kit.checkpoints import a_checkpoint

ODD: list[Any] = [None, -1, 0, 1, 2**40, 2**63, 10**400, 1e308, float("inf"), float("nan"), "", "x"]
ODD += [
    *("../../../../etc/passwd", "/dev/zero", "load", "\x1b[2J", "\ud800", [], {}, [[]], {"a": []}),
    True,
]
LONGEST_SENTENCE = 2000
HISTORY = Path(__file__).parents[1] / "broker/storage/recorded/streaming/history.jsonl"


def run(data: bytes) -> int:
    """Have one file read. Returns 1."""
    draws = Draws(data)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, on what it is about to refuse
        said = ""
        with contextlib.redirect_stderr(io.StringIO()):
            try:
                READERS[draws.below(len(READERS))](draws, Path(folder))
            except (UsageError, Damaged, FeedError) as error:
                said = str(error)
        assert len(said) <= LONGEST_SENTENCE
    return 1


# What is done to a sound file.


def damaged(draws: Draws, sound: bytes) -> bytes:
    """Cut short, or with some bytes changed, added or taken away."""
    made = bytearray(sound)
    if not draws.below(4):
        del made[draws.below(len(made) + 1) :]
    for _ in range(draws.below(4)):
        place = (
            draws.below(min(len(made), 400) + 1) if draws.is_so() else draws.below(len(made) + 1)
        )
        made[place : place + draws.below(9)] = draws.bytes(draws.below(9))
    return bytes(made)


def changed(draws: Draws, plain: Any) -> Any:
    """The same plain value with something in it replaced by something odd, or taken away."""
    made = copy.deepcopy(plain)
    for _ in range(1 + draws.below(2)):
        place = made
        for _ in range(8):
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = draws.one_of(keys)
            if isinstance(place[key], dict | list) and draws.below(4):
                place = place[key]
                continue
            if isinstance(place, dict) and not draws.below(6):
                place[draws.one_of([str(each) for each in ODD])] = place.pop(key)
            elif not draws.below(6):
                del place[key]
            else:
                place[key] = copy.deepcopy(draws.one_of(ODD))  # the next change may go into it
            break
    return made


def in_a_sound_envelope(body: Any) -> bytes:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    whole = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "checkpoint": body}
    return json.dumps(whole).encode()


def bomb(draws: Draws) -> bytes:
    """JSON that is nothing but depth, or one number."""
    depth = draws.one_of([10, 1000, 100_000])
    return draws.one_of([b"[" * depth, b'{"a":' * depth, b"9" * depth, b'{"checkpoint": 1e999}'])


def safetensors(draws: Draws, sound: bytes) -> bytes:
    (length,) = struct.unpack("<Q", sound[:8])
    header, body = json.loads(sound[8 : 8 + length]), sound[8 + length :]
    text = json.dumps(changed(draws, header)).encode() if draws.below(4) else bomb(draws)
    claimed = len(text) if draws.below(4) else draws.one_of([0, 1, 2**32, 2**63, 2**64 - 1])
    return struct.pack("<Q", claimed) + text + body


# The sound files, and their readers.


@cache
def sound_checkpoint() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        path = checkpoint.save(Path(folder), a_checkpoint(), keep=3)
        return {each.name: each.read_bytes() for each in path.iterdir()}


@cache
def sound_model() -> bytes:
    return as_safetensors({"a": torch.zeros(3, 2), "b": torch.zeros(4, dtype=torch.int64)})


@cache
def sound_state_dict() -> bytes:
    file = io.BytesIO()
    torch.save({"a": torch.zeros(3, 2), "b": torch.zeros(4, dtype=torch.int64)}, file)
    return file.getvalue()


def _checkpoint(draws: Draws, folder: Path) -> None:
    path = folder / "checkpoint-0002-000000000004"
    path.mkdir()
    files = dict(sound_checkpoint())
    body = json.loads(files[MANIFEST])["checkpoint"]
    name = draws.one_of(sorted(files))
    match draws.below(4):
        case 0:
            files[name] = damaged(draws, files[name])
        case 1:
            files[MANIFEST] = bomb(draws)
        case 2 if name != MANIFEST:
            files[name] = safetensors(draws, files[name])
            sum_ = hashlib.sha256(files[name]).hexdigest()
            body["files"][name] = {"bytes": len(files[name]), "sha256": sum_}
            files[MANIFEST] = in_a_sound_envelope(body)
        case _:
            files[MANIFEST] = in_a_sound_envelope(changed(draws, body))
    for each, data in files.items():
        (path / each).write_bytes(data)
    report = [checkpoint_report.describe(path, quick=draws.is_so())]
    checkpoint_report.as_text(folder, report)
    json.dumps(report)
    config = BrokerConfig(
        save_dir=str(folder), num_fragments=2, chunk_elements=4, sync_every=4, outer="nesterov"
    )
    found = resume.newest_checkpoint(config)
    assert found is not None and report[0]["sound"]
    model_of(found)


def _model(draws: Draws, folder: Path) -> None:
    how = draws.below(4)
    name = draws.one_of(["m.safetensors", "m.pt", "m.bin", "m"])
    sound = sound_model() if name == "m.safetensors" else sound_state_dict()
    path = folder / name
    if how == 3:
        path = folder / "model"
        path.mkdir()
        (path / "model.safetensors").write_bytes(sound_model())
        index = changed(draws, {"weight_map": {"a": "model.safetensors"}})
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    elif name == "m.safetensors" and how:
        path.write_bytes(safetensors(draws, sound))
    else:
        path.write_bytes(damaged(draws, sound))
    for read in (load_model, read_header):
        with contextlib.suppress(UsageError):
            read(path)


def _keys(draws: Draws, folder: Path) -> None:
    keys = KeyFolder.make(folder / "keys")
    peer = Peer(Role.WORKER, "a")
    handed_out = keys.add_all([peer])[peer]
    allowed = keys.path / "allowed/worker/a.pub"
    for path in (handed_out, allowed, keys.path / "broker.key"):
        plain = json.loads(path.read_bytes())
        text = json.dumps(changed(draws, plain)).encode() if draws.below(3) else bomb(draws)
        path.write_bytes(text if draws.below(3) else damaged(draws, path.read_bytes()))
    assert len(keys.allowed().complaints) <= 1
    for read in (read_keys, KeyFolder):
        with contextlib.suppress(UsageError):
            read(handed_out if read is read_keys else keys.path)


def _history(draws: Draws, folder: Path) -> None:
    lines = HISTORY.read_bytes().splitlines()
    before = None
    for _ in range(1 + draws.below(4)):
        line = draws.one_of(lines)
        match draws.below(3):
            case 0:
                line = damaged(draws, line)
            case 1:
                line = bomb(draws)
            case _:
                line = json.dumps(changed(draws, json.loads(line))).encode()
        try:
            before = line_of(line, before) or before
        except FeedError:
            continue


def _split(draws: Draws, folder: Path) -> None:
    text = json.dumps(changed(draws, {"a*": 0, "b": 1})) if draws.below(3) else bomb(draws).decode()
    OwnSplit.from_json(text, "plan.json")


READERS: list[Callable[[Draws, Path], None]] = [
    *(_checkpoint, _checkpoint, _checkpoint, _model, _keys, _history, _split)
]
