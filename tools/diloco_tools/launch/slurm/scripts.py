"""The batch scripts of a run, from its settings. Pure: text in, text out.

They rely on these properties of Slurm: preemption and `scancel --signal=TERM` signal the processes of a
job, not its script; `#SBATCH --signal=B:` signals the script before the time limit; a job that exits by
itself while it is preempted counts as completed and is not requeued, so the script requeues it.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from diloco_tools.options import matching, option

BROKER, ISLANDS = "broker.sh", "islands.sh"
# Rendezvous ports of islands: below the ephemeral ports of Linux (32768 and up).
FIRST_PORT, PORTS = 20000, 10000
# Seconds by which the script and Slurm may disagree about the time limit.
APART_S = 30
# After this many seconds without a failure the broker's next failure is the first in a row.
BEGAN_WELL_S = 600
# A file that exists once the broker's job has ended for good. Islands leave by themselves when the run
# is over; LEAVE_S seconds later the script sends SIGTERM to those that are still running.
ENDED = "ended"
LEAVE_S = 30


_name = matching(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}", "letters, digits, dots, dashes, at most 40")
# Of Slurm: minutes, or days-hours:minutes:seconds and its short forms.
_time = matching(
    r"(?i)\d+|\d+:\d\d(:\d\d)?|\d+-\d\d?(:\d\d){0,2}|UNLIMITED|INFINITE",
    "a time such as 90 (minutes), 12:00:00 or 2-00:00:00",
)


@dataclass(frozen=True)
class SlurmRun:
    """A run on Slurm. Fields declared as options are those of `diloco-launch slurm start`.

    Attributes:
        folder: on the file system that all nodes share; absolute.
        start_in: where the script is started; absolute.
        python: the interpreter that has this package, on every node.
        command: starts the training on each node of an island.
        serve: options of `diloco-broker serve`.
        sbatch, broker_sbatch: further options of sbatch.
    """

    folder: Path
    start_in: Path
    python: str
    command: tuple[str, ...]
    islands: int
    serve: tuple[str, ...] = ()
    sbatch: tuple[str, ...] = ()
    broker_sbatch: tuple[str, ...] = ()
    name: str = option(
        "diloco", "Name of the run; its jobs are NAME-broker and NAME-islands.", parse=_name
    )
    nodes: int = option(1, "Nodes of each worker.", "--nodes-per-island", min=1)
    time: str = option(
        "1-00:00:00", "Limit of a job. An island whose time is up is queued again.", parse=_time
    )
    grace: int = option(120, "Seconds between SIGTERM and the time limit.", min=1, max=3600)
    restarts: int = option(
        3, "Consecutive restarts of a job in its allocation, before it is queued again.", min=0
    )
    requeues: int = option(
        10, "How often a job that failed is queued again; a preempted job always is.", min=0
    )

    @property
    def broker_job(self) -> str:
        return f"{self.name}-broker"

    @property
    def islands_job(self) -> str:
        return f"{self.name}-islands"

    @property
    def workers(self) -> list[str]:
        """Fixed names, independent of the node."""
        return [f"island-{number}" for number in range(self.islands)]

    @property
    def address(self) -> str:
        return f"file://{self.folder}/address"

    @property
    def serve_options(self) -> list[str]:
        """The launcher's options, then the user's, which override them."""
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
        """Raises KeyError or TypeError for anything that `as_plain` did not make."""
        values: dict[str, Any] = {
            field.name: tuple(value) if isinstance(value := plain[field.name], list) else value
            for field in fields(cls)
        }
        for name in ("folder", "start_in"):
            values[name] = Path(values[name])
        return cls(**values)


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


# Waits for the last background process, and leaves its exit code in `code`.
_WAIT = """\
child=$!
trap 'scancel --signal=TERM "$job"' TERM  # the time is nearly up; srun itself would kill
wait "$child"; code=$?
while kill -0 "$child" 2>/dev/null; do wait "$child"; code=$?; done  # a signal ends a wait
trap '' TERM"""

_FUNCTIONS = """\
# The job number of an array's first element would mean the whole array.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}
say() { echo "$(date +%F\\ %T) $SLURM_JOB_NAME: $*"; }
field() { scontrol show job "$job" | grep -o -m 1 "$1=[^ ]*" | cut -d = -f 2; }

