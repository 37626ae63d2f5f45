"""Manifests for KubeRay: a ConfigMap with the job, and a RayJob with a head and one group of workers.

Runs anywhere. The driver runs on the head, as a Ray job; the pods of the head have no ranks. A worker's pod that is removed drains
its node first, and the head's asks the run for a checkpoint. KubeRay starts a lost job again, which resumes the run.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import PurePosixPath
from typing import Any

import yaml

from raydist.deploy.nodes import Nodes
from raydist.errors import UsageError
from raydist.run.driver_process import LOST_AFTER_S
from raydist.spec import JobSpec, stored

JOB = "/etc/raydist/job.yaml"
_USER = 1000
"""Of deploy/docker/Dockerfile."""
_HEAD_CPU, _HEAD_MEMORY, _MOST_RETRIES = "2", "8Gi", 10
_KEY = re.compile(r"([A-Za-z0-9./_-]+)(?:=([^:]*))?(?::(NoSchedule|PreferNoSchedule|NoExecute))?")
_REFUSED = re.compile(r"[^a-z0-9-]+")
_LONGEST = 40
"""Characters of a resource's name: KubeRay makes longer ones from it."""
_NAME, _WORD = re.compile(r"(?=.{1,63}$)[a-z0-9]([a-z0-9-]*[a-z0-9])?"), re.compile(r"\S+")
_QUANTITY, _PATH = re.compile(r"[0-9.]+(m|[KMGT]i?)?"), re.compile(r"/.*")


@dataclass(frozen=True, slots=True)
class KubernetesOptions:
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


def manifests(job: JobSpec, run: str, options: KubernetesOptions) -> str:
    """The YAML for `kubectl apply -f`. `run`: the name of the run. Raises UsageError for what Kubernetes would refuse, and
    UserError as `Nodes.of` does."""
    folder = PurePosixPath(options.storage)
    if "://" not in options.storage and not any(folder.is_relative_to(_claim(text)[1]) for text in options.claims):
        raise UsageError(
            f"--storage {options.storage}: no other pod would see it",
            "give a URI such as s3://bucket/runs, or mount a claim that all pods share: --claim NAME:/runs --storage /runs",
        )
    nodes, name = Nodes.of(job), _resource_name(run)
    namespace = {} if options.namespace is None else {"namespace": _checked("--namespace", options.namespace, _NAME)}
    command = [
        "python",
        "-m",
        "raydist",
        "train",
        JOB,
        "--name",
        run,
        "--storage",
        options.storage,
        "--address",
        "auto",
    ]
    # Of a driver on a lost head only the lease is left.
    command += ["--wait-for-driver", f"{2 * LOST_AFTER_S:g}"]
    stop = ["python", "-m", "raydist", "stop", run, "--storage", options.storage, "--timeout", str(nodes.grace_s)]
    leave = ["python", "-m", "raydist.cluster.leave", str(nodes.grace_s)]
    has = {"cpu": str(nodes.cpus)}
    if nodes.memory_gib:
        has["memory"] = _gib(nodes.memory_gib)
    if nodes.gpus:
        has["nvidia.com/gpu"] = str(nodes.gpus)
    for device, count in (_pair(text, "--device") for text in options.devices):
        has[device] = _checked("--device", count, _QUANTITY)
    labels = job.cluster.resources.labels
    secret = {} if options.token is None else {"secretName": _checked("--token-secret", options.token, _NAME)}
    # No rank on the head's pod, which has no GPUs and the driver.
    head = {
        "rayStartParams": {"num-cpus": "0", "num-gpus": "0", "dashboard-host": "0.0.0.0"},
        "template": _pod(job, name, nodes, options, stop, {"cpu": _HEAD_CPU, "memory": _HEAD_MEMORY}, head=True),
    }
    workers = {
        "groupName": "workers",
        "replicas": nodes.most,
        "minReplicas": nodes.least,
        "maxReplicas": nodes.most,
        **({"labels": labels} if labels else {}),
        # A shell reads them, and Ray's autoscaler, which knows this form of the JSON only.
        "rayStartParams": nodes.start | ({"resources": json.dumps(json.dumps(nodes.custom))} if nodes.custom else {}),
        "template": _pod(job, name, nodes, options, leave, has, head=False),
    }
    files = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{name}-job", **namespace},
        "data": {"job.yaml": stored(job)},
    }
    made = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": name, **namespace},
        "spec": {
            "entrypoint": shlex.join(command),
            "submissionMode": "K8sJobMode",
            "backoffLimit": _MOST_RETRIES if job.recovery.max_failures < 0 else job.recovery.max_failures,
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": 60,
            "rayClusterSpec": {
                "rayVersion": version("ray"),
                "authOptions": {"mode": "token", **secret},
                "headGroupSpec": head,
                "workerGroupSpecs": [workers],
            },
        },
    }
    return "---\n".join(yaml.safe_dump(each, sort_keys=False, allow_unicode=True) for each in (files, made))


