"""What DiLoCo is held against: one worker alone, and data-parallel training at equal tokens."""

from __future__ import annotations

import math

import torch

from diloco_lab.evidence.driver.training import Outcome, finite
from diloco_lab.evidence.driver.trial import MODELS, Trial
from diloco_tools.demo import model as gpt
from diloco_tools.demo.data import Text, batch_seed, training_batches


def train(trial: Trial, text: Text) -> Outcome:
    """One model on the batches of all its replicas: the mean of equally large batches' gradients is the
    gradient of them together. With one replica it is one worker alone.
    """
    model = gpt.build_model(trial.seed, MODELS[trial.model])
    optimizer = gpt.build_optimizer(model, trial.recipe)
    schedule = gpt.build_schedule(optimizer, trial.recipe)
    replicas = [
        training_batches(shard, trial.batch, trial.recipe.context, batch_seed(trial.seed, number))
        for number, shard in enumerate(text.shards)
    ]
    outcome = Outcome()
    outcome.curve.append((0, 0.0, gpt.validation_loss(model, *text.validation)))
    every = trial.every * trial.sync_every or trial.steps
    for step in range(1, trial.steps + 1):
        batches = [next(each) for each in replicas]
        tokens, targets = (torch.cat(part) for part in zip(*batches, strict=True))
        gpt.inner_step(model, optimizer, tokens, targets)
        schedule.step()
        if step % every == 0 or step == trial.steps:
            loss = gpt.validation_loss(model, *text.validation)
            outcome.curve.append((step, float(step), finite(loss)))
            if not math.isfinite(loss):
                break
    outcome.parameters = dict(model.state_dict())
    return outcome
