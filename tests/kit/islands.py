"""Workers of several processes, as a launcher starts them: a model that is spread in one of many ways.

Every kind trains the same model on the same batches, so each is to come to what a plain one comes to.
"""

import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.optim import Optimizer

from diloco_worker import DiLoCoWorker, WorkerOptions
from diloco_worker.group import beginning, ports
from diloco_worker.group.ports import FollowerPorts, LeaderPorts
from diloco_worker.model.spread.ranks import Ranks
from diloco_worker.model.spread.spread_tensors import SpreadTensors
from kit.process_kit import PATIENCE_S, Child, Processes, a_free_address

WORDS, WIDTH = 40, 32
ENDS_WITHIN_S = 3 * PATIENCE_S  # a whole run of it, from the first import on


class Language(nn.Module):
    """Four blocks between a table of words and a head that is tied to it; 18,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.steps: Tensor
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        found: Tensor = self.head(self.norm(x))
        return found


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.down = nn.Linear(2 * WIDTH + 1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(torch.tanh(self.up(x)))
        return found


class EvenBlock(Block):
    """One that tensor parallelism can divide by two."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)


def language(*, is_even: bool = False) -> Language:
    """The same values each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Language()
        if is_even:
            model.layers = nn.ModuleList(EvenBlock() for _ in range(4))
        return model


class Stage(nn.Module):
    """Half of the model, as the stages of an interleaved pipeline have it."""

    def __init__(self, whole: Language, rank: int) -> None:
        super().__init__()
        if rank == 0:
            self.embed = whole.embed
        self.layers = nn.ModuleDict({str(i): whole.layers[i] for i in (rank, rank + 2)})
        if rank == 1:
            self.norm, self.head = whole.norm, whole.head
            self.register_buffer("steps", whole.steps)


def spread(kind: str, model: Language) -> tuple[nn.Module, nn.Module, Any, Sequence[Sequence[str]]]:
    """What the worker is made of, what is called, its process_group, and `tied`."""
    from torch.distributed.fsdp import fully_shard  # it takes a second
    from torch.distributed.tensor import parallel

    dist.init_process_group("gloo")
    count = dist.get_world_size()
    match kind:
        case "ddp":
            return model, nn.parallel.DistributedDataParallel(model), "world", ()
        case "fsdp":
            mesh = init_device_mesh("cpu", (count,))
            for layer in model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            return model, model, mesh, ()
        case "tp" | "fsdp-tp":
            mesh = init_device_mesh("cpu", (count // 2, 2), mesh_dim_names=("dp", "tp"))
            for layer in model.layers:
                plan = {"up": parallel.ColwiseParallel(), "down": parallel.RowwiseParallel()}
                parallel.parallelize_module(layer, mesh["tp"], plan)
                if kind == "fsdp-tp":
                    fully_shard(layer, mesh=mesh["dp"])
            if kind == "fsdp-tp":
                fully_shard(model, mesh=mesh["dp"])
            return model, model, mesh, ()
        case "pipeline":
            stage = Stage(model, dist.get_rank())
            return stage, stage, dist.group.WORLD, (("embed.weight", "head.weight"),)
    raise ValueError(kind)


def gradients_of_a_pipeline(stage: nn.Module, step: int) -> None:
    """What a schedule would leave: the gradients of the whole model, here of a rule by names."""
    for name, parameter in stage.named_parameters():
        first = name.replace("head.weight", "embed.weight")
        parameter.grad = torch.full_like(
            parameter, 1e-3 * (sum(first.encode()) % 7 - 3) * (step % 5)
        )


def train_island(
    kind: str, address: str, worker_id: str, out: str, options: dict[str, Any]
) -> None:
    """A training script: until the run is over, or for `steps` steps.

    `options`: `steps`; `even` (the model that tensor parallelism divides); `rule` (the gradients of a
    pipeline, for a plain worker, too); `dies_in` and `dies_as` (a phase, and the rank that is killed in
    it); `pause` (seconds behind each step); `differs` (the processes ask for different things); `late`
    (the others leave when the leader has left); `alone` (what the process of this rank calls alone).
    """
    forbid_words_while_leaving()
    model = language(is_even=bool(options.get("even")))
    rank = int(os.environ.get("RANK", "0"))
    group, tied, called, given = None, (), model, model
    if kind != "plain":
        given, called, group, tied = spread(kind, model)  # type: ignore[assignment]
    optimizer = torch.optim.SGD(given.parameters(), lr=0.05, momentum=0.5)
    if options.get("dies_in"):
        ports.POLL_EVERY_S = 3600.0  # a leader notices at once that it is left
    if options.get("dies_as") == rank and not Path(f"{out}.died").exists():
        die_in(options["dies_in"], Path(f"{out}.died"))
    made = DiLoCoWorker(
        given,
        optimizer,
        server=address,
        worker_id=worker_id,
        process_group=group,
        options=WorkerOptions(tied=tied),
        sync_every=2 if options.get("differs") and rank else None,
    )
    with made as diloco:
        step = 0
        while step < options.get("steps", 100_000) and not diloco.should_stop:
            if options.get("rule"):
                gradients_of_a_pipeline(given, step)
                loss = torch.zeros(())
            else:
                loss = loss_and_gradients(called, optimizer, worker_id, step)
            optimizer.step()
            model.steps.add_(1)
            diloco.report(loss=loss, tokens=8)
            step += 1
            print(f"step {step}", flush=True)
            if step == 4 and options.get("alone", ("", None))[1] == rank:
                beginning.LOG_AFTER_S = 0.5
                call_alone(diloco, options["alone"][0])
            threading.Event().wait(options.get("pause", 0.0))  # a slower machine
        if options.get("late") and rank:
            assert diloco._link is not None
            diloco._link.wait_for(lambda: False, PATIENCE_S)
            assert diloco._link.has_ended, "the leader does not wait for the others"
    torch.save({"steps": step, "rounds": diloco.sync_count, "stop": diloco.stop_reason}, out)
    print("done", flush=True)


def call_alone(diloco: DiLoCoWorker, name: str) -> None:
    """What all processes have to call."""
    if name == "global_parameters":
        with diloco.global_parameters():
            return
    getattr(diloco, name)()


def forbid_words_while_leaving() -> None:
    """The others do not listen to the group any more; messages there may never be read."""
    leave = LeaderPorts.leave

    def refuse(*_: Any) -> None:
        raise AssertionError("a message over the group while the leader leaves")

    def leave_in_silence(self: LeaderPorts, *, hasty: bool) -> None:
        for name in ("broadcast", "gather", "total"):
            setattr(Ranks, name, refuse)
        leave(self, hasty=hasty)

    LeaderPorts.leave = leave_in_silence  # type: ignore[method-assign]


def a_batch(worker_id: str, step: int) -> Tensor:
    seed = 1000 * sum(worker_id.encode()) + step
    return torch.randint(WORDS, (4, 6), generator=torch.Generator().manual_seed(seed))


def loss_and_gradients(
    called: nn.Module, optimizer: Optimizer, worker_id: str, step: int
) -> Tensor:
    words = a_batch(worker_id, step)
    loss = functional.cross_entropy(called(words).flatten(0, 1), words.flatten())
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    return loss


def die_in(phase: str, mark: Path) -> None:
    """This process is killed where it does that for the third time."""
    leads = os.environ["RANK"] == "0"
    target: tuple[type, str] = {
        "freezing": (SpreadTensors, "delta"),
        "merging": (SpreadTensors, "bring_in"),
        "waiting": (LeaderPorts if leads else FollowerPorts, "wait"),
    }[phase]
    owner, name = target
    inner = getattr(owner, name)
    calls = 0

    def counted(self: Any, *arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(self, *arguments, **named)

    setattr(owner, name, counted)


class Island:
    """The processes of one worker; made again they are its next incarnation."""

    def __init__(  # noqa: PLR0917
        self,
        processes: Processes,
        folder: Path,
        kind: str,
        count: int,
        address: str,
        name: str,
        script: Callable[..., None] = train_island,
        **options: Any,
    ) -> None:
        self._processes = processes
        self._arguments = (kind, address, name)
        self._options = options
        self._count = count if kind != "plain" else 1
        self.name = name
        self.folder = folder
        self.ranks: list[Child] = []
        self._script = script
        self.start()

    def go_on(self, kind: str, count: int, **options: Any) -> None:
        """Its next incarnation, of another kind."""
        self._arguments = (kind, *self._arguments[1:])
        self._count = count
        self._options = {**self._options, **options}
        self.start(RESUMED="1")

    def start(self, **env: str) -> None:
        port = a_free_address().rpartition(":")[2]
        self.ranks = [
            self._processes.start(
                self._script,
                *self._arguments,
                str(self.out(rank)),
                self._options,
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(self._count),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
                **env,
            )
            for rank in range(self._count)
        ]

    def out(self, rank: int) -> Path:
        return self.folder / f"{self.name}.{rank}"

    def ends(self) -> list[int]:
        return [each.ends(ENDS_WITHIN_S) for each in self.ranks]

    def ends_well(self) -> None:
        assert not any(self.ends()), "\n".join(each.output for each in self.ranks)

    def kill(self) -> None:
        for each in self.ranks:
            if each.process.is_alive():
                each.kill()

    def results(self) -> list[dict[str, Any]]:
        return [torch.load(self.out(rank), weights_only=True) for rank in range(self._count)]
