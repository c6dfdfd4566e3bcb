"""The batch scripts of a run, from its settings. Pure: text in, text out.

They are short enough to be read. What they know of Slurm: preemption and `scancel --signal=TERM` reach
the processes of a job, not its script; `#SBATCH --signal=B:` reaches the script before the time is up;
a job that ends by itself while Slurm takes its nodes away is done, and not queued again, so the script
sees to that.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

BROKER, ISLANDS = "broker.sh", "islands.sh"
# A port for the processes of one island to meet at: beneath those that Linux hands out (32768 and up).
FIRST_PORT, PORTS = 20000, 10000
# Seconds that the script and Slurm may be apart in when the time is up.
APART_S = 30
# A broker that has run for so many seconds had begun well: its next failure is the first in a row.
BEGAN_WELL_S = 600
# Where the broker's job has ended and nobody has queued it again. Islands leave by themselves where the
# run is over; after so many seconds those are told that have not heard of it.
ENDED = "ended"
LEAVE_S = 30


@dataclass(frozen=True)
class SlurmRun:
    """What a run on Slurm is made from.

    Attributes:
        name: of the run; its jobs are NAME-broker and NAME-islands.
        folder: on the file system that all nodes share; absolute.
        start_in: where the script is started; absolute.
        python: the interpreter that has this package, on every node.
        command: what starts the training on each node of an island.
        islands, nodes: how many workers, and of how many nodes each.
        time: limit of each job, as Slurm writes it.
        grace: seconds between SIGTERM and the end of the time.
        restarts: of the broker or an island in its allocation, in a row, before it is queued again.
        requeues: how often a job that failed goes back. What Slurm takes away goes back always.
        serve: options of `diloco-broker serve`.
        sbatch, broker_sbatch: further options of sbatch.
    """

    name: str
    folder: Path
    start_in: Path
    python: str
    command: tuple[str, ...]
    islands: int
    nodes: int = 1
    time: str = "1-00:00:00"
    grace: int = 120
    restarts: int = 3
    requeues: int = 10
    serve: tuple[str, ...] = ()
    sbatch: tuple[str, ...] = ()
    broker_sbatch: tuple[str, ...] = ()

    @property
    def broker_job(self) -> str:
        return f"{self.name}-broker"

    @property
    def islands_job(self) -> str:
        return f"{self.name}-islands"

    @property
    def workers(self) -> list[str]:
        """Fixed names, whatever node an island is on."""
        return [f"island-{number}" for number in range(self.islands)]

    @property
    def address(self) -> str:
        return f"file://{self.folder}/address"

    @property
    def serve_options(self) -> list[str]:
        """All of them: those that the launcher gives come first, so that the user's count."""
        own = {
            "--workers": str(self.islands),
            "--keys": f"{self.folder}/keys",
            "--bind": "tcp://0.0.0.0:*",
            "--feed": "tcp://0.0.0.0:*",
            "--address-file": f"{self.folder}/address",
            "--save-dir": f"{self.folder}/broker",
        }
        return [word for pair in own.items() for word in pair] + list(self.serve)

    def as_plain(self) -> dict[str, Any]:
        """For a JSON file."""
        return asdict(self) | {"folder": str(self.folder), "start_in": str(self.start_in)}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> SlurmRun:
        """Raises KeyError, TypeError for what `as_plain` has not made."""
        values: dict[str, Any] = {
            field.name: tuple(value) if isinstance(value := plain[field.name], list) else value
            for field in fields(cls)
        }
        for name in ("folder", "start_in"):
            values[name] = Path(values[name])
        return cls(**values)


def _quoted(words: Iterable[str]) -> str:
    return shlex.join(words)


def _header(run: SlurmRun, job: str, log: str, *options: str, more: Sequence[str]) -> str:
    lines = [
        f"--job-name={job}",
        f"--chdir={shlex.quote(str(run.start_in))}",
        f"--output={shlex.quote(f'{run.folder}/logs/{log}')}",
        "--open-mode=append",
        f"--time={run.time}",
        "--requeue",
        f"--signal=B:TERM@{run.grace}",
        "--ntasks-per-node=1",
        *options,
        *more,
    ]
    return "\n".join(f"#SBATCH {line}" for line in lines)


# Waits for what was started last, and leaves its exit code in `code`.
_WAIT = """\
child=$!
trap 'scancel --signal=TERM "$job"' TERM  # the time is nearly up; srun itself would kill, not tell
wait "$child"; code=$?
while kill -0 "$child" 2>/dev/null; do wait "$child"; code=$?; done  # a signal ends a wait
trap '' TERM"""

_FUNCTIONS = """\
# The number of the first of an array means all of it.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}
say() { echo "$(date +%F\\ %T) $SLURM_JOB_NAME: $*"; }
field() { scontrol show job "$job" | grep -o -m 1 "$1=[^ ]*" | cut -d = -f 2; }

# Whether Slurm takes the nodes away: it has something more important to run, or the time is up.
has_to_leave() {
  [ -e "$folder/stop" ] && return 1
  case $(field PreemptTime) in [0-9]*) return 0 ;; esac
  end=$(date -d "$(field EndTime)" +%s 2>/dev/null) || return 1
  [ $((end - $(date +%s))) -le $((GRACE + APART)) ]
}

# Go back into the queue; Slurm ends this script meanwhile. Not what somebody has cancelled.
requeue() {
  [ "$(field JobState)" = RUNNING ] || finish "$code"
  say "goes back into the queue, $1"
  trap 'exit "$code"' TERM  # Slurm's, at once; else it would wait, and then kill
  scontrol requeue "$job" && { sleep 60 & wait; }
  finish "$code"
}

# After a failure: not for ever.
requeue_if_allowed() {
  [ "${SLURM_RESTART_COUNT:-0}" -lt REQUEUES ] && requeue "having ended with code $code"
  say "ended with code $code, and has been queued again often enough"
  finish "$code"
}"""


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _functions(run: SlurmRun) -> str:
    values = {"GRACE": run.grace, "APART": APART_S, "REQUEUES": run.requeues}
    text = _FUNCTIONS
    for name, value in values.items():
        text = text.replace(name, str(value))
    return text


