"""`raydist deploy`: the manifests, the batch script and the compose file follow from the job; what a cluster would refuse is
refused before."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import _get_custom_resources as custom_resources
from typer.testing import CliRunner

from raydist.cli.main import app
from raydist.deploy.kuberay import KubernetesOptions, manifests
from raydist.deploy.nodes import Nodes
from raydist.errors import UserError
from raydist.spec import JobSpec, load, parse
from tests.kuberay import RayJob
from tests.slurm import directives

JOB = {"name": "my_Job.1", "data": {"path": "s3://bucket/data"}, "train": {"steps": 1, "global_batch": 64}}
NODE = {"gpus": 8, "cpus": 64, "memory_gib": 900, "shm_gib": 200, "labels": {"pool": "a"},
        "custom": {"fast_nvme": 0.5}}  # fmt: skip
LLAMA = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 300,
         "intermediate_size": 16, "max_position_embeddings": 8, "rms_norm_eps": 1e-6}  # fmt: skip
POD = ["--image", "me/raydist", "--storage", "s3://bucket/runs"]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """job(**cluster): the name of a job file in the working directory."""
    monkeypatch.chdir(tmp_path)

    def job(**cluster: Any) -> str:
        offload = {"optimizer": "nvme", "path": "/nvme"}
        tree = {
            **JOB,
            "cluster": {"workers": [8, 16], "cpus_per_worker": 6, "resources": NODE, **cluster},
            "offload": offload,
        }
        Path("job.yaml").write_text(yaml.safe_dump(tree))
        return "job.yaml"

    return job


def deploy(*words: str) -> Any:
    """The command's result; an error is raised."""
    return CliRunner().invoke(app, ["deploy", *words], catch_exceptions=False)


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        ({"workers": 16, "resources": {"gpus": 8}}, (2, 2, 8)),
        ({"workers": 15, "spares": 2, "resources": {"gpus": 8}}, (2, 3, 8)),
        ({"workers": [8, 32], "resources": {"gpus": 8}}, (1, 4, 8)),
        ({"workers": 6, "cpus_per_worker": 2, "resources": {"gpus": 0, "cpus": 8}}, (2, 2, 8)),
        ({"workers": 6, "cpus_per_worker": 2, "resources": {"gpus": 0, "nodes": 3}}, (3, 3, 4)),
        ({"workers": 4, "gpus_per_worker": 0, "resources": {"nodes": 2}}, (2, 2, 2)),
        ({"workers": 4, "gpus_per_worker": 0.5, "resources": {"gpus": 1}}, (2, 2, 2)),
        ({"workers": 6, "gpus_per_worker": 0, "resources": {"nodes": 2}, "tensor": 2}, (2, 2, 4)),
        ({"workers": 8, "resources": {"gpus": 3}, "tensor": 2}, (4, 4, 2)),
    ],
)
def test_nodes_follow_from_workers(cluster: dict[str, Any], expected: tuple[int, int, int]) -> None:
    """The fewest and the most nodes, and the CPUs of each; tensor parallel ranks are together, and every worker has a node."""
    parallel = {"tensor": (cluster := dict(cluster)).pop("tensor", 1)}
    nodes = Nodes.of(parse({**JOB, "name": "j", "cluster": cluster, "parallel": parallel}))
    assert (nodes.least, nodes.most, nodes.cpus) == expected


@pytest.mark.parametrize(
    ("cluster", "told"),
    [
        ({}, "cluster.resources.gpus: null does not say how many GPUs a node has"),
        ({"gpus_per_worker": 1}, "cluster.resources.gpus: null, but each worker has 1 GPUs"),
        ({"resources": {"gpus": 0}}, "neither nodes, gpus nor cpus"),
        ({"workers": 9, "resources": {"gpus": 4, "nodes": 2}}, "a node of 5 CPUs and 4 GPUs holds 4 workers"),
        ({"cpus_per_worker": 8, "resources": {"gpus": 0, "cpus": 4}}, "holds 0 workers"),
    ],
)
def test_a_job_that_does_not_say_its_nodes_is_refused(cluster: dict[str, Any], told: str) -> None:
    """One error with the field and a remedy."""
    with pytest.raises(UserError) as caught:
        Nodes.of(parse({**JOB, "name": "j", "cluster": cluster}))
    assert told in caught.value.message
    assert caught.value.hint