# Whether the job is preempted, or its time is up.
has_to_leave() {
  [ -e "$folder/stop" ] && return 1
  case $(field PreemptTime) in [0-9]*) return 0 ;; esac
  end=$(date -d "$(field EndTime)" +%s 2>/dev/null) || return 1
  [ $((end - $(date +%s))) -le $((GRACE + APART)) ]
}

# Requeue the job, unless it was cancelled; Slurm ends this script meanwhile.
requeue() {
  [ "$(field JobState)" = RUNNING ] || finish "$code"
  say "goes back into the queue, $1"
  trap 'exit "$code"' TERM  # exit at once, or Slurm would wait and then kill us
  scontrol requeue "$job" && { sleep 60 & wait; }
  finish "$code"
}

# After a failure, at most REQUEUES times.
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
    serve = shlex.join([run.python, "-m", "diloco_broker", "serve", *run.serve_options])
    return f"""\
#!/bin/bash
# The broker of the run {run.name}. Written by `diloco-launch slurm`, which writes it anew.
{header}
folder={shlex.quote(str(run.folder))}
# The end of this job: the islands stop waiting for a broker.
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
  [ "$code" = 0 ] && finish 0  # the run has ended or was stopped
  [ -e "$folder/stop" ] && finish "$code"
  [ $((SECONDS - began)) -ge {BEGAN_WELL_S} ] && failures=0
  failures=$((failures + 1))
  [ "$failures" -gt {run.restarts} ] && requeue_if_allowed
  say "the broker ended with code $code; restart $failures of {run.restarts}"
  sleep 1
done
"""


def islands_script(run: SlurmRun) -> str:
    """The array of jobs, one for each island. They are independent of each other."""
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
  say "nothing to do: the broker's job has ended; diloco-launch slurm starts both again"
  exit 0
fi
# An island that misses the end of the broker would wait for it until its time is up.
leave_with_the_broker() {{
  while sleep {LEAVE_S}; do
    [ -e "$folder/{ENDED}" ] || continue
    sleep {LEAVE_S}
    say "saves and leaves, since the broker's job has ended"
    scancel --signal=TERM "$job"
    return
  done
}}

export DILOCO_WORKER_ID=island-$SLURM_ARRAY_TASK_ID
export DILOCO_SERVER=file://$folder/address
export DILOCO_KEYS=$folder/keys/clients/worker-$DILOCO_WORKER_ID.key
export DILOCO_SHARD_INDEX=$SLURM_ARRAY_TASK_ID DILOCO_NUM_SHARDS={run.islands}
export DILOCO_END_FILE=$folder/ends/$DILOCO_WORKER_ID
# The rendezvous of torchrun, and the prefix of its log lines.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export PET_NNODES={run.nodes} PET_RDZV_BACKEND=c10d PET_RDZV_ID=$SLURM_JOB_ID
export PET_RDZV_ENDPOINT=$head:$(({FIRST_PORT} + SLURM_JOB_ID % {PORTS}))
export PET_TEE=3 TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="[$DILOCO_WORKER_ID rank \\${{rank}}]: "
[ -n "${{SLURM_CPUS_PER_TASK:-}}" ] && export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

say "$DILOCO_WORKER_ID begins on $SLURM_JOB_NODELIST, life $((${{SLURM_RESTART_COUNT:-0}} + 1))"
leave_with_the_broker &
watch=$!
{shlex.join(worker)} \\
  {shlex.join(srun)} {shlex.join(run.command)} &
{_WAIT}
kill "$watch" 2>/dev/null

case $code in 2 | 126 | 127) exit "$code" ;; esac  # called wrongly
[ "$(cat "$DILOCO_END_FILE" 2>/dev/null)" = over ] && exit 0  # the run is
has_to_leave && requeue "since Slurm takes its nodes"
case $code in 0 | 130 | 143) exit 0 ;; esac  # it is done, or was asked to stop
[ -e "$folder/stop" ] && exit "$code"
requeue_if_allowed
"""
