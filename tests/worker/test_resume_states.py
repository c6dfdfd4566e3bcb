"""What the broker's version means for a saved state, and which states are valid."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco_protocol import Bitmap, Counted, Ledger, UsageError, VersionId
from diloco_protocol.messages import Error, Push, Released
from diloco_protocol.version import ABSENT_REMEMBERED
from diloco_worker.session.news import Arrival
from diloco_worker.sync.fragment import TrainingBase, compared
from kit.raw_codecs import decode, encode
from kit.scripted_broker import RUN, ScriptedBroker, run_config, version
from kit.scripted_training import H, ScriptedTraining

pytest_plugins = ("kit.worker_fixtures",)


OTHERS = {f"other {number}": (Counted(number),) for number in range(ABSENT_REMEMBERED)}


@pytest.mark.parametrize(
    ("what", "ledger", "why"),
    [
        (version(900), OTHERS, "no longer knows"),
        (version(900), dict(list(OTHERS.items())[1:]), None),  # it remembers all
        (version(6), {"me": (Counted(1), Counted(2))}, "already pushed"),
        (version(6), {"me": (Counted(1), Counted(2, b"\1"))}, "already pushed"),  # a part of it
        (version(6), {"you": (Counted(2),)}, None),
        (VersionId("b" * 16, 5, 1), {}, "b" * 16),  # of another run
    ],
    ids=range(6),
)
def test_version_that_may_contain_unknown_pushes_supersedes_local_steps(
    what: VersionId, ledger: dict[str, tuple[Counted, ...]], why: str | None
) -> None:
    base = TrainingBase(version(5), Ledger({"me": (Counted(1),)}))
    arrival = Arrival(Released(0, what, Ledger(ledger)), frozenset(), None)
    found = compared("me", base, arrival)
    assert (found is None) == (why is None)
    assert found is None or str(why) in str(found.superseding)


def tensors_in(plain: Any) -> list[Tensor]:
    if isinstance(plain, Tensor):
        return [plain]
    parts = plain.values() if isinstance(plain, dict) else plain
    return [t for part in parts for t in tensors_in(part)] if isinstance(plain, dict | list) else []


def test_saved_and_loaded_states_are_copies_of_the_model(training: ScriptedTraining) -> None:
    training.begins()
    training.steps(1)
    saved = training.saves()
    training.resumes(saved, version(0))
    training.says_current(0)
    training.done()
    bases = [*tensors_in(saved[0]), *tensors_in(training.worker.state_dict())]
    for base in bases:
        assert base.dtype == torch.float32
        assert base.numel() == sum(p.numel() for p in training.descent.model.parameters())
    training.trains(H - 1)
    training.says_current(0)
    push, _ = training.takes()
    training.serves(1, 1, push)
    training.done()
    for counter in (2, 3):
        training.round(H, counter, counter)
    assert [set(base.tolist()) for base in bases] == [{100}] * 2


def is_refused(
    training: ScriptedTraining, state: dict[str, Any], model: nn.Module | None, words: str
) -> None:
    """A worker with this model does not start from this state."""
    again = training.makes(model)
    again.load_state_dict(state)
    with pytest.raises(UsageError, match=words):
        again.start()


@pytest.mark.parametrize("wire", ["fp32", "int4"])
def test_push_in_flight_is_saved_with_its_buffers(training: ScriptedTraining, wire: str) -> None:
    def with_norm() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))

    training.begins(with_norm(), config={"fragment_sync_delay": 2, "wire_dtype": wire})
    mean = training.descent.model.get_buffer("1.running_mean")
    mean.copy_(torch.tensor([1.0, 2.0, 3.0]))
    training.steps(H + 1)
    _, sent = training.broker.takes_push()
    training.resumes(training.saves(), version(0), model=with_norm())
    training.says_current(0)
    training.done()
    training.says_current(0)
    _, again = training.broker.takes_push()
    for segment, vector in sent.vectors.items():
        assert torch.equal(again.vectors[segment], vector)


class Kinds(nn.Module):
    """A layer of 50 by 50, one in bf16, a BatchNorm, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Linear(50, 50)
        self.narrow = nn.Linear(3, 3, dtype=torch.bfloat16)
        self.norm = nn.BatchNorm1d(3)
        self.wide = nn.Linear(3, 3, dtype=torch.float64)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)


def with_state(tensors: dict[str, Tensor]) -> nn.Module:
    model = Kinds()
    model.load_state_dict(tensors)
    return model


