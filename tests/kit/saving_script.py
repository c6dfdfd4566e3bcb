"""A user's training script that saves when an operator asks: python saving_script.py STEPS"""

import sys
import threading

import torch

import diloco_worker
from diloco_worker import DiLoCoWorker


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with DiLoCoWorker(model, optimizer) as diloco:
        for step in range(int(sys.argv[1])):
            model(torch.randn(4, 8)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step}", flush=True)
            threading.Event().wait(0.01)  # stands for a slower machine
            if diloco.should_save:
                print("saves", flush=True)
                diloco.saved()
            if diloco.should_stop:
                break
    if diloco.should_stop:
        sys.exit(diloco_worker.RUN_IS_OVER)


if __name__ == "__main__":
    main()
