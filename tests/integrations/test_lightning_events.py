"""What the callback does at each event of Lightning's Trainer, in this process, at a real broker."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from diloco_broker import Broker
from diloco_protocol import UsageError
from diloco_protocol.clients.operator import Operator
from diloco_protocol.messages import Result
from diloco_worker.settings import say_once
from kit import tiny_task
from kit.integrations import needs
from kit.whole_run import PATIENCE_S, make_config

pytestmark = [pytest.mark.integration, needs("lightning"), pytest.mark.filterwarnings("default")]

H = 4
Fit = Callable[..., Any]


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker(make_config(workers=1, sync_every=H)) as made:
        yield made


@pytest.fixture
def callback(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes callbacks, which have left when the test ends."""
    from diloco_worker.lightning import DiLoCoCallback

    monkeypatch.delenv("DILOCO_SERVER", raising=False)
    made: list[Any] = []

    def make(server: str | None = broker.address) -> Any:
        made.append(DiLoCoCallback(server, worker_id="w", timeout=PATIENCE_S))
        return made[-1]

    yield make
    for each in made:
        if each.diloco is not None:
            each.diloco.close(failed=True)


def module_of(model: nn.Module | None = None, *, loss_of: Any = None, by_hand: bool = False) -> Any:
    """A LightningModule of the tiny task. `by_hand`: optimized manually, with two optimizers."""
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model or tiny_task.TinyModel()
            self.automatic_optimization = not by_hand

        def training_step(self, batch: dict[str, Tensor], number: int) -> Any:
            loss = self.model(**batch)["loss"]
            if loss_of is not None:
                loss = loss_of(loss, number)
            if by_hand:
                optimizers: Any = self.optimizers()
                for each in optimizers:
                    each.zero_grad()
                self.manual_backward(loss)
                for each in optimizers:
                    each.step()
                return {"loss": loss.detach()}
            return loss

        def configure_optimizers(self) -> Any:
            if not by_hand:
                return tiny_task.optimizer_of(self.model)
            layers: Any = self.model.layers
            return [torch.optim.SGD(layers[each].parameters(), lr=0.01) for each in (0, 2)]

    return Module()


@pytest.fixture
def trainer(tmp_path: Path) -> Callable[..., Any]:
    """A Trainer without displays and files of its own."""
    from lightning.pytorch import Trainer

    def make(*callbacks: Any, **options: Any) -> Any:
        quiet = dict.fromkeys(
            ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
        )
        given = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "log_every_n_steps": 1}
        return Trainer(
            callbacks=list(callbacks), default_root_dir=tmp_path, **{**quiet, **given, **options}
        )

    return make


def batches(count: int = 2 * H) -> Any:
    return DataLoader(tiny_task.Examples("w", count * tiny_task.BATCH), batch_size=tiny_task.BATCH)


def counted(callback: Any) -> tuple[int, int]:
    """Steps and rounds."""
    return callback.diloco.local_step, callback.diloco.sync_count


def test_two_optimizers_by_hand_are_one_step(callback: Fit, trainer: Fit) -> None:
    own = callback()
    made = trainer(own)
    made.fit(module_of(by_hand=True), batches(9))
    assert made.global_step == 18
    assert counted(own) == (9, 2)


@pytest.mark.parametrize(
    ("loss", "warns"),
    [("0.1234", False), (torch.ones(2), True), ({"task": 0.5}, True)],
    ids=["string", "vector", "dict"],
)
def test_a_loss_that_is_not_a_number_ends_no_training(
    callback: Fit, trainer: Fit, caplog: pytest.LogCaptureFixture, loss: Any, warns: bool
) -> None:
    from lightning.pytorch import Callback

    class ReplacesTheLoss(Callback):
        def on_train_batch_end(self, _: Any, __: Any, outputs: Any, *___: Any) -> None:
            outputs["loss"] = loss

    say_once.cache_clear()
    own = callback()
    trainer(ReplacesTheLoss(), own).fit(module_of(by_hand=True), batches(H))
    assert counted(own) == (H, 1)
    assert len([each for each in caplog.records if "gets no loss" in each.message]) == warns