def test_names_that_are_cut_differ() -> None:
    """Runs whose names are equal in the 40 characters that Kubernetes gets have resources of their own; each keeps its name."""
    made = parse({**JOB, "name": "j", "cluster": {"workers": 8, "resources": NODE}})
    options = KubernetesOptions(image="me/raydist", storage="s3://bucket/runs")
    names = [yaml.safe_load_all(manifests(made, "a" * 40 + end, options)) for end in ("", "b", "c", "b")]
    kept, *cut = ({one["metadata"]["name"].removesuffix("-job") for one in each} for each in names)
    assert kept == {"a" * 40}
    assert cut[0] == cut[2] != cut[1]
    assert all(len(name) == 40 and name.startswith("a" * 31 + "-") for each in cut for name in each)


def test_kuberay(job: Any) -> None:
    """A RayJob that fits the model of the API: pods with the nodes' resources, what Kubernetes alone needs to know, and the job as
    a file that loads again as the same job."""
    options = [
        "--toleration",
        "gpu=yes:NoSchedule",
        "--toleration",
        "spot",
        "--node-selector",
        "pool=a",
        "--device",
        "rdma/hca=8",
    ]
    more = ["--network", "ib-net", "--env-secret", "s3", "--claim", "scratch:/scratch", "--namespace", "train"]
    done = deploy("kuberay", job(), *POD, *options, *more, "--token-secret", "token")
    files, made = yaml.safe_load_all(done.stdout)
    Path("again.yaml").write_text(files["data"]["job.yaml"])
    assert load(Path("again.yaml")) == load(Path("job.yaml"))
    checked = RayJob.model_validate(made)
    cluster = checked.spec.ray_cluster_spec
    (group,) = cluster.worker_group_specs
    assert (checked.metadata.name, checked.metadata.namespace) == ("my-job-1", "train")
    assert "--name my_Job.1" in checked.spec.entrypoint
    assert (group.min_replicas, group.replicas, group.max_replicas, group.labels) == (1, 2, 2, {"pool": "a"})
    # The shell of the pod reads it, and so does Ray's autoscaler.
    assert shlex.split(group.ray_start_params["resources"]) == ['{"fast_nvme": 4}']
    assert custom_resources({}, group.ray_start_params, "workers") == {"fast_nvme": 4}
    pod = group.template.spec
    (container,) = pod.containers
    limits = {"cpu": "64", "memory": "900Gi", "nvidia.com/gpu": "8", "rdma/hca": "8"}
    assert container.resources.limits == container.resources.requests == limits
    assert {mount.mount_path for mount in container.volume_mounts} == {"/etc/raydist", "/scratch", "/dev/shm", "/nvme"}
    assert {volume.name for volume in pod.volumes} == {mount.name for mount in container.volume_mounts}
    (shm,) = [volume.empty_dir for volume in pod.volumes if volume.empty_dir is not None]
    assert shm.size_limit == "200Gi"
    assert pod.security_context is not None, "the image's user may write to the claim"
    assert pod.security_context.fs_group == 1000
    assert pod.node_selector == {"pool": "a"}
    assert [(t.key, t.operator, t.value, t.effect) for t in pod.tolerations or []] == [
        ("gpu", "Equal", "yes", "NoSchedule"), ("spot", "Exists", None, None),
    ]  # fmt: skip
    assert group.template.metadata is not None
    assert group.template.metadata.annotations == {"k8s.v1.cni.cncf.io/networks": "ib-net"}
    assert cluster.auth_options.secret_name == "token"
    # A save may take checkpoint.timeout_s: the pod's end waits for it.
    assert pod.termination_grace_period_seconds > load(Path("job.yaml")).checkpoint.timeout_s
    head = cluster.head_group_spec
    assert head.ray_start_params["num-gpus"] == "0"
    (driver,) = head.template.spec.containers
    assert "nvidia.com/gpu" not in driver.resources.limits
    assert driver.lifecycle is not None
    stop = driver.lifecycle.pre_stop.exec.command
    assert float(stop[stop.index("--timeout") + 1]) == head.template.spec.termination_grace_period_seconds
    assert head.template.spec.tolerations is None


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--image", "i", "--storage", "/runs"], "--storage /runs: no other pod would see it"),
        ([*POD, "--claim", "runs"], "--claim runs: is not NAME:/PATH"),
        ([*POD, "--claim", "My_Claim:/x"], "'My_Claim' is refused by Kubernetes"),
        ([*POD, "--toleration", "a=b:Never"], "--toleration a=b:Never"),
        ([*POD, "--device", "rdma"], "--device rdma: is not KEY=VALUE"),
        ([*POD, "--device", "rdma/hca=many"], "'many' is refused by Kubernetes"),
        ([*POD, "--set", "cluster.env={HF_TOKEN: hf_abcdefghijklmnopqrstuvwxyz123456}"], "contains secrets"),
    ],
)
def test_what_kubernetes_would_refuse(job: Any, words: list[str], told: str) -> None:
    """One error that names the option or the field."""
    with pytest.raises(UserError) as caught:
        deploy("kuberay", job(), *words)
    assert told in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"data": {"path": "data/x"}}, "data.path: data/x"),
        ({"data": {"path": "prepared"}}, "data.path: prepared"),
        ({"data": {"path": "~/prepared"}}, "data.path: ~/prepared"),
        ({"data": {"source": "corpus.txt"}}, "data.source: corpus.txt"),
        ({"data": {"source": "s3://b/x", "tokenizer": "tok/tokenizer.json"}}, "data.tokenizer: tok/tokenizer.json"),
        ({"data": {"source": "/x", "format": "chat", "chat_template": "chat.jinja"}}, "data.chat_template: chat.jinja"),
        ({"init_from": "./old"}, "init_from: ./old"),
        ({"init_from": "runs/old/checkpoints/step-3"}, "init_from: runs/old/checkpoints/step-3"),
        ({"model": {"hf": "tiny"}}, "model.hf: tiny"),
        ({"init_from": "old/checkpoints/step-3"}, ""),
        ({"init_from": "s3://b/runs/old"}, ""),
        ({"data": {"path": "/prepared", "tokenizer": "tok/tokenizer.json"}}, ""),
        ({"data": {"source": "/x", "format": "chat", "chat_template": "chatml", "tokenizer": "bpe:512"}}, ""),
        ({"data": {"source": "python-stdlib", "tokenizer": "bytes"}}, ""),
    ],
)
def test_files_that_no_pod_has(job: Any, fields: dict[str, Any], refused: str) -> None:
    """A relative path of data or weights is refused, with its field; names that need no file, and runs in the storage, are not."""
    tree = yaml.safe_load(Path(job()).read_text()) | fields
    Path("job.yaml").write_text(yaml.safe_dump(tree))
    Path("runs/old").mkdir(parents=True)
    Path("runs/old/spec.yaml").touch()
    Path("tiny").mkdir()
    Path("tiny/config.json").write_text(json.dumps(LLAMA))
    if not refused:
        assert deploy("kuberay", "job.yaml", *POD).exit_code == 0
        return
    with pytest.raises(UserError) as caught:
        deploy("kuberay", "job.yaml", *POD)
    assert caught.value.message == f"{refused} is relative to a folder that no pod has"
    assert "--claim" in caught.value.hint


