"""What the callback does at each event of Hugging Face's Trainer, in this process, at a real broker."""

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco_broker import Broker
from diloco_protocol import UsageError
from diloco_protocol.clients.operator import Operator
from diloco_protocol.messages import Result
from diloco_worker import WorkerOptions
from kit import tiny_task
from kit.integrations import needs
from kit.sites import assert_same
from kit.whole_run import PATIENCE_S, make_config

pytestmark = [
    pytest.mark.integration,
    needs("transformers", "accelerate"),
    pytest.mark.filterwarnings("default"),
]

H = 4
MakeTrainer = Callable[..., Any]


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker(make_config(workers=1, sync_every=H)) as made:
        yield made


@pytest.fixture
def trainer(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakeTrainer]:
    """Makes Trainers of the tiny task; their callbacks are closed at once after the test."""
    from transformers import Trainer, TrainingArguments

    from diloco_worker.transformers import DiLoCoCallback

    monkeypatch.delenv("DILOCO_SERVER", raising=False)
    callbacks: list[Any] = []

    def make(*others: Any, own: Any = None, model: Any = None, **arguments: Any) -> Any:
        made = own or DiLoCoCallback(broker.address, worker_id="w", timeout=PATIENCE_S)
        callbacks.append(made)
        options: dict[str, Any] = {
            "output_dir": str(tmp_path / "out"),
            "per_device_train_batch_size": tiny_task.BATCH,
            "max_steps": 2 * H,
            "logging_steps": 1,
            "save_strategy": "no",
            "use_cpu": True,
            "report_to": "none",
            "disable_tqdm": True,
        }
        return Trainer(
            model or tiny_task.TinyModel(),
            TrainingArguments(**options | arguments),
            train_dataset=tiny_task.Examples("w"),
            eval_dataset=tiny_task.Examples("eval", 16),
            callbacks=[made, *others],
        )

    yield make
    for each in callbacks:
        if each.diloco is not None:
            each.diloco.close(failed=True)


def hook_of(trainer: Any) -> Any:
    from diloco_worker.transformers import DiLoCoCallback

    return trainer.pop_callback(DiLoCoCallback).diloco


def test_without_a_server_the_trainer_trains_alone(trainer: MakeTrainer, tmp_path: Path) -> None:
    from diloco_worker.transformers import DiLoCoCallback

    alone = trainer(own=DiLoCoCallback(), save_strategy="steps", save_steps=H)
    alone.train()
    assert alone.state.global_step == 2 * H
    assert not [key for log in alone.state.log_history for key in log if key.startswith("diloco")]
    assert not list(tmp_path.rglob("diloco.pt"))


def test_optimizer_steps_are_counted_and_not_batches(trainer: MakeTrainer) -> None:
    made = trainer(gradient_accumulation_steps=3, max_steps=5, per_device_train_batch_size=4)
    made.train()
    diloco = hook_of(made)
    assert (diloco.local_step, diloco.sync_count) == (5, 1)


