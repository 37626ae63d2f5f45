"""What DeepSpeed's batch sizes, ZeRO stages, offloading and number formats become here; training.py has the optimizer.

Runs anywhere. A rule reads fields and puts others. It runs once, whichever of its fields are there.
"""

from __future__ import annotations

from raydist.spec.deepspeed.reading import Reading
from raydist.spec.training import OptimSpec, TrainSpec

TOTAL, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def replica(r: Reading) -> None:
    """Ranks that share a layer or a sequence, and stages of a pipeline; 0 and 1 are none."""
    for name, field in (
        ("tensor_parallel.autotp_size", "tensor"),
        ("sequence_parallel_size", "context"),
        ("pipeline.stages", "pipeline"),
    ):
        size = r.get(name)
        if size is not None and size > 1:
            r.put(f"parallel.{field}", size, name)


def _ranks(r: Reading) -> int:
    """Ranks of a replica, by the fields that count in the end."""
    found = 1
    for name in ("parallel.tensor", "parallel.context", "parallel.pipeline"):
        value = r.spec.get(name) if name in r.nearer else r.whole(name)
        found *= value if isinstance(value, int) and value > 0 else 1
    return found


def batch(r: Reading) -> None:
    """total = micro x accumulation x replicas: two of the file's three numbers and the spec's workers give the third.

    A replica is one worker, or those of a tensor group, a context group and a pipeline. With fewer than two, DeepSpeed's own rule:
    an absent accumulation is 1. One that is "auto" leaves the rest to the spec.
    """
    total, micro, steps = r.get(TOTAL), r.get(MICRO), r.get(ACCUMULATION)
    said, each = r.whole("cluster.workers"), _ranks(r)
    workers = max((said or 1) // each, 1)
    of = "cluster.workers" if each == 1 else f"(cluster.workers / {each} ranks of a replica)"
    alone = r.absent(ACCUMULATION) and (r.absent(TOTAL) or r.absent(MICRO))
    if total and micro and steps:
        if said is None and total % (micro * steps) == 0:
            made = f"{TOTAL} / ({MICRO} x {ACCUMULATION})" + (f" x {each} ranks of a replica" if each > 1 else "")
            r.put("cluster.workers", total // (micro * steps) * each, made)
        elif total != micro * steps * workers:
            _contradiction(r, f"{MICRO} {micro} x {ACCUMULATION} {steps} x {of} {workers}")
    elif total and micro and total % micro:
        _contradiction(r, f"a multiple of {MICRO} {micro}")
    elif total and steps and not micro:
        if total % (steps * workers):
            _contradiction(r, f"a multiple of {ACCUMULATION} {steps} x {of} {workers}")
        else:
            _derive(r, "train.micro_batch", total // (steps * workers), f"{TOTAL} / ({ACCUMULATION} x {of})")
    elif micro and steps:
        _derive(r, "train.global_batch", micro * steps * workers, f"{MICRO} x {ACCUMULATION} x {of}")
    elif total and alone:
        if total % workers:
            _contradiction(r, f"a multiple of {of} {workers}")
        else:
            _derive(r, "train.micro_batch", total // workers, f"{TOTAL} / {of}")
    elif micro and alone:
        _derive(r, "train.global_batch", micro * workers, f"{MICRO} x {of}")
    elif steps:
        size = r.whole("train.micro_batch") or TrainSpec.model_fields["micro_batch"].default
        _derive(r, "train.global_batch", size * steps * workers, f"{ACCUMULATION} x train.micro_batch x {of}")
    for name, value, source in (("train.global_batch", total, TOTAL), ("train.micro_batch", micro, MICRO)):
        if value:
            r.put(name, value, source)


def _contradiction(r: Reading, should: str) -> None:
    if {"train.global_batch", "train.micro_batch"} & set(r.nearer):
        # The spec's own batch stands instead, and is checked as such.
        if ACCUMULATION in r.given:
            r.lose(ACCUMULATION, "it follows from the spec's own batch")
        return
    out = f", or take {ACCUMULATION} out: raydist accumulates as its workers need" if ACCUMULATION in r.given else ""
    r.problem(TOTAL, r.given[TOTAL], f"is not {should}", f"change one of them{out}")


def _derive(r: Reading, name: str, value: int, source: str) -> None:
    r.put(name, value, source)
    if "cluster.workers" not in r.spec:
        r.notes.append(f"cluster.workers is not in the spec: {name} {value} is that of 1 worker")


DYNAMIC = "data_efficiency.data_sampling.dynamic_batching"


def dynamic_batching(r: Reading) -> None:
    """Micro-batches up to a number of tokens. DeepSpeed's step has a number of them; here it has sequences, or tokens."""
    names = {"max_tokens": "max_tokens", "min": "min_batch_size", "max": "max_batch_size"}
    given = {field: r.get(f"{DYNAMIC}.{name}") for field, name in names.items()}
    if not r.get(f"{DYNAMIC}.enabled"):
        for field, value in given.items():
            if value is not None:
                r.lose(f"{DYNAMIC}.{names[field]}", "dynamic_batching is not enabled")
        return
    if given["max_tokens"] is None:
        r.problem(f"{DYNAMIC}.enabled", True, "needs max_tokens", "set the tokens of a micro-batch beside it")
    for field, value in given.items():
        if value is not None:
            r.put(f"data.batching.{field}", value, f"{DYNAMIC}.{names[field]}")
    r.notes.append("data.batching: a step has train.global_batch sequences, or data.batching.global_tokens tokens")


ZERO = "zero_optimization"
STRATEGIES = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}


def strategy(r: Reading) -> None:
    """The stage. At stage 3, partitions over fewer ranks than there are become hybrid sharding."""
    stage = r.get(f"{ZERO}.stage")
    if stage is None:
        return
    r.put("parallel.strategy", STRATEGIES[stage], f"{ZERO}.stage")
    workers = r.whole("cluster.workers")
    for name in ("mics_shard_size", "zero_hpz_partition_size"):
        size = r.get(f"{ZERO}.{name}", 1)
        if size <= 1 or (workers is not None and size >= workers):
            continue  # not asked for, or one group of all: plain ZeRO-3
        if stage != 3:
            r.lose(f"{ZERO}.{name}", "only stage 3 has it")
            continue
        r.put("parallel.strategy", "hsdp", f"{ZERO}.{name}")
        r.put("parallel.shard", size, f"{ZERO}.{name}")
        if name == "zero_hpz_partition_size":
            r.notes.append(
                f"{ZERO}.{name}: {size}: hsdp shards gradients and optimizer state over the {size} ranks of a group too, "
                "not over all ranks: more memory"
            )
        return


def offload_optimizer(r: Reading) -> None:
    """cpu and nvme as they are; `cpu_offload` is the old name."""
    name = f"{ZERO}.offload_optimizer"
    device = r.get(f"{name}.device")
    if device is not None:
        r.put("offload.optimizer", device, f"{name}.device")
    elif (old := r.get(f"{ZERO}.cpu_offload")) is not None:
        r.put("offload.optimizer", "cpu" if old else "none", f"{ZERO}.cpu_offload")
    if device == "nvme" and (path := r.get(f"{name}.nvme_path")) is not None:
        r.put("offload.path", path, f"{name}.nvme_path")


def offload_param(r: Reading) -> None:
    """cpu as it is, nvme as cpu; `cpu_offload_param` and `cpu_offload_params` are old names."""
    name = f"{ZERO}.offload_param.device"
    device = r.get(name)
    if device == "nvme":
        r.lose(name, "nvme: taken as cpu")
    if device is not None:
        r.put("offload.parameters", "none" if device == "none" else "cpu", name)
        return
    for old in (f"{ZERO}.cpu_offload_param", f"{ZERO}.cpu_offload_params"):
        if (value := r.get(old)) is not None:
            r.put("offload.parameters", "cpu" if value else "none", old)


FORMATS = {"fp16.enabled": "fp16", "bf16.enabled": "bf16", "bfloat16.enabled": "bf16", "torch_autocast.enabled": None}
AUTOCAST = {"float16": "fp16", "fp16": "fp16", "half": "fp16", "bfloat16": "bf16", "bf16": "bf16", "float32": "fp32",
            "fp32": "fp32"}  # fmt: skip


def number_format(r: Reading) -> None:
    """fp16, bf16 or torch_autocast's, whichever is on; fp32 where all that are named are off."""
    said = {name: r.get(name) for name in FORMATS if r.get(name) is not None}
    on = [name for name, value in said.items() if value]
    if on[:1] == ["fp16.enabled"] and {"bf16.enabled", "bfloat16.enabled"} & set(on):
        r.problem("fp16.enabled", True, "and bf16.enabled exclude one another", "set one of them to false")
    elif on:
        r.put("precision.params", FORMATS[on[0]] or AUTOCAST[r.get("torch_autocast.dtype", "bfloat16")], on[0])
        for other in on[1:]:
            r.lose(other, f"{on[0]} decides")
    elif said and not set(FORMATS) & set(r.auto):
        r.put("precision.params", "fp32", next(iter(said)))


NEVER = 2**31 - 1
"""A window in steps that no run reaches."""


def loss_scale(r: Reading) -> None:
    """A dynamic scale as it is; a static one as a dynamic one that can move neither up nor down."""
    scale = "precision.loss_scale"
    if static := r.get("fp16.loss_scale", 0):
        for name, value in (("initial", float(static)), ("window", NEVER), ("floor", float(static))):
            r.put(f"{scale}.{name}", value, "fp16.loss_scale")
        r.notes.append(f"fp16.loss_scale: {static:g} is static: it stays, and an overflow stops the run")
        return
    if (power := r.get("fp16.initial_scale_power")) is not None:
        r.put(f"{scale}.initial", 2.0**power, "fp16.initial_scale_power")
    if (window := r.get("fp16.loss_scale_window")) is not None:
        r.put(f"{scale}.window", window, "fp16.loss_scale_window")
    if (floor := r.get("fp16.min_loss_scale")) == 0:
        r.lose("fp16.min_loss_scale", "0: a floor is needed here")
    elif floor is not None:
        r.put(f"{scale}.floor", float(floor), "fp16.min_loss_scale")


def reduction(r: Reading) -> None:
    """In which format gradients are sent to be summed. Experts on several ranks have no compression, but sums in 16 bits."""
    quantized, dtype = f"{ZERO}.zero_quantized_gradients", r.get("communication_data_type")
    experts = (r.whole("parallel.expert") or 1) > 1
    if r.get(quantized) and experts:
        r.lose(quantized, "there is no compression with parallel.expert")
    elif r.get(quantized):
        r.put("comm.compress", "int8", quantized)
        r.put("comm.error_feedback", False, quantized)
        return
    if dtype is not None and (dtype == "fp32" or experts or "precision.reduce" in r.nearer):
        r.put("precision.reduce", dtype, "communication_data_type")
    elif dtype is not None:
        r.put("comm.compress", dtype, "communication_data_type")
    elif r.get("fp32_allreduce"):
        r.put("precision.reduce", "fp32", "fp32_allreduce")


def clipping(r: Reading) -> None:
    """0 is none. An absent one leaves the spec's, as DeepSpeed's default is another in each half of its history."""
    value = r.get("gradient_clipping")
    default = OptimSpec.model_fields["clip"].default
    if value is not None:
        r.put("optim.clip", value, "gradient_clipping")
    elif r.absent("gradient_clipping") and "optim.clip" not in r.spec:
        r.notes.append(
            f"gradient_clipping is not set: optim.clip stays {default}, which DeepSpeed 0.19.8 has too; older releases "
            "do not clip"
        )


def activations(r: Reading) -> None:
    """A section that asks for anything means that the model computes its activations again."""
    section = "activation_checkpointing"
    fields = ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization", "number_checkpoints")
    names = (*(f"{section}.{field}" for field in fields), "pipeline.activation_checkpoint_interval")
    asked = [name for name in names if r.get(name)]
    for name in asked:
        r.lose(name, "every block is computed again")
    if asked:
        r.put("train.checkpoint_activations", "full", asked[0])
