"""DiLoCoClient against a scripted broker."""

from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco_protocol import Kind, Manifest, Refused, Segment, TensorEntry, UsageError
from diloco_protocol.messages import (
    Chunk,
    Control,
    Error,
    Heartbeat,
    Join,
    Leave,
    Message,
    Notice,
    Push,
    Result,
    Welcome,
)
from diloco_worker import DiLoCoClient, GlobalParameters
from kit.scripted_broker import Descent, ScriptedBroker, first, run_config, version
from kit.scripted_training import ScriptedTraining, layers

pytest_plugins = ("kit.worker_fixtures",)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3, bias=False, dtype=torch.bfloat16)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 3, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.inner.weight
        self.frozen = nn.Linear(2, 2, bias=False).requires_grad_(False)


class Talk(ScriptedTraining):
    """A client instead of a worker; its calls run in another thread."""

    def __init__(self, client: DiLoCoClient, broker: ScriptedBroker) -> None:
        super().__init__(broker)
        self.client = client
        self.descent = Descent()

    def begins_with(self, model: nn.Module | None = None, fragments: int = 1) -> GlobalParameters:
        """Join: the parameters are 8; with fragments 8, 9, ... in versions 0, 1, ..."""
        self.descent = Descent(model or (None if fragments == 1 else layers(fragments)))
        self.broker.config = run_config(mode=self.broker.config.mode, num_fragments=fragments)
        self.does(self.client.join, self.descent.model)
        self.broker.welcomes(version(0))
        for fragment in range(fragments):
            self.serves(8 + fragment, fragment, fragment=fragment)
        if any(not each.requires_grad for each in self.descent.model.parameters()):
            self.broker.serves(self.descent.values(fragment=fragments), version(0))
        result = self.done()
        assert isinstance(result, GlobalParameters)
        return result

    def pushes(self, delta: Any = None, **keywords: Any) -> tuple[Push, Any]:
        """Push; by default 2.5 everywhere."""
        state = self.descent.model.state_dict()
        whole = {name: torch.full_like(value, 2.5) for name, value in state.items()}
        self.does(self.client.push, whole if delta is None else delta, **keywords)
        push, values = self.broker.takes_push(keywords.get("fragment"))
        assert self.done() == push.push_id
        return push, values

    def pulls(self, after: int | None = None) -> None:
        """Start a pull."""
        self.does(self.client.pull, after)


@pytest.fixture
def talk(broker: ScriptedBroker) -> Iterator[Talk]:
    with (
        DiLoCoClient(broker.address, worker_id="me", timeout=20.0) as client,
        closing(Talk(client, broker)) as made,
    ):
        yield made


def the_value(tensor: Tensor) -> float:
    (value,) = set(tensor.flatten().tolist())
    return float(value)


def test_join_returns_parameters_that_load_strictly(talk: Talk) -> None:
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    start = talk.begins_with(model)
    assert start.version == version(0)
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items()), "only read"
    for name, value in start.tensors.items():
        assert value.dtype == before[name].dtype
    model.load_state_dict(start.tensors, strict=True)
    assert model.inner.weight[0, 0].item() == 8
    assert torch.equal(model.frozen.weight, before["frozen.weight"])
    assert start.tensors["head.weight"] is start.tensors["inner.weight"]


def test_push_sends_the_delta_and_pull_waits_for_the_version_that_contains_it(talk: Talk) -> None:
    earlier = talk.begins_with()
    push, values = talk.pushes(weight=7.0, steps=3, tokens=4, loss=1.5)
    assert first(values) == 2.5
    assert (push.weight, push.steps, push.tokens, push.loss) == (7.0, 3, 4, 1.5)
    assert push.base == version(0)
    talk.pulls()
    talk.serves(1, 1)
    while talk.broker.hears_pull().after != 1:
        pass
    assert talk.stands, "version 1 does not contain the push"
    talk.serves(9, 2, push)
    result = talk.done()
    assert result.version == version(2)
    assert result.ledger.names_whole("me", push.push_id)
    assert the_value(result.tensors["weight"]) == 9
    for counter in (3, 4):
        talk.pulls(counter - 1)
        while talk.broker.hears_pull().after != counter - 1:
            pass
        talk.serves(100 + counter, counter)
        talk.done()
    assert the_value(earlier.tensors["weight"]) == 8, "results are the caller's own"


def test_delta_may_omit_buffers(talk: Talk) -> None:
    talk.begins_with(Net())
    _, values = talk.pushes(
        {
            "head.weight": torch.ones(3, 3),  # by the other name of a tied tensor
            "norm.weight": torch.ones(3),
            "norm.bias": torch.ones(3),
            "norm.running_mean": torch.full((3,), 0.25),
        }
    )
    assert values.vectors[Segment.BUFFERS].tolist() == [0.25] * 3 + [8.0] * 3
    assert values.vectors[Segment.INTEGERS].tolist() == [8]


ONES = {"weight": torch.ones(3, 3), "bias": torch.ones(3)}


@pytest.mark.parametrize(
    ("fragments", "delta", "fragment", "sentence"),
    [
        (1, {"weight": torch.ones(3, 3)}, None, "lacks 'bias'"),
        (1, ONES | {"weight": torch.ones(1)}, None, r"weight has shape \[1\]"),
        (1, ONES | {"bias": torch.full((3,), torch.nan)}, None, "not finite in bias"),
        (1, ONES | {"odd": torch.ones(1)}, None, "does not train 'odd'"),
        *((3, {}, each, f"fragment {each}, and this run has 3.* 0 to 2") for each in (None, 3, -1)),
        (3, {"1.weight": torch.zeros(2, 2)}, 2, r"lacks '2\.weight'"),
    ],
)
def test_invalid_push_is_never_sent(
    talk: Talk, fragments: int, delta: dict[str, Tensor], fragment: int | None, sentence: str
) -> None:
    talk.begins_with(fragments=fragments)
    with pytest.raises(UsageError, match=sentence):
        talk.client.push(delta, fragment=fragment)
    talk.broker.hears_nothing_of(Push, 0.1)


