"""Plain Ray Train, as its documentation shows: TorchTrainer and prepare_model. Arguments: out, t0 (see peer_model.meter)."""

from __future__ import annotations

import os
import sys
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))


def loop(config: dict[str, Any]) -> None:
    """What each worker runs."""
    sys.path.insert(0, config["here"])
    import ray.train
    import torch
    from peer_model import GPT, meter, train
    from ray.train.torch import prepare_model

    torch.set_num_threads(1)
    torch.manual_seed(0)
    train(prepare_model(GPT(meter(config["out"], config["t0"]))), ray.train.get_context().get_world_rank())
    ray.train.report({"done": 1})


if __name__ == "__main__":
    import tempfile

    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    env = {k: v for k, v in os.environ.items() if k.startswith(("OMP_", "MKL_", "GLOO_"))}
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": env},
        object_store_memory=200 * 1024 * 1024,
    )
    with tempfile.TemporaryDirectory() as storage:
        TorchTrainer(
            loop,
            train_loop_config={"here": HERE, "out": sys.argv[1], "t0": sys.argv[2]},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(name="peer", storage_path=storage),
        ).fit()
    ray.shutdown()
