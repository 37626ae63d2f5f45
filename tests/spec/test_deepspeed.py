"""A DeepSpeed file has the same meaning here as in DeepSpeed, or a line says what differs."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from raydist.errors import SpecError
from raydist.spec import JobSpec, dump, load, parse
from raydist.spec.deepspeed import Converted, convert
from raydist.spec.deepspeed.fields import FIELDS
from raydist.spec.models import flatten

BASE = {"data": {"source": "x"}, "train": {"steps": 100}, "cluster": {"workers": 2}}
AUTO_BATCH = dict.fromkeys(
    ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"
)
AUTO_ADAMW = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
DYNAMIC = {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1}

ZERO2_FP16: dict[str, Any] = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "steps_per_print": 2000,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "betas": [0.8, 0.99], "eps": 1e-6, "weight_decay": 3e-7}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 2e-4, "warmup_num_steps": 20, "warmup_type": "linear"},
    },
    "fp16": {**DYNAMIC, "enabled": True, "loss_scale_window": 500, "initial_scale_power": 12, "hysteresis": 1},
    "zero_optimization": {"stage": 2, "allgather_bucket_size": 2e8, "overlap_comm": True, "reduce_bucket_size": 2e8},
    "wall_clock_breakdown": False,
}
ZERO2_TREE = {
    "train": {"global_batch": 32, "micro_batch": 4},
    "parallel": {"strategy": "zero2"},
    "precision": {"params": "fp16", "loss_scale": {"initial": 4096.0, "window": 500, "floor": 1.0}},
    "optim": {
        "name": "adamw",
        "lr": 2e-4,
        "betas": [0.8, 0.99],
        "eps": 1e-6,
        "weight_decay": 3e-7,
        "clip": 0.5,
        "schedule": {"name": "constant", "warmup": 20},
    },
}
HF_ZERO3_CPU: dict[str, Any] = {
    **AUTO_BATCH,
    "fp16": {**DYNAMIC, "enabled": "auto"},
    "bf16": {"enabled": "auto"},
    "optimizer": AUTO_ADAMW,
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}
HF_ZERO3_TREE = {
    "parallel": {"strategy": "zero3"},
    "offload": {"optimizer": "cpu", "parameters": "cpu"},
    "precision": {"loss_scale": {"initial": 65536.0, "window": 1000, "floor": 1.0}},
    "optim": {"name": "adamw", "schedule": {"name": "constant"}},
}
INFINITY: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "gradient_clipping": 0,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme", "buffer_count": 4, "fast_init": False},
        "offload_param": {"device": "nvme", "nvme_path": "/local_nvme", "buffer_size": 1e8, "max_in_cpu": 1e9},
    },
    "aio": {"block_size": 262144, "queue_depth": 32},
}
INFINITY_TREE = {
    "train": {"global_batch": 32, "micro_batch": 8},
    "parallel": {"strategy": "zero3"},
    "offload": {"optimizer": "nvme", "path": "/local_nvme", "parameters": "cpu"},
    "precision": {"params": "bf16"},
    "optim": {"clip": 0},
}
BF16_COSINE: dict[str, Any] = {
    "train_batch_size": 64,
    "bf16": {"enabled": True},
    "communication_data_type": "fp32",
    "zero_optimization": {"stage": 1},
    "gradient_clipping": 1.0,
    "optimizer": {"type": "FusedAdam", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"total_num_steps": 100, "warmup_num_steps": 10, "cos_min_ratio": 0.1, "warmup_type": "linear"},
    },
    "activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": True},
}
BF16_TREE = {
    "train": {"global_batch": 64, "micro_batch": 32, "checkpoint_activations": "full"},
    "parallel": {"strategy": "zero1"},
    "precision": {"params": "bf16", "reduce": "fp32"},
    "optim": {
        "name": "adamw",
        "lr": 3e-4,
        "betas": [0.9, 0.95],
        "eps": 1e-8,
        "weight_decay": 0.1,
        "clip": 1.0,
        "schedule": {"name": "cosine", "warmup": 10, "floor": 0.1},
    },
}
REAL = {
    "zero2-fp16": (ZERO2_FP16, ZERO2_TREE),
    "hf-zero3-cpu-auto": (HF_ZERO3_CPU, HF_ZERO3_TREE),
    "zero-infinity": (INFINITY, INFINITY_TREE),
    "zero1-bf16-cosine": (BF16_COSINE, BF16_TREE),
}


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def ds(config: Any, name: str = "ds.json") -> str:
    """Writes a DeepSpeed file and returns its path."""
    Path(name).write_text(config if isinstance(config, str) else json.dumps(config))
    return name


def job(tree: dict[str, Any], name: str = "job.yaml") -> str:
    """Writes a job file and returns its path."""
    Path(name).write_text(yaml.safe_dump(tree))
    return name


def of(config: Any, spec: dict[str, Any] | None = None, nearer: tuple[str, ...] = ()) -> Converted:
    """The file converted to raydist's fields, with the spec BASE unless `spec` is given."""
    return convert(ds(config), flatten(copy.deepcopy(BASE if spec is None else spec)), nearer)