@pytest.mark.parametrize(
    "name", ["large.weight", "narrow.bias", "norm.running_var", "norm.num_batches_tracked"]
)
def test_smallest_change_of_a_tensor_is_named(training: ScriptedTraining, name: str) -> None:
    """In a stale file a value may differ in the last bit, far below 1% of the model's norm."""
    training.begins(Kinds())
    training.steps(1)
    state, tensors = training.saves()
    raw = tensors[name].view(-1).view(torch.uint8)
    raw[0] = raw[0] ^ 1
    words = rf"1 of 11 tensors differ \({name}\); load the model's own"
    is_refused(training, state, with_state(tensors), words)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_model_saved_in_a_narrower_dtype_is_accepted_within_its_rounding(
    training: ScriptedTraining, narrow: torch.dtype
) -> None:
    worker = training.begins(Kinds())
    with torch.no_grad():
        for parameter in training.descent.model.parameters():
            parameter.normal_()
    state, tensors = training.saves()
    for name, value in tensors.items():
        if value.dtype in (torch.float32, torch.float64):
            tensors[name] = value.to(narrow)
    join = training.resumes((state, tensors), version(0), version(0), model=Kinds())
    assert join.worker_id == worker.worker_id
    training.worker.close(failed=True)
    tensors["large.weight"] = tensors["large.weight"].to(torch.float8_e4m3fn).to(narrow)
    is_refused(training, state, with_state(tensors), r"\(large.weight\)")


Change = Callable[[dict[str, Any]], object]
# The malformed part of the state, the change, and words of the error.
BROKEN: list[tuple[str, Change, str]] = [
    ("", lambda s: s.pop("metrics"), "'metrics'"),
    ("", lambda s: s.update(resume=5), "not the state of a DiLoCoWorker"),
    ("", lambda s: s.update(cycle_start=9), "cycle began at step 9, and it is at step 5"),
    ("resume", lambda r: r.update(format=3), "format 3, this release reads 2"),
    ("resume", lambda r: r.pop("checksums"), "lacks 'checksums'"),
    ("resume", lambda r: r["checksums"].pop("bias[0:3]"), r"lacks 'bias\[0:3\]'"),
    ("resume", lambda r: r["checksums"].update({"bias[0:3]": ["x"]}), "'x'"),
    ("resume", lambda r: r.update(fragments=[]), "not the state of a DiLoCoWorker"),
    ("resume", lambda r: r["config"].update(colour=1), "colour"),
    ("resume", lambda r: r["place"].update(slot=1), "slot 1 of 1"),
    ("resume", lambda r: r["place"].update(cursor="x"), "'x'"),
    ("resume", lambda r: r["model"][0].__setitem__(0, "w"), "another model than this one"),
    ("fragment", lambda f: f.pop("base"), "lacks 'base'"),
    ("fragment", lambda f: f.update(version=["a", 1]), "unpack"),
    ("fragment", lambda f: f.update(steps=None), "NoneType"),
    (
        "fragment",
        lambda f: f["base"].update(parameters=torch.zeros(3)),
        r"torch.float32\[3\], not torch.float32\[12\]",
    ),
    (
        "flight",
        lambda f: f["wire"].update(parameters=torch.zeros(12).half()),
        r"torch.float16\[12\], not torch.float32\[12\]",
    ),
    ("flight", lambda f: f.update(push_id="xyz"), "xyz"),
    ("flight", lambda f: f.update(wire_dtype="int3"), "int3"),
]


@pytest.mark.parametrize(("where", "breaks", "words"), BROKEN)
def test_malformed_state_is_refused_with_a_sentence(
    training: ScriptedTraining, where: str, breaks: Change, words: str
) -> None:
    training.begins(config={"fragment_sync_delay": 2})
    training.steps(H + 1)
    state = training.saves()[0]
    resume = state["resume"]
    (fragment,) = resume["fragments"]
    parts = {"": state, "resume": resume, "fragment": fragment, "flight": fragment["flight"]}
    breaks(parts[where])
    again = training.makes()
    before = again.state_dict()
    with pytest.raises(UsageError, match=words) as refused:
        again.load_state_dict(state)
    assert str(refused.value).endswith(".")
    assert again.state_dict() == before, "nothing has changed"


def test_state_of_another_model_names_the_tensors(training: ScriptedTraining) -> None:
    training.begins()
    state = training.saves()[0]
    with pytest.raises(UsageError, match=r"weight is shaped \[3, 3\] instead of \[5, 3\]"):
        training.makes(nn.Linear(3, 5)).load_state_dict(state)


def test_unquantized_codec_drops_the_residual(
    training: ScriptedTraining, broker: ScriptedBroker
) -> None:
    training.begins(config={"wire_dtype": "int4"})
    training.round(H, 1)
    sent = []
    for counter, wire in ((2, "bf16"), (3, "int4")):
        broker.config = replace(broker.config, wire_dtype=wire)
        training.resumes(training.saves(), version(counter - 1))
        training.says_current(counter - 1)
        training.done()
        training.trains(H)
        training.says_current(counter - 1)
        push, delta = training.takes()
        training.serves(100, counter, push)
        training.done()
        sent.append(delta)
    assert sent == [H, decode(encode([H] * 4, "int4"), "int4", 4)[0]]


