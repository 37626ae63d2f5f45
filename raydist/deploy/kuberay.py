"""Manifests for KubeRay: a ConfigMap with the job, and a RayJob with a head and one group of workers.

Runs anywhere. The driver runs on the head, as a Ray job; the pods of the head have no ranks. A worker's pod that is removed drains
its node first, and the head's asks the run for a checkpoint. KubeRay starts a lost job again, which resumes the run.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import PurePosixPath
from typing import Any

import yaml
from pydantic import ValidationError

from raydist.deploy import kuberay_api as api
from raydist.deploy.nodes import Nodes
from raydist.errors import UsageError
from raydist.run.status import LOST_AFTER_S
from raydist.spec import JobSpec, stored

JOB = "/etc/raydist/job.yaml"
_USER = 1000
"""Of deploy/docker/Dockerfile."""
_HEAD_CPU, _HEAD_MEMORY, _MOST_RETRIES = "2", "8Gi", 10
_KEY = re.compile(r"([A-Za-z0-9./_-]+)(?:=([^:]*))?(?::(NoSchedule|PreferNoSchedule|NoExecute))?")
_REFUSED = re.compile(r"[^a-z0-9-]+")


@dataclass(frozen=True, slots=True)
class Wishes:
    """What only Kubernetes needs to know: the options of `raydist deploy kuberay`, as typed."""

    image: str
    storage: str
    namespace: str | None = None
    claims: Sequence[str] = ()
    selectors: Sequence[str] = ()
    tolerations: Sequence[str] = ()
    network: str | None = None
    devices: Sequence[str] = ()
    secrets: Sequence[str] = ()
    token: str | None = None


def manifests(job: JobSpec, run: str, wishes: Wishes) -> str:
    """The YAML for `kubectl apply -f`. `run`: the name of the run. Raises UsageError for a wish that Kubernetes would refuse, and
    UserError as `Nodes.of` does."""
    folder = PurePosixPath(wishes.storage)
    if "://" not in wishes.storage and not any(folder.is_relative_to(_claim(text)[1]) for text in wishes.claims):
        raise UsageError(
            f"--storage {wishes.storage}: no other pod would see it",
            "give a URI such as s3://bucket/runs, or mount a claim that all pods share: --claim NAME:/runs --storage /runs",
        )
    try:
        return _manifests(job, run, wishes)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(
            f"{error.title}.{where}: {first['input']!r} is refused by Kubernetes: {first['msg']}",
            "names have lower-case letters, digits and dashes; quantities are numbers with a unit such as Gi",
        ) from None


def _manifests(job: JobSpec, run: str, wishes: Wishes) -> str:
    nodes, name = Nodes.of(job), _REFUSED.sub("-", run.lower()).strip("-")[:40].strip("-")
    meta = api.Meta(name=name, namespace=wishes.namespace)
    command = ["python", "-m", "raydist", "train", JOB, "--name", run, "--storage", wishes.storage, "--address", "auto"]
    # Of a driver on a lost head only the lease is left.
    command += ["--wait-for-driver", f"{2 * LOST_AFTER_S:g}"]
    stop = ["python", "-m", "raydist", "stop", run, "--storage", wishes.storage]
    leave = ["python", "-m", "raydist.cluster.leave", str(nodes.grace_s)]
    head = _pod(job, name, nodes, wishes, stop, {"cpu": _HEAD_CPU, "memory": _HEAD_MEMORY}, head=True)
    has = {"cpu": str(nodes.cpus)}
    if nodes.memory_gib:
        has["memory"] = _gib(nodes.memory_gib)
    if nodes.gpus:
        has["nvidia.com/gpu"] = str(nodes.gpus)
    has |= dict(_pair(text, "--device") for text in wishes.devices)
    labels = job.cluster.resources.labels
    made = api.RayJob(
        metadata=meta,
        spec=api.RayJobSpec(
            entrypoint=shlex.join(command),
            backoff_limit=_MOST_RETRIES if job.recovery.max_failures < 0 else job.recovery.max_failures,
            ray_cluster_spec=api.ClusterSpec(
                ray_version=version("ray"),
                auth_options=api.Auth(secret_name=wishes.token),
                # No rank on the head's pod, which has no GPUs and the driver.
                head_group_spec=api.Head(
                    ray_start_params={"num-cpus": "0", "num-gpus": "0", "dashboard-host": "0.0.0.0"}, template=head
                ),
                worker_group_specs=[
                    api.Workers(
                        group_name="workers",
                        replicas=nodes.most,
                        min_replicas=nodes.least,
                        max_replicas=nodes.most,
                        labels=labels or None,
                        ray_start_params={"num-cpus": str(nodes.cpus), "num-gpus": str(nodes.gpus)},
                        template=_pod(job, name, nodes, wishes, leave, has, head=False),
                    )
                ],
            ),
        ),
    )
    files = api.ConfigMap(
        metadata=api.Meta(name=f"{name}-job", namespace=wishes.namespace), data={"job.yaml": stored(job)}
    )
    return "---\n".join(_yaml(each) for each in (files, made))


def _pod(
    job: JobSpec, name: str, nodes: Nodes, wishes: Wishes, before: list[str], has: Mapping[str, str], *, head: bool
) -> api.Pod:
    """A pod of the head or of a worker. `before`: its preStop hook. `has`: its resources."""
    volumes = [api.Volume(name="job", config_map=api.ConfigMapSource(name=f"{name}-job"))]
    mounts = [api.Mount(name="job", mount_path=JOB.rpartition("/")[0], read_only=True)]
    for number, text in enumerate(wishes.claims):
        claim, path = _claim(text)
        volumes.append(api.Volume(name=f"claim-{number}", persistent_volume_claim=api.Claim(claim_name=claim)))
        mounts.append(api.Mount(name=f"claim-{number}", mount_path=path))
    if not head:
        size = _gib(nodes.shm_gib) if nodes.shm_gib else None
        volumes.append(api.Volume(name="shm", empty_dir=api.Empty(medium="Memory", size_limit=size)))
        mounts.append(api.Mount(name="shm", mount_path="/dev/shm"))
        if job.offload.path is not None:
            volumes.append(
                api.Volume(name="nvme", host_path=api.HostPath(path=job.offload.path, type="DirectoryOrCreate"))
            )
            mounts.append(api.Mount(name="nvme", mount_path=job.offload.path))
    fast = not head and bool(wishes.devices)
    container = api.Container(
        name="ray-head" if head else "ray-worker",
        image=wishes.image,
        env_from=[api.EnvFrom(secret_ref=api.Reference(name=secret)) for secret in wishes.secrets] or None,
        resources=api.Resources(limits=dict(has), requests=dict(has)),
        volume_mounts=mounts,
        lifecycle=api.Lifecycle(pre_stop=api.Handler(exec=api.Exec(command=before))),
        # RDMA registers memory, which is locked.
        security_context=api.Security(capabilities=api.Capabilities(add=["IPC_LOCK"])) if fast else None,
    )
    annotations = {"k8s.v1.cni.cncf.io/networks": wishes.network} if wishes.network and not head else None
    return api.Pod(
        metadata=api.Meta(annotations=annotations) if annotations else None,
        spec=api.PodSpec(
            containers=[container],
            volumes=volumes,
            security_context=api.PodSecurity(fs_group=_USER) if wishes.claims else None,
            node_selector=dict(_pair(text, "--node-selector") for text in wishes.selectors) or None
            if not head
            else None,
            tolerations=[_toleration(text) for text in wishes.tolerations] or None if not head else None,
            termination_grace_period_seconds=nodes.grace_s,
        ),
    )


def _claim(text: str) -> tuple[str, str]:
    name, colon, path = text.partition(":")
    if not colon or not path.startswith("/"):
        raise UsageError(f"--claim {text}: is not NAME:/PATH", "write --claim runs:/runs")
    return name, path


def _pair(text: str, option: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key or not value:
        raise UsageError(f"{option} {text}: is not KEY=VALUE", f"write {option} KEY=VALUE")
    return key, value


def _toleration(text: str) -> api.Toleration:
    found = _KEY.fullmatch(text)
    if found is None:
        raise UsageError(
            f"--toleration {text}: is not KEY[=VALUE][:EFFECT]", "write --toleration nvidia.com/gpu:NoSchedule"
        )
    key, value, effect = found.groups()
    return api.Toleration.model_validate(
        {"key": key, "operator": "Exists" if value is None else "Equal", "value": value, "effect": effect}
    )


def _gib(amount: float) -> str:
    return f"{math.ceil(amount)}Gi"


def _yaml(made: api.Api) -> str:
    plain: dict[str, Any] = made.model_dump(by_alias=True, exclude_none=True)
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