def test_slurm(job: Any, tmp_path: Path) -> None:
    """The directives ask for the nodes; the script runs in this folder with this Python. -o names the file that it writes."""
    more = ["--time", "12:00:00", "--partition", "gpu", "--sbatch=--account=lab", "-o", "out"]
    done = deploy("slurm", job(), "--set", "optim.lr=1e-3", *more)
    assert done.stdout.strip() == "out/my_Job.1.sbatch"
    script = Path("out/my_Job.1.sbatch").read_text()
    asked = directives(script)
    assert asked.items() >= {
        "nodes": "1-2", "gpus-per-node": "8", "cpus-per-task": "64", "mem": "900G", "time": "12:00:00", "partition": "gpu",
        "account": "lab", "requeue": None, "exclusive": None,
    }.items()  # fmt: skip
    assert f"\ncd {tmp_path}\n" in script
    assert f"PATH={Path(sys.executable).parent}:" in script
    assert "raydist train job.yaml --set optim.lr=1e-3 --name my_Job.1 " in script
    assert "--labels=pool=a" in script
    assert """ '--resources={"fast_nvme": 4}' """ in script
    assert "export SRUN_CPUS_PER_TASK=64\n" in script
    block = "others=" + script.partition("\nothers=")[2].partition("\nfi\n")[0] + "\nfi; wait"
    for count, said in ((1, ""), (2, "--nodes=1 --ntasks=1 ")):  # of 1-2 nodes; srun refuses --nodes=0
        shell = f'srun() {{ echo "$@"; }}; SLURM_JOB_NUM_NODES={count} head=a address=b temp=c rays=; {block}'
        done = subprocess.run(["bash", "-euc", shell], text=True, capture_output=True, check=True)
        assert done.stdout.startswith(said)
        assert bool(done.stdout) == bool(said)
    with pytest.raises(UserError, match="is not an option of sbatch"):
        deploy("slurm", job(), "--sbatch", "exclusive; rm")


