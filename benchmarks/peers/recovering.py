"""The plain training loop with a checkpoint every EVERY steps, under torchrun --max-restarts or in Ray Train.

recovering.py torchrun|ray OUT STEPS EVERY
"""

from __future__ import annotations

import os
import sys
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))


def train(model: Any, rank: int, out: str, state: dict[str, Any] | None, steps: int, every: int, save: Any) -> None:
    """Forward, backward, AdamW from step `state["step"]` on; `save(state)` on rank 0 where a checkpoint is due."""
    import torch
    from peer_model import batches
    from torch.nn import functional as F

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.01)
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    made = batches(rank)
    for step in range(state["step"] if state else 0, steps):
        tokens_BT, targets_BT = made[step % len(made)]
        loss = F.cross_entropy(model(tokens_BT).flatten(0, 1), targets_BT.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with open(f"{out}.{rank}.steps", "a") as file:
            file.write(f"{step + 1}\n")
        if (step + 1) % every == 0:
            save({"step": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()})


def under_torchrun(out: str, steps: int, every: int) -> None:
    """DDP; rank 0 saves with torch.save and replaces the earlier file."""
    import torch
    import torch.distributed as dist
    from peer_model import GPT, Trace
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    path = f"{out}.checkpoint"

    def save(state: dict[str, Any]) -> None:
        if dist.get_rank() == 0:
            torch.save(state, path + ".part")
            os.replace(path + ".part", path)

    state = torch.load(path) if os.path.exists(path) else None
    train(DistributedDataParallel(GPT(Trace(out))), dist.get_rank(), out, state, steps, every, save)
    dist.barrier()
    dist.destroy_process_group()


def ray_loop(config: dict[str, Any]) -> None:
    """What each worker of Ray Train runs: prepare_model, and ray.train.report with a checkpoint."""
    sys.path.insert(0, config["here"])
    import tempfile

    import ray.train
    import torch
    from peer_model import GPT, Trace
    from ray.train import Checkpoint
    from ray.train.torch import prepare_model
    from recovering import train

    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank = ray.train.get_context().get_world_rank()
    state = None
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            state = torch.load(os.path.join(folder, "state.pt"))

    def save(state: dict[str, Any]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            if rank == 0:
                torch.save(state, os.path.join(folder, "state.pt"))
            ray.train.report(
                {"step": state["step"]}, checkpoint=Checkpoint.from_directory(folder) if rank == 0 else None
            )

    train(prepare_model(GPT(Trace(config["out"]))), rank, config["out"], state, config["steps"], config["every"], save)


def under_ray(out: str, steps: int, every: int) -> None:
    """`TorchTrainer.fit` on a new Ray, or on the cluster of RAY_ADDRESS, there with one worker per node if possible."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    env = {k: v for k, v in os.environ.items() if k.startswith(("OMP_", "MKL_", "GLOO_"))}
    own: dict[str, Any] = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 200 * 1024 * 1024}
    ray.init(log_to_driver=False, runtime_env={"env_vars": env}, **({} if "RAY_ADDRESS" in os.environ else own))
    TorchTrainer(
        ray_loop,
        train_loop_config={"here": HERE, "out": out, "steps": steps, "every": every},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}, placement_strategy="SPREAD"),
        run_config=RunConfig(name="peer", storage_path=out + ".ray", failure_config=FailureConfig(max_failures=3)),
    ).fit()
    ray.shutdown()


if __name__ == "__main__":
    run = {"torchrun": under_torchrun, "ray": under_ray}[sys.argv[1]]
    run(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