UNAUTHENTICATED = 0xABC  # an unknown push


def test_resumed_worker_joins_with_its_held_versions(training: ScriptedTraining) -> None:
    training.begins()
    training.steps(2)
    join = training.resumes(training.saves(), version(0), worker_id=None)
    assert (join.run, join.session, join.worker_id) == (RUN, None, "me")
    assert training.worker.worker_id == "me", "its former id"
    assert join.versions[0] == version(0)
    pull = training.says_current(0)
    assert (pull.held_version, pull.after) == (version(0), -1)
    assert pull.held == Bitmap.full(3).to_bytes(), "nothing needs to be sent"
    training.done()
    assert training.values == 98
    training.trains(2)
    training.says_current(0)
    push, delta = training.takes()
    assert (push.steps, push.base, delta) == (H, version(0), H)
    training.serves(50, 1, push)
    training.done()
    assert (training.values, training.worker.local_step, training.worker.sync_count) == (50, H, 1)
    push = training.round(H, 2)  # no longer in doubt: offered without asking
    assert push.base == version(1)


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("flight_counted", [False, True])
def test_steps_pushed_by_a_later_incarnation_are_superseded(
    training: ScriptedTraining,
    broker: ScriptedBroker,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    in_flight: bool,
    flight_counted: bool,
) -> None:
    training.begins(config={"fragment_sync_delay": 3})
    training.steps(H + 1 if in_flight else 2)
    ids = [broker.hears(Push).push_id] if in_flight else []
    audit = tmp_path / "audit"
    training.resumes(training.saves(), version(3), options={"audit": audit})
    broker.hears_pull()
    counted = [*(ids if flight_counted else []), UNAUTHENTICATED]
    broker.serves(training.filled(500), version(3), *counted)
    training.done()
    assert training.values == 500
    lost = 2 if not in_flight else 1 if flight_counted else H + 1
    assert f"{lost} steps of fragment 0" in caplog.text
    assert training.worker.sync_count == (in_flight and flight_counted)
    written = audit.read_text()
    assert ('"counted"' in written) == (in_flight and flight_counted)
    assert ('"superseded"' in written) == (in_flight and not flight_counted)
    left = H - 1 if in_flight else 2
    training.steps(left)
    push, delta = training.takes()  # nothing is in doubt: offered without asking
    assert (push.base, push.steps, delta) == (version(3), left, left)


@pytest.mark.parametrize("is_another_run", [False, True])
def test_changed_or_other_run_is_joined_as_a_new_worker(
    training: ScriptedTraining, caplog: pytest.LogCaptureFixture, is_another_run: bool
) -> None:
    broker = training.broker
    training.begins()
    push = training.round(H, 1)
    training.steps(2)
    saved = training.saves()
    if is_another_run:
        training.resumes(saved, answer=Error("run_differs", "This is another run.", about="join"))
        assert broker.welcomes(version(2)).run is None
        why = "this broker serves another run"
    else:
        broker.config = run_config(fragment_sync_delay=1)
        training.resumes(saved, version(2))
        why = "it has fragment_sync_delay 0, the run has 1 now"
    assert broker.hears_pull().held_version is None
    training.serves(500, 2)
    training.done()
    assert caplog.text.count(f"cannot be used here: {why}") == 1
    assert (training.values, training.worker.local_step, training.worker.sync_count) == (500, 6, 1)
    following = training.round(2, 3)
    assert following.push_id != push.push_id, "the place in the cycle is kept"


@pytest.mark.parametrize("has_another_id", [True, False])
def test_worker_with_another_id_or_no_parameters_resumes_only_counters(
    training: ScriptedTraining, caplog: pytest.LogCaptureFixture, has_another_id: bool
) -> None:
    broker = training.broker
    training.begins()
    training.steps(1)
    state, tensors = training.saves()
    if not has_another_id:
        state["resume"] = None
    name = "you" if has_another_id else "me"
    join = training.resumes((state, tensors), version(0), worker_id=name)
    assert (join.worker_id, join.run) == (name, None)
    assert ("state is that of worker 'me', this one is 'you'" in caplog.text) == has_another_id
    broker.hears_pull()
    training.serves(100, 0)
    training.done()
    assert (training.values, training.worker.local_step) == (100, 1)
    training.trains(H - 1)
    last = training.filled(0)
    push, _ = training.takes()
    assert push.steps == H - 1, "the place in the cycle is kept"
    broker.serves(last, version(1), push.push_id, worker=name)
    training.done()
