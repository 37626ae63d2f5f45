"""The part of KubeRay's API (ray.io/v1, KubeRay 1.5 or newer) and of Kubernetes' pods that raydist uses, as strict models.

A field that they lack, or a name that Kubernetes refuses, is an error. Each class has the name of the API's type in its docstring.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel

DnsLabel = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", max_length=63)]
Word = Annotated[str, StringConstraints(pattern=r"^\S+$")]
Quantity = Annotated[str, StringConstraints(pattern=r"^[0-9.]+(m|[KMGT]i?)?$")]


class Api(BaseModel):
    """An object of the API: its fields in camelCase, and no others."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid")


class Meta(Api):
    """ObjectMeta."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", max_length=47)] | None = None
    namespace: DnsLabel | None = None
    annotations: dict[str, Word] | None = None


class Reference(Api):
    """A Secret of that name."""

    name: DnsLabel


class EnvFrom(Api):
    """Variables from a Secret."""

    secret_ref: Reference


class Mount(Api):
    """VolumeMount."""

    name: DnsLabel
    mount_path: Annotated[str, StringConstraints(pattern=r"^/")]
    read_only: bool | None = None


class Claim(Api):
    """PersistentVolumeClaimVolumeSource."""

    claim_name: DnsLabel


class Empty(Api):
    """EmptyDirVolumeSource in memory."""

    medium: Literal["Memory"]
    size_limit: Quantity | None = None


class HostPath(Api):
    """HostPathVolumeSource."""

    path: str
    type: Literal["DirectoryOrCreate", "Directory"]


class ConfigMapSource(Api):
    """ConfigMapVolumeSource."""

    name: DnsLabel


class Volume(Api):
    """A volume with one source."""

    name: DnsLabel
    persistent_volume_claim: Claim | None = None
    empty_dir: Empty | None = None
    host_path: HostPath | None = None
    config_map: ConfigMapSource | None = None


class Resources(Api):
    """ResourceRequirements; requests equal limits, so that a pod is not removed for its memory before others."""

    limits: dict[str, Quantity]
    requests: dict[str, Quantity]


class Exec(Api):
    """ExecAction."""

    command: list[str]


class Handler(Api):
    """LifecycleHandler."""

    exec: Exec


class Lifecycle(Api):
    """What runs before a container gets SIGTERM."""

    pre_stop: Handler


class Capabilities(Api):
    """Capabilities of a container."""

    add: list[Literal["IPC_LOCK"]]


class Security(Api):
    """SecurityContext."""

    capabilities: Capabilities


class Container(Api):
    """A container of a pod."""

    name: DnsLabel
    image: Word
    env_from: list[EnvFrom] | None = None
    resources: Resources
    volume_mounts: list[Mount]
    lifecycle: Lifecycle | None = None
    security_context: Security | None = None


class Toleration(Api):
    """A taint that a pod accepts."""

    key: str
    operator: Literal["Equal", "Exists"]
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None


class PodSecurity(Api):
    """PodSecurityContext: the group that owns the volumes."""

    fs_group: Annotated[int, Field(ge=1)]


class PodSpec(Api):
    """The pod of a node of Ray."""

    containers: Annotated[list[Container], Field(min_length=1)]
    volumes: list[Volume]
    security_context: PodSecurity | None = None
    node_selector: dict[Word, str] | None = None
    tolerations: list[Toleration] | None = None
    termination_grace_period_seconds: Annotated[int, Field(ge=1)]


class Pod(Api):
    """PodTemplateSpec."""

    metadata: Meta | None = None
    spec: PodSpec


class Head(Api):
    """HeadGroupSpec."""

    ray_start_params: dict[str, str]
    template: Pod


class Workers(Api):
    """WorkerGroupSpec."""

    group_name: DnsLabel
    replicas: Annotated[int, Field(ge=0)]
    min_replicas: Annotated[int, Field(ge=0)]
    max_replicas: Annotated[int, Field(ge=1)]
    labels: dict[str, str] | None = None
    ray_start_params: dict[str, str]
    template: Pod


class Auth(Api):
    """AuthOptions: KubeRay makes a token for the cluster, or takes that of a Secret (its key is auth_token)."""

    mode: Literal["token"] = "token"
    secret_name: DnsLabel | None = None


class ClusterSpec(Api):
    """RayClusterSpec."""

    ray_version: str
    auth_options: Auth
    head_group_spec: Head
    worker_group_specs: list[Workers]


class RayJobSpec(Api):
    """RayJobSpec."""

    entrypoint: str
    submission_mode: Literal["K8sJobMode"] = "K8sJobMode"
    backoff_limit: Annotated[int, Field(ge=0)]
    shutdown_after_job_finishes: Literal[True] = True
    ttl_seconds_after_finished: Annotated[int, Field(ge=0)] = 60
    ray_cluster_spec: ClusterSpec


class RayJob(Api):
    """A job and its cluster."""

    api_version: Literal["ray.io/v1"] = "ray.io/v1"
    kind: Literal["RayJob"] = "RayJob"
    metadata: Meta
    spec: RayJobSpec


class ConfigMap(Api):
    """Files for pods."""

    api_version: Literal["v1"] = "v1"
    kind: Literal["ConfigMap"] = "ConfigMap"
    metadata: Meta
    data: dict[str, str]