def problems(config: Any, spec: dict[str, Any] | None = None) -> list[str]:
    """The problems, one line each, without the file's name."""
    found = of(config, spec).problems
    assert all(line.startswith("ds.json: ") for line in found)
    return [line.removeprefix("ds.json: ") for line in found]


def loaded(
    config: Any, spec: dict[str, Any] | None = None, *overrides: str, warned: list[str] | None = None
) -> JobSpec:
    """The job with this file as `--deepspeed`."""
    lines: list[str] = [] if warned is None else warned
    return load(job(BASE if spec is None else spec), overrides, ds(config), lines.append)


@pytest.mark.parametrize("name", REAL)
def test_real_files_become_these_fields(name: str) -> None:
    """Each field of a real-world file becomes its field of the spec, and no other field is set."""
    config, tree = REAL[name]
    made = of(config)
    assert made.problems == []
    assert made.tree == tree
    assert set(made.sources) == set(flatten(tree))


@pytest.mark.parametrize("name", REAL)
def test_a_converted_file_loads_as_the_file_itself(name: str) -> None:
    """The converted YAML on top of a base gives the same job as --deepspeed."""
    config, _ = REAL[name]
    expected = load(job(BASE), (), ds(config), lambda line: None)
    Path("top.yaml").write_text(of(config).to_yaml("extends: job.yaml\n"))
    assert load("top.yaml") == expected
    assert expected.deepspeed is None
    assert parse(yaml.safe_load(dump(expected))) == expected


SAMPLES = (True, 2, "cpu", "linear", "fp16", [0.9, 0.99])


@pytest.mark.parametrize("name", FIELDS)
def test_no_field_goes_in_silence(name: str) -> None:
    """Any single field is in the spec, or is listed as dropped, as not needed, or as an error."""
    known = FIELDS[name]
    for value in SAMPLES:
        try:
            if known.check is not None:
                known.check(value)
            break
        except ValueError:
            continue
    config: Any = value
    for key in reversed(name.split(".")):
        config = {key: config}
    made = of(config)
    told = [*made.dropped, *made.own, *made.sources.values(), *made.problems]
    assert any(name in line for line in told), made


def test_the_warning_names_what_is_left_out() -> None:
    """One line lists the fields without a counterpart, with reasons; a second those that need none; notes follow."""
    assert of(INFINITY).warnings() == [
        "ds.json: no counterpart here, left out: aio, zero_optimization.offload_optimizer.buffer_count, "
        "zero_optimization.offload_param.buffer_size, zero_optimization.offload_param.device (nvme: taken as cpu), "
        "zero_optimization.offload_param.max_in_cpu, zero_optimization.offload_param.nvme_path",
        "ds.json: off, or done by raydist itself: zero_optimization.offload_optimizer.fast_init",
    ]
    assert of(ZERO2_FP16).warnings() == [
        "ds.json: no counterpart here, left out: zero_optimization.allgather_bucket_size, "
        "zero_optimization.reduce_bucket_size",
        "ds.json: off, or done by raydist itself: fp16.hysteresis, steps_per_print, wall_clock_breakdown, "
        "zero_optimization.overlap_comm",
        "ds.json: optimizer.params.lr: 0.0001 gives way to the scheduler's 0.0002, as in DeepSpeed",
    ]


