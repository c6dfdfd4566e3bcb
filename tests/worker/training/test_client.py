"""DiLoCoClient against a broker that follows a script."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from diloco_protocol import Kind, Manifest, Refused, Segment, TensorEntry, Unreachable, UsageError
from diloco_protocol.fragments import FragmentPlan
from diloco_protocol.messages import (
    Chunk,
    Control,
    Error,
    Heartbeat,
    Join,
    Leave,
    Notice,
    Pull,
    Push,
    Released,
    Result,
    Welcome,
)
from diloco_protocol.records import to_plain
from diloco_worker import DiLoCoClient, GlobalParameters
from diloco_worker.core.compatibility import cut
from diloco_worker.core.downloads import DOWNLOAD_WINDOW
from diloco_worker.core.events import Ask
from diloco_worker.model.flat_state import FlatState
from diloco_worker.model.model_tensors import ModelTensors
from kit.scripted_broker import (
    Beside,
    Descent,
    ScriptedBroker,
    changed,
    run_config,
    scripted_broker,
    version,
)
from kit.uniform_model import until


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3, bias=False, dtype=torch.bfloat16)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 3, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.inner.weight
        self.frozen = nn.Linear(2, 2, bias=False).requires_grad_(False)


@pytest.fixture
def broker() -> Iterator[ScriptedBroker]:
    with scripted_broker() as made:
        yield made


@pytest.fixture
def beside() -> Iterator[Beside]:
    made = Beside()
    yield made
    made.close()


@pytest.fixture
def client(broker: ScriptedBroker) -> Iterator[DiLoCoClient]:
    with DiLoCoClient(broker.address, worker_id="me", timeout=20.0) as made:
        yield made


def trained(model: nn.Module, value: float) -> FlatState:
    return changed(Descent(model).values(), lambda vector: torch.full_like(vector, value))


def joined(client: DiLoCoClient, broker: ScriptedBroker, beside: Beside, model: nn.Module) -> Any:
    joining = beside(client.join, model)
    broker.welcomes(version(0))
    broker.serves(trained(model, 8), version(0))
    frozen = Descent(model).values(fragment=1)
    if frozen.layout.chunks:
        broker.serves(frozen, version(0))
    return joining()


def test_join_returns_parameters_that_load_strictly(
    client: DiLoCoClient, broker: ScriptedBroker, beside: Beside
) -> None:
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    start = joined(client, broker, beside, model)
    assert isinstance(start, GlobalParameters)
    assert start.version == version(0)
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items()), "only read"
    for name, value in start.tensors.items():
        assert value.dtype == before[name].dtype
    model.load_state_dict(start.tensors, strict=True)
    assert model.inner.weight[0, 0].item() == 8
    assert torch.equal(model.frozen.weight, before["frozen.weight"])
    assert start.tensors["head.weight"] is start.tensors["inner.weight"]


def test_push_sends_the_delta_and_pull_waits_for_the_version_that_contains_it(
    client: DiLoCoClient, broker: ScriptedBroker, beside: Beside
) -> None:
    model = nn.Linear(3, 3)
    joined(client, broker, beside, model)
    delta = {name: torch.full_like(value, 2.5) for name, value in model.state_dict().items()}
    pushing = beside(lambda: client.push(delta, weight=7.0, steps=3, tokens=4, loss=1.5))
    push, values = broker.takes_push()
    assert pushing() == push.push_id
    assert set(values.vectors[Segment.PARAMETERS].tolist()) == {2.5}
    assert (push.weight, push.steps, push.tokens, push.loss) == (7.0, 3, 4, 1.5)
    assert push.base == version(0)
    pulling = beside(client.pull)
    broker.serves(trained(model, 1), version(1))
    while broker.hears_pull().after != 1:
        pass
    assert beside.is_busy, "version 1 does not contain the push"
    broker.serves(trained(model, 9), version(2), push.push_id)
    result = pulling()
    assert result.version == version(2)
    assert result.ledger.names_whole("me", push.push_id)
    assert set(result.tensors["weight"].flatten().tolist()) == {9}


def test_broker_that_reads_float_buffers_as_differences_is_refused(
    client: DiLoCoClient, broker: ScriptedBroker, beside: Beside
) -> None:
    """One of an earlier release, which says nothing of them."""
    joining = beside(client.join, Net())
    broker.control, _, _ = broker.hears_from(Join)
    old = run_config(buffers="differences")
    broker.says(Welcome(b"1" * 16, "epoch", old, 0, versions=(version(0),)))
    with pytest.raises(Refused, match="install the same release at both ends"):
        joining()


def test_results_are_the_callers_own(
    client: DiLoCoClient, broker: ScriptedBroker, beside: Beside
) -> None:
    model = nn.Linear(3, 3)
    earlier = joined(client, broker, beside, model)
    for counter in (1, 2, 3):
        pulling = beside(client.pull, counter - 1)
        while broker.hears_pull().after != counter - 1:
            pass
        broker.serves(trained(model, 100 + counter), version(counter))
        pulling()
    assert set(earlier.tensors["weight"].flatten().tolist()) == {8}


def test_delta_may_leave_out_buffers(
    client: DiLoCoClient, broker: ScriptedBroker, beside: Beside
) -> None:
    joined(client, broker, beside, Net())
    delta = {
        "head.weight": torch.ones(3, 3),  # by the other name of a tied tensor
        "norm.weight": torch.ones(3),
        "norm.bias": torch.ones(3),
        "norm.running_mean": torch.full((3,), 0.25),
    }
    pushing = beside(client.push, delta)
    _, values = broker.takes_push()
    pushing()
    assert values.vectors[Segment.BUFFERS].tolist() == [0.25] * 3 + [8.0] * 3
    assert values.vectors[Segment.INTEGERS].tolist() == [8]


@pytest.mark.parametrize(
    ("delta", "sentence"),
    [
        ({"weight": torch.ones(3, 3)}, "lacks 'bias'"),
        ({"weight": torch.ones(1), "bias": torch.ones(3)}, r"weight has shape \[1\]"),
        ({"weight": torch.ones(3, 3), "bias": torch.full((3,), torch.nan)}, "not finite in bias"),
        (
            {"weight": torch.ones(3, 3), "bias": torch.ones(3), "odd": torch.ones(1)},
            "does not train 'odd'",
        ),
    ],
)
def test_delta_that_does_not_fit_is_refused_before_anything_is_sent(
    client: DiLoCoClient,
    broker: ScriptedBroker,
    beside: Beside,
    delta: dict[str, torch.Tensor],
    sentence: str,
) -> None:
    joined(client, broker, beside, nn.Linear(3, 3))
    with pytest.raises(UsageError, match=sentence):
        client.push(delta)
    broker.hears_nothing_of(Push, 0.1)


def test_push_that_the_broker_refuses_raises_its_sentence(
    client: DiLoCoClient, broker: ScriptedBroker, beside: Beside
) -> None:
    model = nn.Linear(3, 3)
    joined(client, broker, beside, model)
    delta = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    pushing = beside(client.push, delta)
    push = broker.hears(Push)
    broker.says(Error("bad_push", "The weight is odd.", push_id=push.push_id, about="push"))
    with pytest.raises(Refused, match="The weight is odd"):
        pushing()


def test_nothing_is_kept_of_pushes_that_others_took_the_place_of(
    client: DiLoCoClient, broker: ScriptedBroker, beside: Beside
) -> None:
    model = nn.Linear(3, 3)
    joined(client, broker, beside, model)
    link = client._link
    assert link is not None
    delta = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    for refused in (False, True, False):
        pushing = beside(client.push, delta)
        push, _ = broker.takes_push()
        pushing()
        if refused:
            error = Error("late", "Too late.", push_id=push.push_id, about="push")
            broker.says(error)
            link.wait_for(lambda: bool(link.rejections), 20)
    until(lambda: link.uploaded == {push.push_id} and not link.rejections)
    assert link.last_error is None


# Fragments and asynchronous mode.


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))


def part(broker: ScriptedBroker, model: nn.Module, fragment: int, value: float) -> FlatState:
    assert broker.layout is not None
    now = Descent(model).values(part=broker.layout.all[fragment])
    return changed(now, lambda vector: torch.full_like(vector, value))


def joined_in_fragments(
    client: DiLoCoClient, broker: ScriptedBroker, beside: Beside, model: nn.Module
) -> GlobalParameters:
    joining = beside(client.join, model)
    broker.welcomes(version(0))
    for fragment in range(3):
        broker.serves(part(broker, model, fragment, 8 + fragment), version(fragment))
    result = joining()
    assert isinstance(result, GlobalParameters)
    return result


def test_push_sends_one_fragment_and_pull_returns_all(
    client: DiLoCoClient, broker: ScriptedBroker, beside: Beside
) -> None:
    broker.config = run_config(num_fragments=3)
    model = layers()
    start = joined_in_fragments(client, broker, beside, model)
    assert start.versions == {0: version(0), 1: version(1), 2: version(2)}
    assert [float(start.tensors[f"{i}.bias"][0]) for i in range(3)] == [8, 9, 10]
    delta = {"1.weight": torch.full((2, 2), 2.5), "1.bias": torch.full((2,), 2.5)}
    pushing = beside(lambda: client.push(delta, fragment=1, samples=3))
    push, values = broker.takes_push()
    assert pushing() == push.push_id
    assert (push.fragment, push.base, push.samples) == (1, version(1), 3)
    assert set(values.vectors[Segment.PARAMETERS].tolist()) == {2.5}
    pulling = beside(client.pull)
    broker.serves(part(broker, model, 1, 50), version(2), push.push_id)
    for fragment in (0, 2):
        while broker.hears_pull(fragment).held is None:
            pass
        broker.serves(part(broker, model, fragment, 60), version(7))
    result = pulling()
    assert result.version == version(7)
    assert result.versions == {0: version(7), 1: version(2), 2: version(7)}
    assert [float(result.tensors[f"{i}.bias"][0]) for i in range(3)] == [60, 50, 60]
    model.load_state_dict(result.tensors, strict=True)


@pytest.mark.parametrize("fragment", [None, 3, -1])
def test_push_must_say_which_fragment_it_is(
    client: DiLoCoClient, broker: ScriptedBroker, beside: Beside, fragment: int | None
) -> None:
    broker.config = run_config(num_fragments=3)
    model = layers()
    joined_in_fragments(client, broker, beside, model)
    with pytest.raises(UsageError, match=f"fragment {fragment}, and this run has 3.* 0 to 2"):
        client.push(dict(model.named_parameters()), fragment=fragment)
    broker.hears_nothing_of(Push, 0.05)


def test_fragment_lacks_only_its_own_parameters(
    client: DiLoCoClient, broker: ScriptedBroker, beside: Beside
) -> None:
    broker.config = run_config(num_fragments=3)
    joined_in_fragments(client, broker, beside, layers())
    with pytest.raises(UsageError, match=r"lacks '2\.weight'"):
        client.push({"1.weight": torch.zeros(2, 2)}, fragment=2)


def test_several_fragments_may_be_in_flight(
    client: DiLoCoClient, broker: ScriptedBroker, beside: Beside
) -> None:
    broker.config = run_config(num_fragments=3)
    model = layers()
    joined_in_fragments(client, broker, beside, model)
    ids = []
    for fragment in range(3):
        pushing = beside(partial(client.push, model.state_dict(), fragment=fragment))
        push, _ = broker.takes_push(fragment)
        pushing()
        ids.append(push.push_id)
    pulling = beside(client.pull)
    for fragment in (2, 0, 1):
        assert beside.is_busy
        broker.serves(part(broker, model, fragment, 30), version(9), ids[fragment])
    assert set(pulling().versions.values()) == {version(9)}


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_client_pushes_in_its_own_dtype_once_it_is_its_turn(
    broker: ScriptedBroker, beside: Beside, mode: str
) -> None:
    broker.config = run_config(mode=mode)
    model = nn.Linear(3, 3)
    wants = {"wire_dtype": "bf16"}
    with DiLoCoClient(broker.address, worker_id="me", timeout=20.0, wants=wants) as client:
        joined(client, broker, beside, model)
        pushing = beside(client.push, dict(model.named_parameters()))
        push = broker.hears(Push)
        assert push.wire_dtype == "bf16"
        broker.puts_off(push)
        broker.hears_nothing_of(Chunk, 0.05)
        assert beside.is_busy
        broker.grants(push, credit=8)
        broker.takes_chunks(push, push.chunks)
        pushing()


def test_observer_learns_the_plan_of_the_fragments(
    client: DiLoCoClient, broker: ScriptedBroker, beside: Beside
) -> None:
    broker.config = run_config(num_fragments=3)
    model = layers()
    manifest = ModelTensors.of_module(model).manifest
    plan = FragmentPlan.of(manifest, 3, "balanced").numbers(manifest)
    broker.layout = cut(manifest, broker.config, plan)
    pulling = beside(client.pull)
    broker.control, asked, _ = broker.hears_from(Control)
    data = {"manifest": to_plain(manifest), "config": to_plain(broker.config), "plan": plan}
    broker.says(Result(asked.request, True, "here", data))
    broker.hears(Pull)
    broker.bulk = broker.control
    for fragment in range(3):
        broker.serves(part(broker, model, fragment, fragment), version(fragment))
    result = pulling()
    assert result.versions == {0: version(0), 1: version(1), 2: version(2)}
    for name, tensor in result.tensors.items():
        number = plan[[entry.name for entry in manifest.entries].index(name)]
        assert set(tensor.flatten().tolist()) == {number}


def test_observer_is_told_of_a_plan_that_does_not_fit(
    client: DiLoCoClient, broker: ScriptedBroker, beside: Beside
) -> None:
    broker.config = run_config(num_fragments=3)
    manifest = ModelTensors.of_module(layers()).manifest
    pulling = beside(client.pull)
    broker.control, asked, _ = broker.hears_from(Control)
    data = {"manifest": to_plain(manifest), "config": to_plain(broker.config), "plan": [0]}
    broker.says(Result(asked.request, True, "here", data))
    with pytest.raises(Refused, match="there are 1 for 6 tensors"):
        pulling()


# Without a module, without joining.


def test_dict_with_a_manifest_joins_and_is_donated(
    client: DiLoCoClient, broker: ScriptedBroker, beside: Beside
) -> None:
    manifest = Manifest((TensorEntry("w", (2, 3), "float32", Kind.TRAINABLE),))
    state = {"w": torch.arange(6.0).reshape(2, 3)}
    joining = beside(lambda: client.join(manifest=manifest, state=state))
    broker.welcomes()
    broker.says(Notice("donate", fragment=0))
    _, values = broker.takes_push()
    assert values.vectors[Segment.PARAMETERS].tolist() == list(range(6))
    broker.serves(values, version(0))
    assert torch.equal(joining().tensors["w"], state["w"])


def test_refused_join_raises_the_sentence(
    client: DiLoCoClient, broker: ScriptedBroker, beside: Beside
) -> None:
    joining = beside(client.join, nn.Linear(3, 3))
    broker.control, _, _ = broker.hears_from(Join)
    broker.says(Error("model_differs", "It lacks head.weight.", about="join"))
    with pytest.raises(Refused, match="lacks head"):
        joining()


def test_heartbeat_is_sent_at_once(
    client: DiLoCoClient, broker: ScriptedBroker, beside: Beside
) -> None:
    joined(client, broker, beside, nn.Linear(3, 3))
    client.heartbeat(41, inner_step=2, loss=0.5, tokens=9, steps_per_s=3.0)
    beat = broker.hears(Heartbeat)
    assert (beat.step, beat.inner_step, beat.loss, beat.tokens) == (41, 2, 0.5, 9)


def test_leave_is_heard_and_may_be_called_twice(
    client: DiLoCoClient, broker: ScriptedBroker, beside: Beside
) -> None:
    joined(client, broker, beside, nn.Linear(3, 3))
    client.leave("enough")
    assert broker.hears(Leave).reason == "enough"
    client.leave()


def test_call_that_needs_joining_says_so(client: DiLoCoClient) -> None:
    with pytest.raises(UsageError, match="join"):
        client.push({})
    with pytest.raises(UsageError, match="join"):
        client.heartbeat(1)
    with pytest.raises(UsageError, match="model"):
        client.join()


def observed(
    client: DiLoCoClient, broker: ScriptedBroker, beside: Beside, model: nn.Module
) -> tuple[GlobalParameters, list[Pull]]:
    """The first pull of a client that has not joined, of parameters that are 4, and what it sent."""
    manifest = ModelTensors.of_module(model).manifest
    pulling = beside(client.pull)
    broker.control, asked, _ = broker.hears_from(Control)
    assert asked.action == "manifest"
    data = {"manifest": to_plain(manifest), "config": to_plain(broker.config)}
    broker.says(Result(asked.request, True, "here", data))
    broker.bulk = broker.control
    pulls = [broker.hears(Pull)]
    broker.serves(trained(model, 4), version(2))
    frozen = Descent(model).values(fragment=1)
    if frozen.layout.chunks:
        pulls.append(broker.hears(Pull))
        broker.serves(frozen, version(0))
    return pulling(), pulls


def test_observer_pulls_without_joining(
    client: DiLoCoClient, broker: ScriptedBroker, beside: Beside
) -> None:
    model = Net()
    result, pulls = observed(client, broker, beside, model)
    assert all(pull.session is None for pull in pulls)
    assert sum(pull.credit for pull in pulls) == DOWNLOAD_WINDOW
    assert result.version == version(2)
    model.load_state_dict(result.tensors, strict=True)
    assert model.inner.weight[0, 0].item() == 4
    broker.hears_nothing_of(Join, 0.05)


def released_here() -> int:
    """Records of versions that anything in this process holds."""
    gc.collect()
    return sum(type(each) is Released for each in gc.get_objects())


@pytest.mark.parametrize("takes_part", [False, True], ids=["observer", "member that only pulls"])
def test_client_that_pulls_keeps_no_record_of_rounds_that_are_over(
    client: DiLoCoClient, broker: ScriptedBroker, beside: Beside, takes_part: bool
) -> None:
    model = nn.Linear(3, 3)
    if takes_part:
        joined(client, broker, beside, model)
        broker.hears(Pull)  # the one of joining
    else:
        observed(client, broker, beside, model)
    before = released_here()
    for number in range(3, 33):
        pulling = beside(client.pull)
        broker.hears(Pull)
        broker.serves(trained(model, number), version(number))
        assert pulling().version == version(number)
    assert released_here() <= before + 2


def test_answer_that_comes_too_late_is_not_kept(broker: ScriptedBroker, beside: Beside) -> None:
    with DiLoCoClient(broker.address, timeout=20.0) as client:
        first = beside(client.status)
        broker.control, asked, _ = broker.hears_from(Control)
        broker.says(Result(asked.request, True, "here", {"round": 1}))
        assert first() == {"round": 1}
        link = client._link
        assert link is not None
        link.tell(Ask(99, "status"))
        asked = broker.hears(Control)
        broker.says(Result(asked.request, True, "late", {"round": 2}))
        until(lambda: 99 in link.results)
        link.withdraw(99)
        until(lambda: not link.results)


def test_observer_of_a_broker_without_a_model_is_told(
    broker: ScriptedBroker, beside: Beside
) -> None:
    with DiLoCoClient(broker.address, timeout=1.2) as client:
        pulling = beside(client.pull)
        asked_for = 0
        while beside.is_busy:  # it asks again until its time is over
            with contextlib.suppress(AssertionError):
                broker.control, asked, _ = broker.hears_from(Control, patience=0.05)
                broker.says(Result(asked.request, False, "There is no model yet."))
                asked_for += 1
        assert asked_for > 1
        with pytest.raises(Refused, match="There is no model yet") as caught:
            pulling()
        assert caught.value.retry


def test_status_is_the_brokers_snapshot(
    client: DiLoCoClient, broker: ScriptedBroker, beside: Beside
) -> None:
    asking = beside(client.status)
    broker.control, asked, _ = broker.hears_from(Control)
    assert asked.action == "status"
    broker.says(Result(asked.request, True, "", {"feed": 1, "workers": ({"id": "a"},)}))
    assert asking() == {"feed": 1, "workers": ({"id": "a"},)}


def test_control_returns_what_the_broker_says(
    client: DiLoCoClient, broker: ScriptedBroker, beside: Beside
) -> None:
    asking = beside(lambda: client.control("kick", worker="b"))
    broker.control, asked, _ = broker.hears_from(Control)
    assert (asked.action, asked.arguments) == ("kick", {"worker": "b"})
    broker.says(Result(asked.request, False, "There is no worker b."))
    assert asking() == Result(1, False, "There is no worker b.")


def test_unreachable_broker_is_named_with_its_address() -> None:
    probe = ScriptedBroker()
    probe.close()
    with DiLoCoClient(probe.address, timeout=0.2) as client, pytest.raises(Unreachable) as caught:
        client.status()
    assert probe.address in str(caught.value)


def test_action_that_nobody_waits_for_any_more_is_never_sent(beside: Beside) -> None:
    probe = ScriptedBroker()
    probe.close()
    with DiLoCoClient(probe.address, timeout=0.2) as client:
        with pytest.raises(Unreachable):
            client.control("shutdown")
        client.timeout = 20.0
        late = ScriptedBroker(probe.address)
        try:
            asking = beside(client.status)
            late.control, asked, _ = late.hears_from(Control)
            assert asked.action == "status"
            late.says(Result(asked.request, True, "", {}))
            asking()
        finally:
            late.close()


def test_broken_connection_ends_an_action_that_may_have_been_carried_out(
    client: DiLoCoClient, broker: ScriptedBroker, beside: Beside
) -> None:
    asking = beside(client.control, "shutdown")
    broker.hears(Control)
    broker.restart()
    with pytest.raises(Unreachable, match="may have been carried out"):
        asking()
    broker.hears_nothing_of(Control, 0.3)


def test_address_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match=r"tcp://10\.0\.0\.1:8512"):
        DiLoCoClient("10.0.0.1")