def broker_script(run: SlurmRun) -> str:
    """The job of the broker."""
    header = _header(run, run.broker_job, "broker.log", "--nodes=1", more=run.broker_sbatch)
    serve = _quoted([run.python, "-m", "diloco_broker", "serve", *run.serve_options])
    return f"""\
#!/bin/bash
# The broker of the run {run.name}. Written by `diloco-launch slurm`, which writes it anew.
{header}
folder={shlex.quote(str(run.folder))}
# The end of this job. The islands need not wait for a broker.
finish() {{ echo "$1" > "$folder/{ENDED}"; exit "$1"; }}
{_functions(run)}

rm -f "$folder/{ENDED}"
failures=0
while :; do
  began=$SECONDS
  srun --nodes=1 --ntasks=1 {serve} &
{_indented(_WAIT)}

  case $code in
    2 | 126 | 127) finish "$code" ;;  # called wrongly
    3) finish 0 ;;  # the run is over: diloco-broker shutdown
  esac
  has_to_leave && requeue "since Slurm takes its node"
  [ "$code" = 0 ] && finish 0  # the run has come to its end, or was stopped
  [ -e "$folder/stop" ] && finish "$code"
  [ $((SECONDS - began)) -ge {BEGAN_WELL_S} ] && failures=0  # it had begun well
  failures=$((failures + 1))
  [ "$failures" -gt {run.restarts} ] && requeue_if_allowed
  say "the broker ended with code $code; restart $failures of {run.restarts}"
  sleep 1
done
"""


def islands_script(run: SlurmRun) -> str:
    """The array of jobs, one for each island. They know nothing of each other."""
    nodes = f"--nodes={run.nodes}"
    array = f"--array=0-{run.islands - 1}"
    header = _header(run, run.islands_job, "island-%a.log", nodes, array, more=run.sbatch)
    worker = [run.python, "-m", "diloco_worker", "run", "--over-is-success"]
    worker += ["--restarts", str(run.restarts), "--"]
    srun = ["srun", f"--nodes={run.nodes}", f"--ntasks={run.nodes}", "--ntasks-per-node=1"]
    srun += ["--kill-on-bad-exit=1", "--label"]
    return f"""\
#!/bin/bash
# The islands of the run {run.name}, a job each. Written by `diloco-launch slurm`, which writes it anew.
{header}
folder={shlex.quote(str(run.folder))}
finish() {{ exit "$1"; }}
{_functions(run)}

if [ -e "$folder/{ENDED}" ]; then
  say "there is nothing to do, since the broker's job has ended; diloco-launch slurm starts both again"
  exit 0
fi
# Who is cut off when the broker ends would wait for it until the time is up.
leave_with_the_broker() {{
  while sleep {LEAVE_S}; do
    [ -e "$folder/{ENDED}" ] || continue
    sleep {LEAVE_S}
    say "is told to save and to leave, since the broker's job has ended"
    scancel --signal=TERM "$job"
    return
  done
}}

export DILOCO_WORKER_ID=island-$SLURM_ARRAY_TASK_ID
export DILOCO_SERVER=file://$folder/address
export DILOCO_KEYS=$folder/keys/clients/worker-$DILOCO_WORKER_ID.key
export DILOCO_SHARD_INDEX=$SLURM_ARRAY_TASK_ID DILOCO_NUM_SHARDS={run.islands}
export DILOCO_END_FILE=$folder/ends/$DILOCO_WORKER_ID
# How the processes of torchrun find each other, and how their lines begin.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export PET_NNODES={run.nodes} PET_RDZV_BACKEND=c10d PET_RDZV_ID=$SLURM_JOB_ID
export PET_RDZV_ENDPOINT=$head:$(({FIRST_PORT} + SLURM_JOB_ID % {PORTS}))
export PET_TEE=3 TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="[$DILOCO_WORKER_ID rank \\${{rank}}]: "
[ -n "${{SLURM_CPUS_PER_TASK:-}}" ] && export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

say "$DILOCO_WORKER_ID begins on $SLURM_JOB_NODELIST, life $((${{SLURM_RESTART_COUNT:-0}} + 1))"
leave_with_the_broker &
watch=$!
{_quoted(worker)} \\
  {_quoted(srun)} {_quoted(run.command)} &
{_WAIT}
kill "$watch" 2>/dev/null

case $code in 2 | 126 | 127) exit "$code" ;; esac  # called wrongly
[ "$(cat "$DILOCO_END_FILE" 2>/dev/null)" = over ] && exit 0  # the run is
has_to_leave && requeue "since Slurm takes its nodes"
case $code in 0 | 130 | 143) exit 0 ;; esac  # it is done, or was asked to end
[ -e "$folder/stop" ] && exit "$code"
requeue_if_allowed
"""