def test_a_file_that_says_all_in_raydist_s_words_warns_of_nothing() -> None:
    """A file whose fields all have a counterpart gives no warning."""
    assert of({"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}, "gradient_clipping": 1}).warnings() == []


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"zero_optimization": {"stage": 0}}, {"parallel.strategy": "ddp"}),
        ({"zero_optimization": True}, {"parallel.strategy": "zero1"}),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}},
         {"parallel.strategy": "hsdp", "parallel.shard": 2}),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 4}}, {"parallel.strategy": "hsdp", "parallel.shard": 4}),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": -1}}, {"parallel.strategy": "zero3"}),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}, {"parallel.strategy": "zero3"}),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 1}}, {"parallel.strategy": "zero3"}),
        ({"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 2}}, {"parallel.strategy": "zero2"}),
        ({"zero_optimization": {"cpu_offload": True, "cpu_offload_params": True}},
         {"offload.optimizer": "cpu", "offload.parameters": "cpu"}),
        ({"zero_optimization": {"offload_optimizer": {"device": "none", "buffer_count": 4}}},
         {"offload.optimizer": "none"}),
        ({"zero_optimization": {"offload_optimizer": None, "offload_param": False}}, {}),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": False}}, {"precision.params": "fp32"}),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": "auto"}}, {}),
        ({"fp16": {"enabled": False, "initial_scale_power": 20}}, {"precision.params": "fp32"}),
        ({"bfloat16": {"enabled": True}}, {"precision.params": "bf16"}),
        ({"torch_autocast": {"enabled": True}}, {"precision.params": "bf16"}),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, {"precision.params": "fp16"}),
        ({"fp16": {"enabled": True, "loss_scale": 128, "initial_scale_power": 20}},
         {"precision.params": "fp16", "precision.loss_scale.initial": 128.0, "precision.loss_scale.floor": 128.0,
          "precision.loss_scale.window": 2**31 - 1}),
        ({"fp16": {"min_loss_scale": 0}}, {}),
        ({"communication_data_type": "FP16"}, {"comm.compress": "fp16"}),
        ({"communication_data_type": "fp32"}, {"precision.reduce": "fp32"}),
        ({"communication_data_type": "bf16", "zero_optimization": {"zero_quantized_gradients": True}},
         {"comm.compress": "int8", "comm.error_feedback": False}),
        ({"zero_optimization": {"zero_quantized_gradients": False}}, {}),
        ({"fp32_allreduce": True}, {"precision.reduce": "fp32"}),
        ({"activation_checkpointing": {"partition_activations": False}}, {}),
        ({"activation_checkpointing": {"number_checkpoints": 4}}, {"train.checkpoint_activations": "full"}),
        ({"pipeline": {"activation_checkpoint_interval": 1}}, {"train.checkpoint_activations": "full"}),
        ({"pipeline": {"stages": 2, "partition": "best"}}, {"parallel.pipeline": 2}),
        ({"tensor_parallel": {"autotp_size": 2}}, {"parallel.tensor": 2}),
        ({"sequence_parallel_size": 2}, {"parallel.context": 2}),
        ({"data_efficiency": {"data_sampling": {"dynamic_batching": {
            "enabled": True, "max_tokens": 4096, "min_batch_size": 2, "max_batch_size": 64}}}},
         {"data.batching.max_tokens": 4096, "data.batching.min": 2, "data.batching.max": 64}),
        ({"data_efficiency": {"data_sampling": {"dynamic_batching": {"enabled": False, "max_tokens": 4096}}}}, {}),
        ({"tensor_parallel": {"autotp_size": 0}, "pipeline": {"stages": 1}}, {}),
    ],
)  # fmt: skip
def test_one_field_at_a_time(config: dict[str, Any], expected: dict[str, Any]) -> None:
    """Stages, groups, offloading, old names and precisions become their fields, with 8 workers in the spec."""
    made = of(config, {"cluster": {"workers": 8}, "optim": {"clip": 1.0}})
    assert (flatten(made.tree), made.problems) == (expected, [])


BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@pytest.mark.parametrize(
    ("numbers", "workers", "expected"),
    [
        ((32, 4, 4), 2, {"train.global_batch": 32, "train.micro_batch": 4}),
        ((32, 4, 4), None, {"train.global_batch": 32, "train.micro_batch": 4, "cluster.workers": 2}),
        ((32, 4, None), 2, {"train.global_batch": 32, "train.micro_batch": 4}),
        ((32, 4, None), 3, {"train.global_batch": 32, "train.micro_batch": 4}),  # the last worker's share is smaller
        ((32, None, 4), 2, {"train.global_batch": 32, "train.micro_batch": 4}),
        ((None, 4, 4), 2, {"train.global_batch": 32, "train.micro_batch": 4}),
        ((None, 4, 4), None, {"train.global_batch": 16, "train.micro_batch": 4}),
        ((32, None, None), 2, {"train.global_batch": 32, "train.micro_batch": 16}),
        ((None, 4, None), 2, {"train.global_batch": 8, "train.micro_batch": 4}),
        ((32, "auto", "auto"), 2, {"train.global_batch": 32}),
        (("auto", 4, "auto"), 2, {"train.micro_batch": 4}),
        (("auto", "auto", 4), 2, {"train.global_batch": 64}),  # with the default micro-batch of 8
        (("auto", "auto", "auto"), 2, {}),
    ],
)
def test_two_of_the_batch_numbers_give_the_third(numbers: Any, workers: int | None, expected: dict[str, int]) -> None:
    """total = micro x accumulation x workers, with the numbers that the file and the spec have."""
    config = {k: v for k, v in zip(BATCH, numbers, strict=True) if v is not None}
    made = of(config, {"cluster": {"workers": workers}} if workers else {})
    assert (flatten(made.tree), made.problems) == (expected, [])


def test_a_batch_is_divided_over_replicas() -> None:
    """Micro 4 x accumulation 4 x the replicas that 8 workers make: of 4 ranks each, of 8 by a nearer field, of 4 by the spec; and
    two replicas of two ranks need 4 workers."""
    numbers = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}
    both = {**numbers, "tensor_parallel": {"autotp_size": 2}, "pipeline": {"stages": 2}}
    eight = {"cluster": {"workers": 8}}
    nearer = {**eight, "parallel": {"pipeline": 4}}
    assert of(both, eight).tree["train"]["global_batch"] == 32
    assert of(both, nearer, ("parallel.pipeline",)).tree["train"]["global_batch"] == 16
    assert of(numbers, {**eight, "parallel": {"tensor": 4}}).tree["train"]["global_batch"] == 32
    made = of({**numbers, "train_batch_size": 32, "tensor_parallel": {"autotp_size": 2}}, {})
    assert (made.tree["cluster"]["workers"], made.problems) == (4, [])


def test_a_batch_without_workers_says_so() -> None:
    """If the number of workers is unknown, a note says which values assume one worker."""
    note = "ds.json: cluster.workers is not in the spec: train.global_batch 16 is that of 1 worker"
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4, "gradient_clipping": 1}
    assert of(config, {}).warnings() == [note]
    assert of(config).warnings() == []


