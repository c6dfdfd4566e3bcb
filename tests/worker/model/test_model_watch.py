"""Changes of a model during a run: a worker warns of those that the run does not follow, and of no
others.
"""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from diloco_protocol.messages import Heartbeat
from diloco_worker.model.model_watch import ModelWatch
from kit.core_harness import a_stage
from kit.scripted_broker import ScriptedBroker
from kit.scripted_training import H, ScriptedTraining

pytest_plugins = ("kit.worker_fixtures",)


class Net(nn.Module):
    """A frozen layer, a trained one, a tied head, and a BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.fc = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 3, bias=False)
        self.head.weight = self.fc.weight


def unfrozen(net: Net) -> None:
    net.frozen.requires_grad_(True)


def frozen(net: Net) -> None:
    net.fc.bias.requires_grad_(False)


def replaced(net: Net) -> None:
    net.norm = nn.BatchNorm1d(3)


def reshaped(net: Net) -> None:
    net.norm = nn.BatchNorm1d(4)


def wrapped(net: Net) -> None:
    """LoRA: the layer is inside another one, with trained parameters beside it."""
    layer = nn.ModuleDict({"base": net.fc.requires_grad_(False), "lora": nn.Linear(3, 3)})
    net.fc = layer  # type: ignore[assignment]


def narrowed(net: Net) -> None:
    net.norm.to(torch.bfloat16)


def untied(net: Net) -> None:
    net.head.weight = nn.Parameter(net.head.weight.detach().clone())


def grown(net: Net) -> None:
    net.adapter = nn.Linear(3, 3, bias=False)


CHANGES = [
    (unfrozen, ["frozen.weight is trained now", "frozen.bias is trained now"]),
    (frozen, ["fc.bias is frozen now"]),
    (replaced, ["norm.weight is another parameter", "norm.bias is another parameter"]),
    (reshaped, ["norm.weight is float32[4] instead of float32[3]"]),
    (wrapped, ["fc.lora.weight is new", "fc.weight is gone", "fc.bias is gone"]),
    (narrowed, ["norm.weight is bfloat16[3] instead of float32[3]"]),
    (untied, ["head.weight is another parameter", "fc.weight and head.weight are not tied"]),
    (grown, ["adapter.weight is new"]),
]


@pytest.mark.parametrize(("change", "clauses"), CHANGES)
def test_every_change_is_named_once(change: Callable[[Net], None], clauses: list[str]) -> None:
    net = Net()
    watch = ModelWatch(net)
    assert watch.look() is None
    change(net)
    said = watch.look()
    assert said is not None
    assert all(clause in said for clause in clauses), said
    assert watch.look() is None, "it is reported once"
    assert watch.problem == said, "and the problem persists"


def test_untied_memory_is_detected() -> None:
    net = Net()
    net.head.weight = nn.Parameter(torch.empty(3, 3))
    net.head.weight.data = net.fc.weight.data
    watch = ModelWatch(net)
    assert watch.look() is None
    net.head.weight.data = net.head.weight.data.clone()
    assert "fc.weight and head.weight are not tied any more" in str(watch.look())


def same_values_elsewhere(net: Net) -> None:
    for parameter in net.parameters():
        parameter.data = parameter.data.clone()


def new_buffers(net: Net) -> None:
    net.norm.running_mean = torch.ones(3)
    net.register_buffer("scratch", torch.ones(3), persistent=False)


def another_frozen_layer(net: Net) -> None:
    net.teacher = nn.Linear(3, 3).requires_grad_(False)


@pytest.mark.parametrize("change", [same_values_elsewhere, new_buffers, another_frozen_layer])
def test_harmless_changes_are_not_reported(change: Callable[[Net], None]) -> None:
    net = Net()
    watch = ModelWatch(net)
    change(net)
    assert (watch.look(), watch.problem) == (None, None)


def test_change_of_the_model_is_logged_once_at_the_next_boundary(
    training: ScriptedTraining, broker: ScriptedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    net = Net()
    worker = training.begins(net)
    unfrozen(net)
    for counter in (1, 2):
        training.trains(H)
        while (beat := broker.hears(Heartbeat)).step < H * counter:
            pass
        assert "frozen.weight is trained now" in str(beat.warning)
        push, _ = broker.takes_push()
        training.serves(5, counter, push)
        training.done()
    assert caplog.text.count("frozen.weight is trained now") == 1
    metrics = worker.sync_metrics
    assert "undo" in str(metrics.model_change)
    assert metrics.last_error == metrics.model_change
    assert "model_change" not in worker.state_dict()["metrics"]


@pytest.mark.parametrize("change", [reshaped, wrapped, narrowed])
def test_state_of_a_changed_model_has_no_parameters(
    change: Callable[[Net], None], training: ScriptedTraining, caplog: pytest.LogCaptureFixture
) -> None:
    net = Net()
    worker = training.begins(net)
    assert worker.state_dict()["resume"] is not None
    change(net)
    assert worker.state_dict()["resume"] is None
    assert "begins with the run's" in caplog.text


def test_warning_of_a_worker_is_in_the_feed_as_long_as_it_holds() -> None:
    stage = a_stage(1, 2)
    (a,) = stage.joined("a")

    def shown() -> object:
        return stage.shown()["workers"][0]["warning"]

    assert shown() is None
    for said in ("The model has changed.", "It has changed again.", "x" * 9999):
        a.sends(Heartbeat(a.token(), 5, warning=said))
    assert shown() == "x" * 300
    assert sum("warns" in line for line in stage.logs) == 1, "a peer cannot flood the log"
    a.sends(Heartbeat(a.token(), 6))
    assert shown() is None