def _pod(
    job: JobSpec,
    name: str,
    nodes: Nodes,
    options: KubernetesOptions,
    before: list[str],
    has: Mapping[str, str],
    *,
    head: bool,
) -> dict[str, Any]:
    """A pod of the head or of a worker. `before`: its preStop hook. `has`: its resources."""
    volumes: list[dict[str, Any]] = [{"name": "job", "configMap": {"name": f"{name}-job"}}]
    mounts: list[dict[str, Any]] = [{"name": "job", "mountPath": JOB.rpartition("/")[0], "readOnly": True}]

    def mount(volume: str, path: str, source: dict[str, Any]) -> None:
        volumes.append({"name": volume, **source})
        mounts.append({"name": volume, "mountPath": path})

    for number, text in enumerate(options.claims):
        claim, path = _claim(text)
        mount(f"claim-{number}", path, {"persistentVolumeClaim": {"claimName": _checked("--claim", claim, _NAME)}})
    if not head:
        size = {"sizeLimit": _gib(nodes.shm_gib)} if nodes.shm_gib else {}
        mount("shm", "/dev/shm", {"emptyDir": {"medium": "Memory", **size}})
        if job.offload.path is not None:
            path = _checked("offload.path", job.offload.path, _PATH)
            mount("nvme", path, {"hostPath": {"path": path, "type": "DirectoryOrCreate"}})
    # Requests equal limits, so that a pod is not removed for its memory before others.
    container: dict[str, Any] = {
        "name": "ray-head" if head else "ray-worker",
        "image": _checked("--image", options.image, _WORD),
        "resources": {"limits": {**has}, "requests": {**has}},
        "volumeMounts": mounts,
        "lifecycle": {"preStop": {"exec": {"command": before}}},
    }
    if options.secrets:
        names = [_checked("--env-secret", secret, _NAME) for secret in options.secrets]
        container["envFrom"] = [{"secretRef": {"name": secret}} for secret in names]
    pod: dict[str, Any] = {
        "containers": [container],
        "volumes": volumes,
        "terminationGracePeriodSeconds": nodes.grace_s,
    }
    if options.claims:
        pod["securityContext"] = {"fsGroup": _USER}
    if head:
        return {"spec": pod}
    if options.devices:  # RDMA registers memory, which is locked
        container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}
    if options.selectors:
        pod["nodeSelector"] = dict(_pair(text, "--node-selector") for text in options.selectors)
    if options.tolerations:
        pod["tolerations"] = [_toleration(text) for text in options.tolerations]
    if options.network is None:
        return {"spec": pod}
    network = _checked("--network", options.network, _WORD)
    return {"metadata": {"annotations": {"k8s.v1.cni.cncf.io/networks": network}}, "spec": pod}


def _resource_name(run: str) -> str:
    """A name that Kubernetes accepts. A long one is cut, and has a hash of the run's name at its end: no two runs share it."""
    name = _REFUSED.sub("-", run.lower()).strip("-")
    if len(name) <= _LONGEST:
        return name
    digest = hashlib.sha256(run.encode()).hexdigest()[:8]
    return f"{name[: _LONGEST - 9].strip('-')}-{digest}"


def _checked(option: str, text: str, form: re.Pattern[str]) -> str:
    """`text`, if it has that form. Raises UsageError."""
    if not form.fullmatch(text):
        raise UsageError(
            f"{option}: {text!r} is refused by Kubernetes",
            "names have lower-case letters, digits and dashes; quantities are numbers with a unit such as Gi",
        )
    return text


def _claim(text: str) -> tuple[str, str]:
    name, colon, path = text.partition(":")
    if not colon or not path.startswith("/"):
        raise UsageError(f"--claim {text}: is not NAME:/PATH", "write --claim runs:/runs")
    return name, path


def _pair(text: str, option: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key or not value:
        raise UsageError(f"{option} {text}: is not KEY=VALUE", f"write {option} KEY=VALUE")
    return _checked(option, key, _WORD), value


def _toleration(text: str) -> dict[str, str]:
    found = _KEY.fullmatch(text)
    if found is None:
        raise UsageError(
            f"--toleration {text}: is not KEY[=VALUE][:EFFECT]", "write --toleration nvidia.com/gpu:NoSchedule"
        )
    key, value, effect = found.groups()
    made = {"key": key, "operator": "Exists" if value is None else "Equal", "value": value, "effect": effect}
    return {name: each for name, each in made.items() if each is not None}


def _gib(amount: float) -> str:
    return f"{math.ceil(amount)}Gi"