@pytest.mark.parametrize(
    ("numbers", "line"),
    [
        ((64, 4, 4), "train_batch_size: 64 is not train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 4 x "
         "cluster.workers 2; change one of them, or take gradient_accumulation_steps out: raydist accumulates as its "
         "workers need"),
        ((30, 4, None), "train_batch_size: 30 is not a multiple of train_micro_batch_size_per_gpu 4; change one of them"),
        ((30, None, 4), "train_batch_size: 30 is not a multiple of gradient_accumulation_steps 4 x cluster.workers 2; "
         "change one of them, or take gradient_accumulation_steps out: raydist accumulates as its workers need"),
        ((31, None, None), "train_batch_size: 31 is not a multiple of cluster.workers 2; change one of them"),
        ((0, 4, None), "train_batch_size: 0 is not a whole number of at least 1; correct it, or take it out"),
    ],
)  # fmt: skip
def test_batch_numbers_that_contradict_one_another(numbers: Any, line: str) -> None:
    """One line names all numbers that contradict one another."""
    assert problems({k: v for k, v in zip(BATCH, numbers, strict=True) if v is not None}) == [line]


def test_a_nearer_batch_settles_the_contradiction() -> None:
    """If --set gives the batch, the file's accumulation is not used, and the warning says so."""
    config = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}
    warned: list[str] = []
    spec = loaded(config, None, "train.global_batch=24", warned=warned)
    assert (spec.train.global_batch, spec.train.micro_batch) == (24, 4)
    assert "gradient_accumulation_steps (it follows from the spec's own batch)" in warned[0]


