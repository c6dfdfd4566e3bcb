"""Train a small GPT on text: an ordinary training script, plus the lines that attach DiLoCo.

    python -m diloco_tools.demo.train --log alone.jsonl                              # trains alone
    python -m diloco_tools.demo.train --log a.jsonl --server tcp://127.0.0.1:8512    # one DiLoCo worker

Without a server the hook does nothing, so the same script trains the single-worker baseline.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from diloco_tools.demo import model as gpt
from diloco_tools.demo.data import DataError, batch_seed, load_text, training_batches
from diloco_worker import DiLoCoWorker

LOG_EVERY = 5  # steps


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level GPT, alone or with DiLoCo.")
    parser.add_argument("--log", type=Path, required=True, help="write JSON lines to this file")
    parser.add_argument("--server", help="address of the broker; none trains alone")
    parser.add_argument("--worker-id", help="name shown by the broker")
    parser.add_argument("--data", type=Path, help="text file or folder; default: Python's library")
    parser.add_argument("--shard", type=int, default=0, help="which part of the text, from 0")
    parser.add_argument("--shards", type=int, default=1, help="number of parts")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=64, help="bytes the model sees at once")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate of AdamW")
    parser.add_argument("--schedule", choices=["cosine", "constant"], default="cosine")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval-every", type=int, default=0, help="steps between validations")
    return parser.parse_args()


def train(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)  # several of these share one machine
    recipe = gpt.Recipe(
        arguments.steps, arguments.batch, arguments.context, arguments.lr, arguments.schedule
    )
    shard, shards = arguments.shard, arguments.shards
    if not 0 <= shard < shards:
        raise DataError(f"--shard must be between 0 and {shards - 1}, got {shard}")
    text = load_text(arguments.data, shards, recipe.context)
    seed = batch_seed(arguments.seed, shard)
    batches = training_batches(text.shards[shard], recipe.batch, recipe.context, seed)
    model = gpt.build_model(arguments.seed, gpt.GPTConfig(context=recipe.context))
    optimizer = gpt.build_optimizer(model, recipe)
    schedule = gpt.build_schedule(optimizer, recipe)

    step = 0
    seconds = 0.0  # of training and synchronising, without validation
    with (
        arguments.log.open("w", encoding="utf-8", buffering=1) as log,
        DiLoCoWorker(
            model, optimizer, server=arguments.server, worker_id=arguments.worker_id
        ) as diloco,
    ):
        started = time.perf_counter()
        for step, (tokens, targets) in zip(range(1, recipe.steps + 1), batches, strict=False):
            loss = gpt.inner_step(model, [optimizer], tokens, targets)
            schedule.step()
            diloco.report(loss=loss, tokens=tokens.numel())
            last = step == recipe.steps or diloco.should_stop
            validate = arguments.eval_every and (step % arguments.eval_every == 0 or last)
            if step % LOG_EVERY == 0 or validate or last:
                seconds += time.perf_counter() - started
                record = {"step": step, "loss": loss.item(), "seconds": round(seconds, 3)}
                if validate:
                    record["val_loss"] = gpt.validation_loss(model, *text.validation)
                log.write(json.dumps(record) + "\n")
                started = time.perf_counter()
            if last:
                break
    metrics = dict(diloco.sync_metrics)
    with arguments.log.open("a", encoding="utf-8") as log:
        done = {"done": True, "step": step, "seconds": round(seconds, 3), "sync_metrics": metrics}
        log.write(json.dumps(done, default=str) + "\n")


def main() -> None:
    try:
        train(parse_arguments())
    except DataError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