def test_the_best_model_stays_as_it_was_loaded_while_pushes_in_flight_are_waited_for(
    trainer: MakeTrainer, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    from diloco_worker.transformers import DiLoCoCallback

    fragments = make_config(workers=1, sync_every=H, num_fragments=2, fragment_sync_delay=1)
    with Broker(fragments) as broker:
        own = DiLoCoCallback(broker.address, worker_id="w", timeout=PATIENCE_S)
        saves = {"save_strategy": "steps", "save_steps": H // 2, "eval_steps": H // 2}
        made = trainer(own=own, eval_strategy="steps", load_best_model_at_end=True, **saves)
        made.train()
    assert own.diloco is not None and own.diloco.sync_count == 4, "all pushes were waited for"
    best = load_file(Path(made.state.best_model_checkpoint, "model.safetensors"))
    assert_same(made.model.state_dict(), best)


@pytest.mark.parametrize("shard_data", [True, False])
def test_workers_of_one_script_read_other_batches(
    trainer: MakeTrainer, broker: Broker, monkeypatch: pytest.MonkeyPatch, shard_data: bool
) -> None:
    from diloco_worker.transformers import DiLoCoCallback

    def batches(index: int) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []

        class Looks(tiny_task.TinyModel):
            def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
                seen.append(x.clone())
                return super().forward(x, labels)

        monkeypatch.setenv("DILOCO_SHARD_INDEX", str(index))
        monkeypatch.setenv("DILOCO_NUM_SHARDS", "2")
        own = DiLoCoCallback(
            broker.address, worker_id=f"w{index}", timeout=PATIENCE_S, shard_data=shard_data
        )
        trainer(own=own, model=Looks(), max_steps=H).train()
        return seen

    same = [torch.equal(*each) for each in zip(batches(0), batches(1), strict=True)]
    assert not any(same) if shard_data else all(same)


def test_what_is_logged_reaches_those_that_report(trainer: MakeTrainer) -> None:
    from transformers import TrainerCallback

    class Reporter(TrainerCallback):
        def __init__(self) -> None:
            self.heard: list[dict[str, Any]] = []

        def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
            self.heard.append(dict(logs))

    made = trainer()
    reporter = Reporter()
    made.callback_handler.callbacks.insert(1, reporter)  # where those of report_to stand
    made.train()
    pushes = [log["diloco/pushes"] for log in reporter.heard if "loss" in log]
    assert pushes == [0] * (H - 1) + [1] * H + [2]
    assert {"diloco/round", "diloco/bytes_up", "diloco/seconds_waited"} <= set(reporter.heard[0])
    assert made.state.log_history[-1]["diloco/pushes"] == 2


def test_stops_and_saves_at_the_end(trainer: MakeTrainer, broker: Broker, tmp_path: Path) -> None:
    from transformers import TrainerCallback

    class EndsTheRun(TrainerCallback):
        def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if state.global_step == H:
                broker.stop()

    made = trainer(EndsTheRun(), max_steps=1000, save_strategy="steps", save_steps=500)
    made.train()
    step = made.state.global_step
    assert H <= step < 1000
    assert (tmp_path / "out" / f"checkpoint-{step}" / "diloco.pt").exists()


def test_saves_when_an_operator_asks(trainer: MakeTrainer, broker: Broker, tmp_path: Path) -> None:
    from transformers import TrainerCallback

    asked: list[Result] = []
    with closing(Operator(broker.address)) as operator:

        class AsksToSave(TrainerCallback):
            def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
                if state.global_step == 1:
                    asked.append(operator.ask("save_all"))

        trainer(AsksToSave(), save_strategy="steps", save_steps=500).train()
        reply = operator.ask("save_all", order=asked[0].data["order"])
    assert asked[0].data["waiting"] == ("w",)
    assert (reply.data["saved"], reply.data["waiting"]) == (("w",), ())
    saved = {int(each.parent.name.split("-")[1]) for each in tmp_path.glob("out/*/diloco.pt")}
    assert len(saved - {2 * H}) == 1, "besides the one that every Trainer makes at its end"


@pytest.mark.parametrize("keeps_callbacks", [False, True])
def test_it_resumes_where_the_checkpoint_was_even_in_another_folder(
    trainer: MakeTrainer, tmp_path: Path, keeps_callbacks: bool
) -> None:
    saves = {"save_strategy": "steps", "save_steps": H + 1}
    first = trainer(max_steps=H + 1, **saves)
    first.train()
    state = tmp_path / "out" / f"checkpoint-{H + 1}" / "trainer_state.json"
    assert "DiLoCoCallback" in json.loads(state.read_text())["stateful_callbacks"]
    second = trainer(
        output_dir=str(tmp_path / "other"), restore_callback_states_from_checkpoint=keeps_callbacks
    )
    second.train(resume_from_checkpoint=str(state.parent))
    diloco = hook_of(second)
    assert (diloco.local_step, diloco.sync_count) == (2 * H, 2)


def test_keywords_are_checked_at_once_and_kept_in_the_checkpoint_as_plain_values() -> None:
    from diloco_worker.transformers import DiLoCoCallback

    options = WorkerOptions(audit=Path("a.jsonl"), dylu=False)
    own = DiLoCoCallback("tcp://10.0.0.1:8512", expect={"mode": "sync"}, options=options)
    kept = json.loads(json.dumps(own.state()))
    assert kept["args"]["options"] == {"audit": "a.jsonl", "dylu": False}
    assert DiLoCoCallback(**kept["args"]).state() == own.state()
    with pytest.raises(UsageError, match="did you mean sync_every"):
        DiLoCoCallback(sync_evry=3)
    with pytest.warns(DeprecationWarning, match="pin_memory"):
        moved = DiLoCoCallback(pin_memory=False)
    assert moved.state()["args"]["options"] == {"pin_memory": False}


def test_evaluates_global_parameters(trainer: MakeTrainer, broker: Broker, tmp_path: Path) -> None:
    from diloco_worker.transformers import DiLoCoCallback

    seen: list[dict[str, torch.Tensor]] = []

    class Looks(tiny_task.TinyModel):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            if not self.training:
                seen.append({k: v.detach().clone() for k, v in self.named_parameters()})
            return super().forward(x, labels)

    own = DiLoCoCallback(broker.address, worker_id="w", timeout=PATIENCE_S, evaluate_global=True)
    begun = {k: v.clone() for k, v in tiny_task.TinyModel().named_parameters()}
    saves: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    made = trainer(
        own=own, model=Looks(), max_steps=H - 1, eval_strategy="steps", eval_steps=2, **saves
    )
    plain = trainer(
        model=tiny_task.TinyModel(), output_dir=str(tmp_path / "plain"), max_steps=H - 1, **saves
    )
    made.train()
    assert seen
    for parameters in seen:
        assert_same(parameters, begun)  # no round has been made
    assert own.diloco is not None
    plain.train()
    assert_same(made.model.state_dict(), plain.model.state_dict())  # training went on from there
    from safetensors.torch import load_file

    saved, wanted = (
        load_file(tmp_path / name / "checkpoint-2" / "model.safetensors")
        for name in ("out", "plain")
    )
    assert_same(saved, wanted)  # the local parameters are saved


def test_processes_of_a_launcher_that_do_not_train_together_are_refused(
    trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an accelerator and without `use_cpu` a Trainer does not look at torchrun's variables."""
    made = trainer()
    assert made.args.world_size == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="2 processes"):
        made.train()


def test_two_callbacks_are_one_too_many(trainer: MakeTrainer, broker: Broker) -> None:
    from diloco_worker.transformers import DiLoCoCallback

    with pytest.raises(UsageError, match="two DiLoCoCallbacks; remove one"):
        trainer(DiLoCoCallback(broker.address)).train()


def test_a_training_that_broke_off_is_no_obstacle_to_the_next(trainer: MakeTrainer) -> None:
    from transformers import TrainerCallback

    class Breaks(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("out of luck")

    model = tiny_task.TinyModel()
    with pytest.raises(RuntimeError, match="luck"):
        trainer(Breaks(), model=model).train()
    again = trainer(model=model)
    again.train()
    assert hook_of(again).sync_count == 2