def optimizer(kind: str, **params: Any) -> dict[str, Any]:
    """A file with this optimizer."""
    return {"optimizer": {"type": kind, "params": params}, "gradient_clipping": 1, "scheduler": {"type": "Own"}}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (optimizer("AdamW"), {"name": "adamw", "lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}),
        (optimizer("Adam", torch_adam=True)["optimizer"], {"weight_decay": 0.01}),
        (optimizer("DeepSpeedCPUAdam", lr=1)["optimizer"], {"name": "adamw", "lr": 1}),
        (optimizer("adam", adam_w_mode=False)["optimizer"], {"name": "adamw", "weight_decay": 0.0}),
        (optimizer("AdamW", adam_w_mode=False, weight_decay=0.1)["optimizer"], {"name": "adamw", "weight_decay": 0.1}),
        (optimizer("SGD", lr=0.1)["optimizer"], {"name": "sgd", "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0}),
        (optimizer("Adafactor")["optimizer"], {"name": "adafactor", "lr": 1e-2}),
        (optimizer("Muon", betas=[0.9, 0.9])["optimizer"], {"name": "muon", "momentum": 0.95, "betas": [0.9, 0.9]}),
    ],
)
def test_optimizers_with_their_own_defaults(config: dict[str, Any], expected: dict[str, Any]) -> None:
    """Parameters that the file leaves out have DeepSpeed's defaults, so that the training stays the same."""
    made = of({"optimizer": config.get("optimizer", config)})
    assert made.problems == []
    assert made.tree["optim"].items() >= expected.items()


def test_defaults_are_named() -> None:
    """A note lists the optimizer's defaults, so that a user whose job says weight_decay: 0.1 sees why it is 0."""
    assert (
        "ds.json: optimizer.params: what is not there has the default of AdamW: eps 1e-08, weight_decay 0.0"
        in of(optimizer("AdamW", lr=1e-4, betas=[0.9, 0.95])).warnings()
    )


def test_what_an_optimizer_does_not_take_is_named() -> None:
    """The warning lists options without a counterpart and learning rates that differ; options that are off are not in it."""
    made = of(optimizer("SGD", lr=0.1, nesterov=True, dampening=0, betas=[0.9, 0.9]))
    assert {"optimizer.params.nesterov", "optimizer.params.betas"} <= set(made.dropped)
    assert "optimizer.params.dampening" in made.own
    made = of(optimizer("Muon", lr=0.1, muon_lr=0.1, adam_lr=0.2))
    assert made.dropped["optimizer.params.adam_lr"] == "one optim.lr serves both"
    assert "optimizer.params.muon_lr" not in made.dropped


def test_an_optimizer_that_would_train_another_model_is_refused() -> None:
    """Adam with L2 and optimizers that raydist lacks are errors, unless the spec sets another value itself."""
    assert problems(optimizer("Adam", adam_w_mode=False, weight_decay=0.01)) == [
        "optimizer.params.adam_w_mode: False is L2 regularisation, and raydist's adamw decouples the weight decay, here "
        "0.01; set adam_w_mode: true, or weight_decay: 0"
    ]
    assert "here 0.1; set" in problems(optimizer("Adam", adam_w_mode=False, weight_decay="auto"))[0]
    assert problems(optimizer("Lamb")) == [
        "optimizer.type: 'Lamb' has no counterpart here; use one of Adam, AdamW, SGD, Adafactor, Muon, or say optim.name "
        "in the spec (with --deepspeed: --set optim.name=adamw)"
    ]
    assert problems(optimizer("AdmaW")) == ["optimizer.type: 'AdmaW' has no counterpart here; did you mean \"AdamW\"?"]
    warned: list[str] = []
    spec = loaded(optimizer("Lamb", lr=5), None, "optim.name=sgd", warned=warned)
    assert (spec.optim.name, spec.optim.lr) == ("sgd", 1e-3)
    assert "optimizer.params.lr, optimizer.type (Lamb: the spec has another)" in warned[0]
    l2 = optimizer("Adam", adam_w_mode=False, weight_decay=0.01)
    assert loaded(l2, None, "optim.weight_decay=0").optim.weight_decay == 0


def scheduler(kind: str, **params: Any) -> dict[str, Any]:
    """A file with this scheduler."""
    return {"scheduler": {"type": kind, "params": params}, "gradient_clipping": "auto"}


LINEAR = {"warmup_type": "linear"}


@pytest.mark.parametrize(
    ("config", "expected", "dropped"),
    [
        (scheduler("WarmupLR", warmup_max_lr=1e-3, **LINEAR),
         {"optim.schedule.name": "constant", "optim.schedule.warmup": 1000, "optim.lr": 1e-3}, []),
        (scheduler("WarmupLR", warmup_num_steps=0), {"optim.schedule.name": "constant", "optim.schedule.warmup": 0}, []),
        (scheduler("WarmupLR", warmup_num_steps=9, warmup_min_lr=1e-5),
         {"optim.schedule.name": "constant", "optim.schedule.warmup": 9},
         ["scheduler.params.warmup_min_lr", "scheduler.params.warmup_type"]),
        (scheduler("WarmupDecayLR", total_num_steps=50, warmup_num_steps=5, **LINEAR),
         {"optim.schedule.name": "linear", "optim.schedule.warmup": 5, "optim.schedule.floor": 0.0, "optim.lr": 1e-3,
          "train.steps": 50}, []),
        (scheduler("WarmupCosineLR", total_num_steps=50, warmup_num_steps=5, warmup_min_ratio=0.1, **LINEAR),
         {"optim.schedule.name": "cosine", "optim.schedule.warmup": 5, "optim.schedule.floor": 1e-4, "train.steps": 50},
         ["scheduler.params.warmup_min_ratio"]),
        (scheduler("OneCycle", cycle_min_lr=1e-4, cycle_max_lr=1e-3, cycle_first_step_size=10, cycle_momentum=False),
         {"optim.schedule.name": "linear", "optim.schedule.warmup": 10, "optim.schedule.floor": 0.1, "optim.lr": 1e-3,
          "train.steps": 20}, []),
        (scheduler("WarmupCosineLR", total_num_steps="auto", warmup_num_steps="auto", cos_min_ratio="auto", **LINEAR),
         {"optim.schedule.name": "cosine"}, []),
        (scheduler("OneCycle", cycle_min_lr=0, cycle_max_lr=1e-3, cycle_first_step_size=10)
         | {"optimizer": {"type": "SGD", "params": dict.fromkeys(("lr", "momentum", "weight_decay"), "auto")}},
         {"optim.name": "sgd", "optim.schedule.name": "linear", "optim.schedule.warmup": 10, "optim.schedule.floor": 0.0,
          "optim.lr": 1e-3, "train.steps": 20}, []),
        (scheduler("OneCycle", cycle_min_lr=0, cycle_max_lr=1e-3, cycle_first_step_size=10, cycle_second_step_size=30,
                   decay_step_size=5, decay_lr_rate=0.1),
         {"optim.schedule.name": "linear", "optim.schedule.warmup": 10, "optim.schedule.floor": 0.0, "optim.lr": 1e-3,
          "train.steps": 40},
         ["scheduler.params.cycle_momentum", "scheduler.params.decay_lr_rate"]),
        (scheduler("LRRangeTest", lr_range_test_min_lr=1e-4), {},
         ["scheduler.params.lr_range_test_min_lr", "scheduler.type"]),
        (scheduler("CosineAnnealingLR", T_max=9), {}, ["scheduler.params.T_max", "scheduler.type"]),
    ],
)  # fmt: skip
def test_schedulers(config: dict[str, Any], expected: dict[str, Any], dropped: list[str]) -> None:
    """Shape, warm-up, peak, floor and length are converted; parameters without a counterpart are dropped and listed."""
    made = of(config, {"cluster": {"workers": 2}})
    assert (flatten(made.tree), made.problems, list(made.dropped)) == (expected, [], dropped)


def test_the_spec_s_own_length_stays() -> None:
    """total_num_steps sets the run's length only if the spec has none; otherwise a note says so."""
    config = scheduler("WarmupDecayLR", total_num_steps=50, warmup_num_steps=5, **LINEAR)
    note = "ds.json: scheduler.params.total_num_steps: 50: the run keeps the spec's {}, and the schedule spans it"
    for train, shown in (({"steps": 100}, "train.steps 100"), ({"epochs": 2}, "train.epochs 2")):
        warned: list[str] = []
        spec = loaded(config, BASE | {"train": train}, warned=warned)
        assert (spec.train.steps, spec.train.epochs) == (train.get("steps"), train.get("epochs"))
        assert warned == [note.format(shown)]
    assert loaded(config, {"data": BASE["data"]}).train.steps == 50
    assert of(config, {"train": {"steps": 50}}).notes == []


def test_what_the_file_leaves_to_chance_is_noted() -> None:
    """Without clipping or a scheduler in the file, a line says what differs from DeepSpeed, unless the spec sets them."""
    config = {"optimizer": {"type": "AdamW", "params": ADAM}}
    assert of(config).warnings() == [
        "ds.json: gradient_clipping is not set: optim.clip stays 1.0, which DeepSpeed 0.19.8 has too; older releases do "
        "not clip",
        "ds.json: scheduler is not set: DeepSpeed holds lr, and optim.schedule stays cosine",
    ]
    assert of(config, {"optim": {"clip": 2, "schedule": "wsd"}}).warnings() == []
    assert of({"gradient_clipping": "auto"}).warnings() == []


ADAM = {"lr": 1e-3, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0}


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"bf16": {"enabled": True}, "torch_autocast": {"enabled": True, "dtype": "fp16"}},
         "no counterpart here, left out: torch_autocast.dtype, torch_autocast.enabled (bf16.enabled decides)"),
        ({"fp16": {"min_loss_scale": 0}},
         "no counterpart here, left out: fp16.min_loss_scale (0: a floor is needed here)"),
        ({"fp16": {"loss_scale": 128}}, "fp16.loss_scale: 128 is static: it stays, and an overflow stops the run"),
        (scheduler("OneCycle", cycle_min_lr=1e-4, cycle_max_lr=1e-3, cycle_second_step_size=0),
         "scheduler.params.cycle_min_lr: 0.0001: the cycle ends there, and starts at 0"),
        ({"optimizer": {"type": "Muon", "params": {"lr": 1, "momentum": 0.9, "weight_decay": 0}}},
         "optimizer.type: Muon: its update is scaled to AdamW's root mean square here: tune lr again"),
    ],
)  # fmt: skip
def test_what_differs_is_said(config: dict[str, Any], line: str) -> None:
    """If a counterpart differs from DeepSpeed's value, a line says how."""
    spec = {"optim": {"clip": 1, "schedule": "wsd", "name": "sgd"}, "train": {"steps": 2000}}
    assert f"ds.json: {line}" in of(config, spec).warnings()