@pytest.mark.parametrize(
    ("train", "listens", "expected"),
    [
        (":", False, (143, True)),  # the signal comes while Ray starts
        ("kill -USR1 $$; exec sleep 60", True, (143, True)),
        # A second one is not passed on: the driver would end without a checkpoint.
        ("n=142; trap 'n=$((n + 1))' TERM; kill -USR1 $$; kill -TERM $$; until ((n > 142)); do sleep; done; sleep; exit $n",
         True, (143, True)),
        # The driver ends by itself just then.
        ("trap '' TERM; kill -USR1 $$; exit 3", True, (3, False)),
        ("trap '' TERM; kill -USR1 $$; exit 0", True, (0, False)),
    ],
)  # fmt: skip
def test_a_signal_of_slurm_may_come_at_any_time(
    job: Any, tmp_path: Path, train: str, listens: bool, expected: tuple[int, bool]
) -> None:
    """The script ends with the driver's code, and is queued again if the signal ended the driver or came before it."""
    script = deploy("slurm", job(workers=8)).stdout
    with socket.socket() as ray, (tmp_path / "log").open("w") as log:
        port = next(port for port in range(20_000, 30_000) if _bound(ray, port))
        if listens:
            ray.listen()
        stubs = f"""
            scontrol() {{ case $1 in show) echo a;; requeue) touch requeued;; esac; }}
            srun() {{ case "$*" in *getent*) echo 127.0.0.1;; *) {"" if listens else "kill -USR1 $$;"} exec sleep 60;; esac; }}
            raydist() {{ {train}; }}
            sleep() {{ command sleep 0.02; }}
            export SLURM_JOB_ID={port - 20_000} SLURM_JOB_NUM_NODES=1 SLURM_JOB_NODELIST=a
        """
        shell = subprocess.Popen(["bash", "-c", stubs + script], stdout=log, stderr=log, start_new_session=True)
        try:
            code = shell.wait(60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)  # Slurm ends what its steps left
    assert (code, Path("requeued").exists()) == expected, (tmp_path / "log").read_text()


def _bound(made: socket.socket, port: int) -> bool:
    try:
        made.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True


def test_compose(job: Any) -> None:
    """Two nodes, the first with a driver that waits for the other one; each has the token, the job's folder and the runs."""
    made = yaml.safe_load(deploy("compose", job(workers=2, cpus_per_worker=1, resources={"gpus": 0})).stdout)
    assert list(made["services"]) == ["head", "node"]
    for service in made["services"].values():
        assert "RAY_AUTH_TOKEN" in service["environment"]
        assert service["volumes"] == [".:/work", "./runs:/runs"]
    # What the image's health check asks: only one container has a GCS.
    assert made["services"]["node"]["environment"]["RAY_ADDRESS"] == "head:6379"
    assert "RAY_ADDRESS" not in made["services"]["head"]["environment"]
    node = made["services"]["node"]["command"]
    assert node[:4] == ["ray", "start", "--address", "head:6379"]
    assert node[4:6] == ["--num-cpus=1", "--num-gpus=0"]
    shell, _, line = made["services"]["head"]["command"]
    start, _, train = line.partition(" && exec ")
    assert (shell, start.split()[:3]) == ("sh", ["ray", "start", "--head"])
    assert train.startswith(
        "raydist train job.yaml --name my_Job.1 --storage /runs --address head:6379 --wait-for-nodes "
    )
    assert "--block" not in start
    stop = f"{Nodes.of(load(Path('job.yaml'), ['cluster.resources.nodes=2'])).grace_s}s"
    assert made["services"]["head"]["stop_grace_period"] == stop, "as long as a checkpoint may take"
    dollar = yaml.safe_load(deploy("compose", "job.yaml", "--set", "data.path=$HOME\n/x").stdout)
    assert "--set 'data.path=$$HOME\n/x'" in dollar["services"]["head"]["command"][2], "$$ is compose's way to write $"
    with pytest.raises(UserError, match="each worker has 1 GPUs"):
        deploy("compose", job(workers=2, gpus_per_worker=1, resources={}))


def test_the_section_changes_no_hash() -> None:
    """A job without `cluster.resources` is dumped as before the section existed."""
    spec = parse({**JOB, "name": "j"})
    assert "resources" not in spec.model_dump(mode="json")["cluster"]
    assert isinstance(spec, JobSpec)
