"""FIELDS: every field that a DeepSpeed file may have, and what becomes of it.

Runs anywhere. The names are DeepSpeed 0.19.8's, and those of older releases that users' files still have. A field

    takes(check, rule)   has a type, and a rule that turns it into fields of the spec
    OWN                  asks for what raydist does by itself, or decides by the device it finds
    lost(why, off=...)   asks for what nothing here does, unless its value is `off`

A section that is named as a whole is not looked into.
"""

from __future__ import annotations

from raydist.spec.deepspeed import rules, training
from raydist.spec.deepspeed.reading import (
    OWN,
    Field,
    Rule,
    anything,
    flag,
    lost,
    number,
    one_of,
    pair,
    takes,
    text,
    whole,
)


def _in(section: str, names: str, made: Field) -> dict[str, Field]:
    """The same for each of the names (between blanks) of a section; "" is the file itself."""
    return {f"{section}.{name}" if section else name: made for name in names.split()}


FIELDS: dict[str, Field] = {
    # Ranks of a replica, which the batch needs
    "tensor_parallel.autotp_size": takes(whole(0), rules.replica),
    **_in("tensor_parallel", "dtype tp_overlap_comm keep_module_on_host replace_with_kernel_inject", OWN),
    **_in("tensor_parallel", "tensor_parallel injection_policy_tuple", lost("the model's own tensor_rules say it")),
    "pipeline.stages": takes(whole(0), rules.replica),
    "sequence_parallel_size": takes(whole(0), rules.replica),
    **_in("pipeline", "pipe_partitioned grad_partitioned use_reentrant", OWN),
    "pipeline.partition": lost("stages are cut by cost; parallel.pipeline_cut gives the blocks of each", off="best"),
    "pipeline.seed_layers": lost("each block has a seed of its own anyway", off=False),
    "pipeline.activation_checkpoint_interval": takes(whole(0), rules.activations),
    # The batch
    "train_batch_size": takes(whole(1), rules.batch),
    "train_micro_batch_size_per_gpu": takes(whole(1), rules.batch),
    "gradient_accumulation_steps": takes(whole(1), rules.batch),
    "managed_gradient_accumulation": OWN,
    "dataloader_drop_last": lost("every sample is trained", off=False),
    **_in(f"{rules.DYNAMIC}", "max_tokens min_batch_size max_batch_size", takes(whole(1), rules.dynamic_batching)),
    f"{rules.DYNAMIC}.enabled": takes(flag, rules.dynamic_batching),
    f"{rules.DYNAMIC}.lr_scaling_method": lost(
        "the loss is the mean over all tokens of a step, and optim.lr stays", off="none"
    ),
    f"{rules.DYNAMIC}.sequence_picking_order": lost("the order is shuffled, like lengths are together", off="random"),
    **_in(f"{rules.DYNAMIC}", "metrics_path verbose", OWN),
    **_in("data_efficiency", "enabled seed data_sampling.enabled data_sampling.num_epochs", OWN),
    **_in("data_efficiency.data_sampling", "num_workers pin_memory", OWN),
    **_in("data_efficiency", "data_sampling.curriculum_learning data_routing", lost()),
    # ZeRO
    "zero_optimization.stage": takes(whole(0, 3), rules.strategy),
    "zero_optimization.zero_hpz_partition_size": takes(whole(0), rules.strategy),
    "zero_optimization.mics_shard_size": takes(whole(-1), rules.strategy),
    **_in(
        "zero_optimization",
        "allgather_partitions reduce_scatter overlap_comm contiguous_gradients round_robin_gradients compute_grad_norm "
        "use_multi_rank_bucket_allreduce parameter_alignment load_from_fp32_weights elastic_checkpoint legacy_stage1 "
        "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save "
        "gather_16bit_weights_on_model_save memory_efficient_linear override_module_apply pipeline_loading_checkpoint "
        "log_trace_cache_warnings enable_sanity_checks",
        OWN,
    ),
    **_in(
        "zero_optimization",
        "allgather_bucket_size reduce_bucket_size sub_group_size stage3_prefetch_bucket_size prefetch_bucket_size "
        "stage3_param_persistence_threshold param_persistence_threshold stage3_model_persistence_threshold "
        "model_persistence_threshold stage3_max_live_parameters max_live_parameters stage3_max_reuse_distance "
        "max_reuse_distance stage3_module_granularity_threshold module_granularity_threshold "
        "stage3_partition_stream_chunk_size partition_stream_chunk_size leaf_module zenflow zeropp_loco_param",
        lost(),
    ),
    **_in(
        "zero_optimization",
        "zero_quantized_weights zero_quantized_nontrainable_weights "
        "mics_hierarchical_params_gather stage3_use_all_reduce_for_fetch_params use_all_reduce_for_fetch_params "
        "stage3_allgather_sequential allgather_sequential save_muon_momentum_buffer_in_memory",
        lost(off=False),
    ),
    "zero_optimization.ignore_unused_parameters": lost("a parameter without a gradient is an error here", off=False),
    **_in("", "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer disable_allgather", OWN),
    "allgather_size": lost(),
    # Offloading
    "zero_optimization.offload_optimizer.device": takes(one_of("none", "cpu", "nvme"), rules.offload_optimizer),
    "zero_optimization.offload_optimizer.nvme_path": takes(text, rules.offload_optimizer),
    "zero_optimization.cpu_offload": takes(flag, rules.offload_optimizer),
    "zero_optimization.offload_optimizer.ratio": lost("all of the state is offloaded", off=1),
    "zero_optimization.offload_optimizer.super_offload": lost(off=False),
    "zero_optimization.offload_param.device": takes(one_of("none", "cpu", "nvme"), rules.offload_param),
    "zero_optimization.offload_param.nvme_path": takes(text, rules.offload_param),
    "zero_optimization.cpu_offload_param": takes(flag, rules.offload_param),
    "zero_optimization.cpu_offload_params": takes(flag, rules.offload_param),
    "zero_optimization.cpu_offload_use_pin_memory": OWN,
    **_in(
        "zero_optimization.offload_optimizer",
        "pin_memory pipeline pipeline_read pipeline_write fast_init convert_grad_on_cpu",
        OWN,
    ),
    **_in("zero_optimization.offload_optimizer", "buffer_count buffer_size cpuadam_cores_perc", lost()),
    "zero_optimization.offload_param.pin_memory": OWN,
    **_in("zero_optimization.offload_param", "buffer_count buffer_size max_in_cpu", lost()),
    "aio": lost(),
    # Number formats
    "fp16.enabled": takes(flag, rules.number_format),
    "bf16.enabled": takes(flag, rules.number_format),
    "bfloat16.enabled": takes(flag, rules.number_format),
    "torch_autocast.enabled": takes(flag, rules.number_format),
    "torch_autocast.dtype": takes(one_of(*rules.AUTOCAST), rules.number_format),
    "torch_autocast.lower_precision_safe_modules": lost(),
    "fp16.loss_scale": takes(number, rules.loss_scale),
    "fp16.initial_scale_power": takes(whole(0, 127), rules.loss_scale),
    "fp16.loss_scale_window": takes(whole(1), rules.loss_scale),
    "fp16.min_loss_scale": takes(number, rules.loss_scale),
    "fp16.hysteresis": lost("the scale halves at the first overflow", off=1),
    "fp16.consecutive_hysteresis": lost(off=False),
    "fp16.fp16_master_weights_and_grads": lost("they are fp32", off=False),
    "bf16.bf16_master_weights_and_grads": lost("they are fp32", off=False),
    "bf16.bf16_optimizer_states": lost("they are fp32", off=False),
    **_in("fp16", "auto_cast fused_mode", OWN),
    **_in("bf16", "auto_cast immediate_grad_update check_grad_overflow", OWN),
    "zero_optimization.zero_quantized_gradients": takes(flag, rules.reduction),
    "communication_data_type": takes(one_of("fp32", "fp16", "bf16"), rules.reduction),
    "fp32_allreduce": takes(flag, rules.reduction),
    "data_types.grad_accum_dtype": lost("gradients are accumulated in fp32", off="fp32"),
    **_in("data_types", "param_dtype buffer_dtype keep_in_fp32_modules", lost("autocast decides")),
    "amp": lost("see precision"),
    # Gradients
    "gradient_clipping": takes(number, rules.clipping),
    **_in("", "prescale_gradients gradient_predivide_factor", OWN),
    "gradient_allreduce_op": lost("always the mean over the tokens of the global batch", off="mean"),
    "sparse_gradients": lost(off=False),
    # Optimizer
    "optimizer.type": takes(text, training.optimizer),
    **_in("optimizer.params", "lr eps weight_decay momentum muon_lr adam_lr", takes(number, training.optimizer)),
    "optimizer.params.betas": takes(pair, training.optimizer),
    **_in("optimizer.params", "adam_w_mode torch_adam", takes(flag, training.optimizer)),
    "optimizer.params.max_grad_norm": takes(anything, training.no_max_grad_norm),
    **_in("optimizer.params", "foreach fused set_grad_none fp32_optimizer_states", OWN),
    "optimizer.params.bias_correction": lost(off=True),
    **_in("optimizer.params", "amsgrad nesterov maximize capturable differentiable per_head_muon", lost(off=False)),
    "optimizer.params.dampening": lost(off=0),
    **_in(
        "optimizer.params",
        "ns_method beta2_decay d max_coeff min_coeff freeze_step cuda_aware comm_backend_name",
        lost(),
    ),
    "optimizer.legacy_fusion": OWN,
    # Scheduler
    "scheduler.type": takes(text, training.scheduler),
    **_in(
        "scheduler.params",
        "warmup_min_lr warmup_max_lr warmup_min_ratio cos_min_ratio cycle_min_lr cycle_max_lr decay_lr_rate",
        takes(number, training.scheduler),
    ),
    "scheduler.params.warmup_type": takes(one_of("log", "linear"), training.scheduler),
    "scheduler.params.warmup_num_steps": takes(whole(0), training.scheduler),
    "scheduler.params.total_num_steps": takes(whole(1), training.scheduler),
    "scheduler.params.cycle_first_step_size": takes(whole(1), training.scheduler),
    "scheduler.params.cycle_second_step_size": takes(whole(0), training.scheduler),
    "scheduler.params.decay_step_size": takes(whole(0), training.scheduler),
    "scheduler.params.cycle_momentum": takes(flag, training.scheduler),
    **_in("scheduler.params", "cycle_first_stair_count cycle_second_stair_count decay_mom_rate", lost(off=0)),
    **_in(
        "scheduler.params",
        "cycle_min_mom cycle_max_mom lr_range_test_min_lr lr_range_test_step_rate lr_range_test_step_size "
        "lr_range_test_staircase",
        lost(),
    ),
    "scheduler.params.last_batch_iteration": lost("a resumed run has its own step", off=-1),
    # Activations
    **_in(
        "activation_checkpointing",
        "partition_activations cpu_checkpointing contiguous_memory_optimization",
        takes(flag, rules.activations),
    ),
    "activation_checkpointing.number_checkpoints": takes(whole(0), rules.activations),
    **_in("activation_checkpointing", "synchronize_checkpoint_boundary profile", lost(off=False)),
    # The rest
    **_in("", "steps_per_print log_level checkpoint vocabulary_size", OWN),
    "compile": lost("see train.compile"),
    "expert_parallel": lost("the model says its experts (model.name), parallel.expert over how many ranks"),
    **_in(
        "",
        "wall_clock_breakdown memory_breakdown dump_state graph_harvesting disable_python_gc "
        "use_data_before_expert_parallelism",
        lost(off=False),
    ),
    **_in(
        "",
        "flops_profiler tensorboard wandb csv_monitor comet comms_logger timers autotuning elasticity "
        "curriculum_learning compression_training quantize_training weight_quantization sparse_attention "
        "progressive_layer_drop eigenvalue hybrid_engine nebula datastates_ckpt "
        "checkpoint_writer seq_parallel_communication_data_type seq_parallel_comm_data_type",
        lost(),
    ),
}

RULES: list[Rule] = list(dict.fromkeys(field.rule for field in FIELDS.values() if field.rule is not None))
"""Each rule once, in the table's order: the batch first, for it knows the workers."""