def test_hybrid_sharding_says_what_differs() -> None:
    """A note says that hsdp shards all state within a group, whereas hpZ adds a second copy of the weights only."""
    config = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}, "gradient_clipping": 1}
    assert of(config, {"cluster": {"workers": 4}}).warnings() == [
        "ds.json: zero_optimization.zero_hpz_partition_size: 2: hsdp shards gradients and optimizer state over the 2 ranks "
        "of a group too, not over all ranks: more memory"
    ]


def test_precedence_of_a_file_named_in_a_spec(tmp_path: Path) -> None:
    """Extended file < DeepSpeed file < the spec's own fields < --set; the path is relative to the file that names it."""
    (tmp_path / "deep").mkdir()
    ds({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "gradient_clipping": 0.5,
        "communication_data_type": "bf16"}, "deep/ds.json")  # fmt: skip
    optim = {"clip": 0.1, "lr": 0.1}
    job(BASE | {"parallel": {"strategy": "ddp"}, "precision": "fp32", "optim": optim}, "deep/base.yaml")
    job({"extends": "base.yaml", "deepspeed": "ds.json", "precision": {"reduce": "fp32"}}, "deep/job.yaml")
    warned: list[str] = []
    spec = load("deep/job.yaml", ["optim.clip=0.9"], warn=warned.append)
    assert spec.parallel.strategy == "zero2"  # the DeepSpeed file, over the extended file
    assert (spec.precision.params, spec.precision.reduce) == ("bf16", "fp32")  # own fields, over the DeepSpeed file
    assert spec.optim.clip == 0.9  # --set, over the DeepSpeed file
    assert spec.optim.lr == 0.1  # not in the DeepSpeed file
    assert warned == []


def test_precedence_on_the_command_line() -> None:
    """The spec's fields < --deepspeed < --set; --deepspeed replaces the file that the spec names, and deepspeed=null removes
    it."""
    ds({"zero_optimization": {"stage": 1}}, "other.json")
    spec = BASE | {"parallel": {"strategy": "ddp"}, "optim": {"clip": 0.1}, "deepspeed": "other.json"}
    assert load(job(spec)).parallel.strategy == "ddp"
    assert load(job(spec), ["deepspeed=other.json"]).parallel.strategy == "zero1"
    config = {"zero_optimization": {"stage": 2}, "gradient_clipping": 0.5}
    assert loaded(config, spec).parallel.strategy == "zero2"
    assert loaded(config, spec).optim.clip == 0.5
    assert loaded(config, spec, "optim.clip=3").optim.clip == 3
    assert loaded(config, spec, "deepspeed=null").optim.clip == 0.1