def test_rejected_push_raises_with_its_sentence(talk: Talk) -> None:
    talk.begins_with()
    talk.does(talk.client.push, ONES)
    push = talk.broker.hears(Push)
    talk.broker.says(Error("bad_push", "The weight is odd.", push_id=push.push_id, about="push"))
    with pytest.raises(Refused, match="The weight is odd"):
        talk.done()


def test_push_sends_one_fragment_and_pull_returns_all(talk: Talk) -> None:
    start = talk.begins_with(fragments=3)
    assert start.versions == {0: version(0), 1: version(1), 2: version(2)}
    assert [the_value(start.tensors[f"{i}.bias"]) for i in range(3)] == [8, 9, 10]
    delta = {"1.weight": torch.full((2, 2), 2.5), "1.bias": torch.full((2,), 2.5)}
    push, values = talk.pushes(delta, fragment=1, samples=3)
    assert (push.fragment, push.base, push.samples) == (1, version(1), 3)
    assert first(values) == 2.5
    talk.pulls()
    talk.serves(50, 2, push)
    for fragment in (0, 2):
        while talk.broker.hears_pull(fragment).held is None:
            pass
        talk.serves(60, 7, fragment=fragment)
    result = talk.done()
    assert result.version == version(7)
    assert result.versions == {0: version(7), 1: version(2), 2: version(7)}
    assert [the_value(result.tensors[f"{i}.bias"]) for i in range(3)] == [60, 50, 60]
    talk.descent.model.load_state_dict(result.tensors, strict=True)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_client_pushes_in_its_own_dtype_once_granted(talk: Talk, mode: str) -> None:
    broker = talk.broker
    broker.config = run_config(mode=mode)
    wants = {"wire_dtype": "bf16"}
    with DiLoCoClient(broker.address, worker_id="me", timeout=20.0, wants=wants) as talk.client:
        talk.begins_with()
        talk.does(talk.client.push, ONES)
        push = broker.hears(Push)
        assert push.wire_dtype == "bf16"
        broker.puts_off(push)
        broker.hears_nothing_of(Chunk, 0.05)
        assert talk.stands
        broker.grants(push, credit=8)
        broker.takes_chunks(push, push.chunks)
        talk.done()


def test_dict_with_a_manifest_joins_and_seeds_the_run(talk: Talk) -> None:
    manifest = Manifest((TensorEntry("w", (2, 3), "float32", Kind.TRAINABLE),))
    state = {"w": torch.arange(6.0).reshape(2, 3)}
    talk.does(talk.client.join, manifest=manifest, state=state)
    talk.broker.welcomes()
    talk.broker.says(Notice("seed", fragment=0))
    _, values = talk.broker.takes_push()
    assert values.vectors[Segment.PARAMETERS].tolist() == list(range(6))
    talk.broker.serves(values, version(0))
    assert torch.equal(talk.done().tensors["w"], state["w"])


OLD = Welcome(b"1" * 16, "epoch", run_config(buffers="differences"), 0, versions=(version(0),))
DIFFERS = Error("model_differs", "It lacks head.weight.", about="join")


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [(DIFFERS, "lacks head"), (OLD, "install the same release at both ends")],
)
def test_join_that_fails_raises_the_sentence(talk: Talk, answer: Message, sentence: str) -> None:
    talk.does(talk.client.join, Net())
    talk.broker.control, _, _ = talk.broker.hears_from(Join)
    talk.broker.says(answer)
    with pytest.raises(Refused, match=sentence):
        talk.done()


def test_heartbeat_and_leave_are_sent_at_once(talk: Talk) -> None:
    talk.begins_with()
    talk.client.heartbeat(41, inner_step=2, loss=0.5, tokens=9, steps_per_s=3.0)
    beat = talk.broker.hears(Heartbeat)
    assert (beat.step, beat.inner_step, beat.loss, beat.tokens) == (41, 2, 0.5, 9)
    talk.client.leave("enough")
    assert talk.broker.hears(Leave).reason == "enough"
    talk.client.leave()  # has no effect


def test_number_too_large_for_a_message_is_refused(talk: Talk) -> None:
    talk.begins_with()
    with pytest.raises(UsageError, match="cannot be sent"):
        talk.client.heartbeat(2**70)
    with pytest.raises(UsageError, match="cannot be sent"):
        talk.client.control("set", max_rounds=2**70)
    with pytest.raises(UsageError, match="cannot be sent"):
        talk.client.push(ONES, tokens=2**70)
    talk.client.heartbeat(12)
    assert talk.broker.hears(Heartbeat).step == 12


def test_call_before_joining_raises(talk: Talk) -> None:
    with pytest.raises(UsageError, match="join"):
        talk.client.push({})
    with pytest.raises(UsageError, match="join"):
        talk.client.heartbeat(1)
    with pytest.raises(UsageError, match="model"):
        talk.client.join()


def test_observer_of_a_broker_without_a_model_is_told(talk: Talk) -> None:
    talk.client.timeout = 1.2
    talk.pulls()
    asked_for = 0
    while talk.stands:  # it retries until its timeout
        with suppress(AssertionError):
            talk.broker.control, asked, _ = talk.broker.hears_from(Control, patience=0.05)
            talk.broker.says(Result(asked.request, False, "The run has no model yet."))
            asked_for += 1
    assert asked_for > 1
    with pytest.raises(Refused, match="The run has no model yet") as caught:
        talk.done()
    assert caught.value.retry
