"""A batch script for Slurm: one Ray a node, the head's first, then the run's driver on the first node.

Runs anywhere. Slurm announces a preemption, or the end of the time limit, to the script: the driver then saves a checkpoint, and
the script puts the job back into the queue, where the same run name resumes it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from raydist.deploy.nodes import Nodes
from raydist.errors import UsageError
from raydist.run.driver_process import LOST_AFTER_S
from raydist.spec import JobSpec

_JOIN_S = 600
"""How long the driver waits for the other nodes' Ray."""
_OPTION = re.compile(r"--[a-z][a-z-]*(=\S+)?")

_SCRIPT = """\
#!/bin/bash
{directives}
set -euo pipefail
requeue=
driver=
# Slurm's signal may come at any time. The driver saves a checkpoint on SIGTERM, and ends; on a second one it would end without.
pass() {{
  if [ "$requeue" = asked ] && [ -n "$driver" ]; then
    requeue=passed
    kill -TERM "$driver" 2> /dev/null || :
  fi
}}
trap 'requeue=${{requeue:-asked}}; pass' USR1 TERM
# Ray makes its folder writable for all users: it stands in one for this user, with a name that nobody else could have taken.
temp=
rays=
clean() {{
  trap - EXIT
  kill $rays 2> /dev/null || :
  for try in {{1..50}}; do
    kill -0 $rays 2> /dev/null || break
    sleep 0.1
  done
  [ -z "$temp" ] || rm -rf -- "$temp"
}}
trap clean EXIT
again() {{
  clean
  scontrol requeue "$SLURM_JOB_ID"
  exit "$1"
}}
cd {folder}
export PATH={bin}:"$PATH"

nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=$(head -n 1 <<< "$nodes")
port=$((20000 + SLURM_JOB_ID % 10000))
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
# Since Slurm 22.05 srun does not take it from the job: without it a node's Ray would be bound to one CPU.
export SRUN_CPUS_PER_TASK={cpus}
# By default 30 s: all nodes read Python from one file system at the same time.
export RAY_raylet_start_wait_time_s=150
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')

# The head's address as another node sees it: on the head itself its name may stand for 127.0.1.1.
address=$(srun --nodes=1 --ntasks=1 --nodelist="$(tail -n 1 <<< "$nodes")" --overlap getent ahostsv4 "$head")
address=${{address%%[[:space:]]*}}:$port
temp=$(mktemp -d "${{SLURM_TMPDIR:-/tmp}}/ray-XXXXXX")
srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap \\
  ray start --head --node-ip-address="${{address%:*}}" --port="$port" \\
  --temp-dir="$temp/r" {ray} --block &
rays=$!
until (exec 3<> "/dev/tcp/${{address%:*}}/$port") 2> /dev/null; do
  [ -z "$requeue" ] || again 143
  kill -0 "$rays" || {{ echo "Ray did not start on $head" >&2; exit 1; }}
  sleep 1
done
{others}
[ -z "$requeue" ] || again 143
# A shell without traps tells the driver's pid and exit code: where a signal comes just as the driver ends, `wait` may lose it.
exec 3>&1 4< <(
  raydist train {train} --address "$address" --wait-for-nodes {join} --wait-for-driver {lease} >&3 &
  echo "$!"
  code=0
  wait "$!" || code=$?
  echo "$code"
)
read -r driver <&4
pass
code=
until read -r code <&4; do
  [ "$?" -gt 128 ] || {{ code=143; break; }}  # that shell was killed
done
# 2: the request is invalid, and would be so again; 0 and 3: the run has ended.
if [ -n "$requeue" ] && [ "$code" -gt 128 ]; then
  again "$code"
fi
exit "$code"
"""
_OTHERS = """\
others=$((SLURM_JOB_NUM_NODES - 1))
if [ "$others" -gt 0 ]; then
  srun --nodes="$others" --ntasks="$others" --ntasks-per-node=1 --exclude="$head" --overlap \\
    bash -c '{{ mkdir -m 700 "$0" || [ -O "$0" ]; }} && trap "rm -rf -- \\"\\$0\\"" EXIT && "$@"' "$temp" \\
    ray start --address="$address" --temp-dir="$temp/r" {ray} --block &
  rays="$rays $!"
fi
"""


@dataclass(frozen=True, slots=True)
class SlurmOptions:
    """What only Slurm needs to know. `train`: the arguments of `raydist train`; `folder`: where it runs; `bin`: of its Python."""

    train: Sequence[str]
    folder: Path
    bin: Path
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    more: Sequence[str] = ()


def script(job: JobSpec, run: str, options: SlurmOptions) -> str:
    """The text for `sbatch`. Raises UsageError for an option that sbatch could not read, and UserError as `Nodes.of` does."""
    nodes = Nodes.of(job)
    asked = {
        "job-name": run,
        "nodes": str(nodes.most) if nodes.least == nodes.most else f"{nodes.least}-{nodes.most}",
        "ntasks-per-node": "1",
        "cpus-per-task": str(nodes.cpus),
        "gpus-per-node": str(nodes.gpus) if nodes.gpus else None,
        "mem": f"{int(nodes.memory_gib)}G" if nodes.memory_gib else None,
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
        "output": f"{run}-%j.log",
    }
    lines = [f"--{name}={value}" for name, value in asked.items() if value is not None]
    # `exclusive`: Ray's agents have fixed ports. `B`: the signal goes to this script, which passes it to the driver only.
    lines += ["--exclusive", "--requeue", "--open-mode=append", f"--signal=B:USR1@{nodes.grace_s}"]
    for text in (*lines, *options.more):
        if not _OPTION.fullmatch(text):
            raise UsageError(f"--sbatch {text}: is not an option of sbatch", "write --sbatch=--constraint=ib")
    ray = shlex.join([*(f"--{name}={value}" for name, value in nodes.start.items()), "--disable-usage-stats"])
    if labels := job.cluster.resources.labels:
        ray += " " + shlex.quote("--labels=" + ",".join(f"{key}={value}" for key, value in labels.items()))
    return _SCRIPT.format(
        directives="\n".join(f"#SBATCH {line}" for line in (*lines, *options.more)),
        folder=shlex.quote(str(options.folder)),
        bin=shlex.quote(str(options.bin)),
        ray=ray,
        cpus=nodes.cpus,
        others=_OTHERS.format(ray=ray) if nodes.most > 1 else "",
        train=shlex.join(options.train),
        join=_JOIN_S,
        lease=f"{2 * LOST_AFTER_S:g}",
    )