def test_a_nearer_file_takes_the_deepspeed_file_away() -> None:
    """`deepspeed: null` removes the DeepSpeed file of an extended file; another name replaces it."""
    ds({"zero_optimization": {"stage": 3}, "gradient_clipping": 1})
    ds({"zero_optimization": {"stage": 1}, "gradient_clipping": 1}, "other.json")
    job(BASE | {"deepspeed": "ds.json"}, "base.yaml")
    for name, strategy in ((None, "ddp"), ("other.json", "zero1")):
        assert load(job({"extends": "base.yaml", "deepspeed": name})).parallel.strategy == strategy
    assert load(job({"extends": "base.yaml"})).parallel.strategy == "zero3"


def test_a_short_name_keeps_its_value_under_a_section() -> None:
    """With a file that sets only loss scaling or the reduction, `precision: bf16` is still bf16; `schedule: wsd` is still wsd."""
    config = {"fp16": {"enabled": "auto", "initial_scale_power": 8}, "gradient_clipping": 1}
    spec = loaded(config, BASE | {"precision": "bf16", "optim": {"schedule": "wsd"}}, "optim.schedule.warmup=3")
    assert (spec.precision.params, spec.precision.loss_scale.initial) == ("bf16", 256.0)
    assert (spec.optim.schedule.name, spec.optim.schedule.warmup) == ("wsd", 3)


def test_the_deepspeed_file_changes_no_numbers_by_its_name() -> None:
    """A job with the same values but no DeepSpeed file is the same run: the file's name is not among its numbers."""
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, "gradient_clipping": 1}
    by_hand = load(job(BASE), ["precision=bf16", "optim.clip=1", "parallel.strategy=zero1"])
    assert loaded(config) == by_hand
    assert not any("deepspeed" in name for name in by_hand.numbers("f"))


def test_warnings_go_to_stderr_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    """Loading a job prints its warnings to stderr by default."""
    load(job(BASE), (), ds({"aio": {}, "flops_profiler": {"enabled": True}, "gradient_clipping": 1}))
    assert capsys.readouterr().err == (
        "raydist: ds.json: no counterpart here, left out: flops_profiler\n"
        "raydist: ds.json: off, or done by raydist itself: aio\n"
    )


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"zero_optimization": {"stage": 4}},
         "zero_optimization.stage: 4 is not a whole number from 0 to 3; correct it, or take it out"),
        ({"zero_optimization": {"stage": "2"}},
         "zero_optimization.stage: '2' is not a whole number from 0 to 3; correct it, or take it out"),
        ({"fp16": {"enabled": "yes"}}, "fp16.enabled: 'yes' is not true or false; correct it, or take it out"),
        ({"fp16": True}, "fp16: True is not a section; write its fields in braces"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}},
         "fp16.enabled: True and bf16.enabled exclude one another; set one of them to false"),
        ({"data_efficiency": {"data_sampling": {"dynamic_batching": {"enabled": True}}}},
         "data_efficiency.data_sampling.dynamic_batching.enabled: True needs max_tokens; set the tokens of a micro-batch "
         "beside it"),
        ({"gradient_clipping": "1.0"}, "gradient_clipping: '1.0' is not a number; correct it, or take it out"),
        ({"gradient_clipping": True}, "gradient_clipping: True is not a number; correct it, or take it out"),
        ({"train_batch_size": 2.5},
         "train_batch_size: 2.5 is not a whole number of at least 1; correct it, or take it out"),
        ({"optimizer": {"params": {"betas": [0.9]}}},
         "optimizer.params.betas: [0.9] is not two numbers, such as [0.9, 0.999]; correct it, or take it out"),
        ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}},
         "optimizer.params.max_grad_norm: 1 is no parameter of the optimizer; write gradient_clipping at the top of the "
         "file"),
        ({"zero_optimization": {"offload_optimizer": {"device": "disk"}}},
         "zero_optimization.offload_optimizer.device: 'disk' is not one of none, cpu, nvme; correct it, or take it out"),
        ({"scheduler": {"type": "WarmupCosinLR"}},
         "scheduler.type: 'WarmupCosinLR' is no scheduler of DeepSpeed; did you mean \"WarmupCosineLR\"?"),
        ({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0}}},
         "scheduler.params.cycle_max_lr: is missing; OneCycle needs it"),
        ({"gradient_accumulation_step": 2},
         'gradient_accumulation_step: unknown field; did you mean "gradient_accumulation_steps"?'),
        ({"zero_optimization": {"offload_optimiser": {}}},
         'zero_optimization.offload_optimiser: unknown field; did you mean "zero_optimization.offload_optimizer"?'),
        ({"optimizer": {"lr": 1}}, 'optimizer.lr: unknown field; did you mean "optimizer.params.lr"?'),
    ],
)  # fmt: skip
def test_one_mistake_is_one_line(config: dict[str, Any], line: str) -> None:
    """Each mistake is one line: field, value, what it should be, remedy."""
    assert problems(config | {"gradient_clipping": 1} | config) == [line]