def test_what_is_logged_reaches_the_loggers(callback: Fit, trainer: Fit, tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    made = trainer(callback(), logger=CSVLogger(tmp_path, name="log"))
    made.fit(module_of(), batches())
    (file,) = tmp_path.glob("log/*/metrics.csv")
    names, *lines = [line.split(",") for line in file.read_text().splitlines()]
    pushes = [float(line[names.index("diloco/pushes")]) for line in lines]
    assert pushes == [0] * (H - 1) + [1] * H + [2]
    assert {"diloco/round", "diloco/bytes_up", "diloco/seconds_waited"} <= set(names)


def test_the_trainer_stops_when_the_run_ends(callback: Fit, trainer: Fit, broker: Broker) -> None:
    from lightning.pytorch import Callback

    class EndsTheRun(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == H:
                broker.stop()

    made = trainer(callback(), EndsTheRun(), max_epochs=100)
    made.fit(module_of(), batches())
    assert H <= made.global_step < 100 * H


def test_the_trainer_saves_when_an_operator_asks(
    callback: Fit, trainer: Fit, broker: Broker, tmp_path: Path
) -> None:
    from lightning.pytorch import Callback
    from lightning.pytorch.callbacks import ModelCheckpoint

    asked: list[Result] = []
    with closing(Operator(broker.address)) as operator:

        class AsksToSave(Callback):
            def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
                if trainer.global_step == 1 and not asked:
                    asked.append(operator.ask("save_all"))

        keeper = ModelCheckpoint(tmp_path, every_n_train_steps=500)
        trainer(callback(), AsksToSave(), keeper, enable_checkpointing=True).fit(
            module_of(), batches()
        )
        reply = operator.ask("save_all", order=asked[0].data["order"])
    assert (reply.data["saved"], reply.data["waiting"]) == (("w",), ())
    (saved,) = tmp_path.glob("asked-step=*.ckpt")
    second = trainer(own := callback(), max_epochs=2)
    second.fit(module_of(), batches(), ckpt_path=saved, weights_only=True)
    assert own.diloco.local_step == second.global_step > H


def test_an_error_in_training_ends_the_stay(callback: Fit, trainer: Fit) -> None:
    def fails(loss: Tensor, number: int) -> Tensor:
        if number == 2:
            raise ZeroDivisionError
        return loss

    own, module = callback(), module_of(loss_of=fails)
    with pytest.raises(ZeroDivisionError):
        trainer(own).fit(module, batches())
    again = callback()
    trainer(again).fit(module_of(module.model), batches())  # the model is free again
    assert counted(again) == (2 * H, 2)


def test_sigterm_ends_the_training_as_lightning_has_it(callback: Fit, trainer: Fit) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def terminated(loss: Tensor, number: int) -> Tensor:
        if number == H + 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss

    own = callback()
    with pytest.raises(SystemExit):
        trainer(own).fit(module_of(loss_of=terminated), batches())
    assert counted(own) == (H + 2, 1)
    assert signal.getsignal(signal.SIGTERM) is before


def test_two_callbacks_are_refused(callback: Fit, trainer: Fit) -> None:
    class Derived(type(callback())):  # type: ignore[misc]
        pass

    with pytest.raises(
        RuntimeError, match="more than one stateful callback of type `DiLoCoCallback`"
    ):
        trainer(callback(), callback())  # Lightning's own sentence
    with pytest.raises(UsageError, match="two DiLoCoCallbacks; remove one"):
        trainer(callback(), Derived()).fit(module_of(), batches())


def test_strategies_that_cut_the_model_up_are_refused(callback: Fit, trainer: Fit) -> None:
    from lightning.pytorch.strategies import SingleDeviceStrategy

    class DeepSpeedStrategy(SingleDeviceStrategy):
        pass

    made = trainer(callback(), strategy=DeepSpeedStrategy("cpu"))
    with pytest.raises(UsageError, match="DeepSpeedStrategy"):
        made.fit(module_of(), batches())