def test_a_field_that_nobody_knows_is_named() -> None:
    """A key that DeepSpeed does not know is dropped by name: DeepSpeed ignores it as well."""
    assert of({"my_team": "x"}).dropped == {"my_team": "DeepSpeed does not know it either"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1,}', "ds.json: not valid JSON at line 1, column "),
        ('{"fp16": {"enabled": true, // on\n}}', "take out what only DeepSpeed reads: comments, trailing commas"),
        ('{"steps_per_print": 1, "steps_per_print": 2}', "ds.json: the key 'steps_per_print' stands twice; take one"),
        ("[]", 'ds.json: holds list, not fields; begin with {"train_batch_size": ...}'),
        ("\xff", "ds.json: cannot be read: 'utf-8' codec"),
    ],
)
def test_a_file_that_cannot_be_read(text: str, expected: str) -> None:
    """An unreadable file gives one clear line."""
    Path("ds.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(SpecError) as caught:
        load(job(BASE), (), "ds.json")
    assert expected in caught.value.message
    assert len(caught.value.message.splitlines()) == 1


def test_a_missing_file_suggests_its_neighbour() -> None:
    """For a misspelt path a similar file name is suggested; a value that is no file name is refused."""
    ds({}, "ds_config.json")
    with pytest.raises(SpecError, match=r'^ds_confg.json: no such file; did you mean "ds_config.json"\?$'):
        load(job(BASE), (), "ds_confg.json")
    with pytest.raises(
        SpecError, match=r"^job.yaml: deepspeed: 3 is not a file name; write deepspeed: ds_config.json$"
    ):
        load(job(BASE | {"deepspeed": 3}))


def test_all_problems_at_once() -> None:
    """Mistakes of the file and of the job are reported together; problems that only follow from one of them are not."""
    config = {"zero_optimization": {"stage": 5}, "fp16": {"enabled": 1}, "optimizer": {"type": "AdamW", "params": {"eps": 0}},
              "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "many"}}}  # fmt: skip
    with pytest.raises(SpecError) as caught:
        loaded(config, {"data": {"source": "x"}, "modle": {}})
    lines = caught.value.message.splitlines()
    assert [line.split(": ")[:2] for line in lines] == [
        ["ds.json", "zero_optimization.stage"],
        ["ds.json", "fp16.enabled"],
        ["ds.json", "scheduler.params.total_num_steps"],
        ["ds.json (optimizer.params.eps)", "optim.eps"],
        ["job.yaml", "modle"],
    ]
    assert not any("train.steps" in line for line in lines)


def test_a_mistake_of_the_file_alone_stops_the_job() -> None:
    """A mistake in the DeepSpeed file stops a job that would be valid without the file."""
    with pytest.raises(SpecError, match=r"^ds.json: zero_optimization.stage: 5 is not a whole number from 0 to 3; .*$"):
        loaded({"zero_optimization": {"stage": 5}})


def test_a_value_that_the_spec_refuses_names_the_field_of_the_file() -> None:
    """If the spec refuses a value or a combination, the line names the field of the DeepSpeed file."""
    config = {
        "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "nvme"}}
    }
    with pytest.raises(SpecError) as caught:
        loaded(config)
    assert caught.value.message.startswith("ds.json: offload.path: is needed by optimizer: nvme; name a folder")
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    with pytest.raises(SpecError) as caught:
        loaded(config)
    assert caught.value.message == (
        "ds.json (zero_optimization.offload_param.device): offload.parameters: 'cpu' needs sharded parameters, and zero2 "
        "keeps them whole; set parallel.strategy: zero3 or hsdp"
    )
    with pytest.raises(SpecError, match=r"^ds.json \(gradient_clipping\): optim.clip: -1: input should be"):
        loaded({"gradient_clipping": -1})


def test_parse_does_not_overlook_a_file() -> None:
    """`parse` refuses values that name a DeepSpeed file, because it cannot read it."""
    with pytest.raises(SpecError, match="deepspeed: 'ds.json' cannot be read here; load the job from its file"):
        parse(BASE | {"deepspeed": "ds.json"})


def test_the_yaml_says_whence_and_what_is_left_out() -> None:
    """Each value has its field of the DeepSpeed file in a comment; dropped, unneeded and "auto" fields are listed in comments."""
    text = of(HF_ZERO3_CPU).to_yaml()
    assert yaml.safe_load(text) == HF_ZERO3_TREE
    assert "  strategy: zero3  # zero_optimization.stage\n" in text
    comments = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    for name in ("fp16.hysteresis (the scale halves at the first overflow)", "zero_optimization.overlap_comm",
                 '"auto", left to the spec: bf16.enabled, fp16.enabled'):  # fmt: skip
        assert name in comments
    assert max(map(len, text.splitlines())) <= 132
    assert of(AUTO_BATCH).to_yaml().endswith("\n{}\n")


def test_the_table_s_sections_and_fields_do_not_clash() -> None:
    """No name is both a field and a section, because the field would hide the section's fields."""
    for name in FIELDS:
        for other in FIELDS:
            assert not other.startswith(f"{name}."), (name, other)


def test_the_spec_reads_deepspeed_files_without_torch_or_ray() -> None:
    """Importing the conversion needs neither torch, ray, deepspeed nor numpy."""
    code = "import sys, raydist.spec.deepspeed; print(sys.modules.keys() & {'torch', 'ray', 'deepspeed', 'numpy'})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() == "set()", done.stderr
