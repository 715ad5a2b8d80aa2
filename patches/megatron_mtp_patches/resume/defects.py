"""A resume: what a run that loads a checkpoint does otherwise than one that never stopped."""

from __future__ import annotations

from typing import Any

from ..defects.conditions import expert_parallel, has_megatron_fsdp, loads_model_only, loads_optimizer
from ..defects.declare import Defect, Diff, Gap, Sign

_LOADING = "megatron.training.checkpointing:load_checkpoint"
_OPTIMIZER = "megatron.core.optimizer.optimizer"
_KEYS = f"{_OPTIMIZER}:param_group_identifier_keys"
_LOADS_MAIN_PARAMS = (
    "--load-main-params-from-ckpt with --load or --pretrained-checkpoint, --num-experts, "
    "--expert-model-parallel-size > 1, --use-distributed-optimizer, --bf16 or --fp16"
)


def _has_learning_rates_of_groups(run: Any) -> bool:
    """True if groups differ in their learning rates alone: those of --decoupled-lr without Muon, which takes the
    weights beside them, and those of muP in a model that is not the base's size.
    """
    base = run.mup_base_hidden_size
    is_decoupled = run.decoupled_lr and "muon" not in str(run.optimizer)
    return bool(is_decoupled or (run.use_mup and base and base != run.hidden_size))


def _loads_main_params_of_experts(run: Any) -> bool:
    """True if distributed optimizers make main parameters of a checkpoint's model, and experts have a separate one."""
    has_experts = run.num_experts and expert_parallel(run) > 1
    is_distributed = run.use_distributed_optimizer and (run.bf16 or run.fp16)
    return bool(run.load_main_params_from_ckpt and loads_model_only(run) and is_distributed and has_experts)


def _keeps_main_params_apart(run: Any) -> bool:
    """True if the distributed optimizer itself, not its inner optimizer or Megatron-FSDP, has main parameters."""
    return not (run.use_precision_aware_optimizer or run.use_megatron_fsdp)


DEFECTS = (
    Defect(
        id="ML-4705a",
        effect="After a resume groups of parameters that differ in nothing but their learning rates all have that of "
        "one of them: --decoupled-lr and the rates of muP are lost",
        severity=5,
        signs=Sign(_KEYS, has="is_decoupled_lr", lacks=("max_lr", "_param_group_override_keys")),
        affects=lambda run: (  # a checkpoint of Megatron-FSDP has the settings of each parameter
            loads_optimizer(run) and _has_learning_rates_of_groups(run) and not has_megatron_fsdp(run)
        ),
        when="--load (without --no-load-optim or --finetune) with --decoupled-lr and another optimizer than Muon, or "
        "--use-mup and a --mup-base-hidden-size other than --hidden-size, without --use-megatron-fsdp",
        only_if="the optimizer is distributed, or these groups have as many parameters; else loading ends in an error",
        state="fixed in 0.19.0",
        evidence="reproduced",
        patch="keep-learning-rates-at-resume",
        second_reading="sources of 0.16.1, 0.17.1, 0.18.2 and main, which optimizers pair groups so, and which groups "
        "muP makes in 0.18.2 and main; its program",
    ),
    Defect(
        id="ML-3720a",
        effect="--override-opt-param-scheduler does not bring in a new --lr or --min-lr: the run goes on with the "
        "checkpoint's",
        severity=4,
        signs=Sign(_KEYS, has="is_decoupled_lr", lacks=("max_lr", "_param_group_override_keys")),
        fixed_by=Sign(_LOADING, has='param_group["max_lr"] = max_lr'),
        affects=lambda run: (  # Megatron-FSDP goes on so in 0.19, too
            loads_optimizer(run) and run.override_opt_param_scheduler and not has_megatron_fsdp(run)
        ),
        when="--load (without --no-load-optim or --finetune) with --override-opt-param-scheduler, without "
        "--use-megatron-fsdp",
        only_if="--lr or --min-lr differs from the checkpoint's",
        more_links=(
            "NVIDIA/Megatron-LM#1138",
            "NVIDIA/Megatron-LM#1284",
        ),
        state="fixed in 0.19.0, where ML-3720b takes its place",
        evidence="reproduced",
        patch="keep-learning-rates-at-resume",
        second_reading="sources of 0.16.1 to main, with Megatron-FSDP as well; the issues; its program",
    ),
    Defect(
        id="ML-3720b",
        effect="A resume with another --lr or --min-lr ends in an error: no parameter group of the checkpoint fits",
        kind="crash",
        severity=3,
        signs=Sign(_KEYS, has="_param_group_override_keys"),
        affects=lambda run: (  # Megatron-FSDP takes the checkpoint's groups as they are
            loads_optimizer(run)
            and (run.override_opt_param_scheduler or run.use_checkpoint_opt_param_scheduler)
            and not has_megatron_fsdp(run)
        ),
        when="--load (without --no-load-optim or --finetune) with --override-opt-param-scheduler or "
        "--use-checkpoint-opt-param-scheduler, without --use-megatron-fsdp",
        only_if="--lr or --min-lr differs from the checkpoint's",
        introduced_by=("NVIDIA/Megatron-LM#4705",),
        state="open",
        evidence="reproduced",
        patch="keep-learning-rates-at-resume",
        second_reading="sources of 0.19.0 and main, and which optimizers look for groups there; its program",
    ),
    Defect(
        id="ML-7173",
        effect="--override-opt-param-scheduler gives all parameters --lr and --min-lr after a resume: --decoupled-lr "
        "and the rates of muP are lost",
        severity=3,
        signs=Sign(_LOADING, has='param_group["max_lr"] = max_lr'),
        affects=lambda run: (
            run.is_of_megatron_trainer
            and loads_optimizer(run)
            and run.override_opt_param_scheduler
            and _has_learning_rates_of_groups(run)
        ),
        when="--load (without --no-load-optim or --finetune) with --override-opt-param-scheduler, and --decoupled-lr, "
        "or --use-mup and a --mup-base-hidden-size other than --hidden-size",
        introduced_by=("NVIDIA/Megatron-LM#3720",),
        state="open",
        evidence="read",
        patch="keep-learning-rates-at-resume",
        second_reading="sources of 0.19.0 and main, and which groups muP makes there; the issue",
    ),
    Defect(
        id="ML-5071",
        effect="The first step after loading only a model puts the initial weights back: the optimizer's copy on the "
        "CPU is not refreshed",
        kind="lost state",
        severity=5,
        signs=Sign(
            "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._copy_model_params_to_main_params",
            has="self.optimizer.update_fp32_param_by_new_param() return",
        ),
        affects=lambda run: (  # without a distributed optimizer the first step ends in a KeyError
            run.optimizer_cpu_offload
            and run.use_distributed_optimizer is not False
            and loads_model_only(run)
            and not run.use_precision_aware_optimizer  # which Megatron's trainer needs for it
        ),
        when="--optimizer-cpu-offload and --use-distributed-optimizer with --pretrained-checkpoint, or with --load and "
        "--finetune or --no-load-optim, without --use-precision-aware-optimizer (in other trainers than "
        "Megatron's, which refuses that)",
        state="open",
        evidence="reproduced",
        patch="refresh-offloaded-params",
        diff=Diff(
            "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._copy_model_params_to_main_params",
            """
            if not self.ddp_config.use_megatron_fsdp:
                import copy

                without_offloading = copy.copy(self)  # refreshes the fp32 shards, unless it is precision-aware
                without_offloading.optimizer = None
                without_offloading._copy_model_params_to_main_params(state_dict)
            for param, inner_param in self.optimizer.param_to_inner_param.items():
                if inner_param is not param:
                    inner_param.data.copy_(param)
            """,
            "after",
            "self.optimizer.update_fp32_param_by_new_param()",
        ),
        unless=Gap(
            lambda run: not (run.bf16 or run.fp16),
            when="neither --bf16 nor --fp16",
            because="trainers tell the optimizer of loaded weights only in half precision",
        ),
        seen_by="cast",
        second_reading="sources of 0.16.1, 0.18.2 and main; what Megatron's trainer refuses, and which tensor the "
        "optimizer has with --fp8-param-gather; its program, with and without a distributed optimizer; the pull "
        "request",
    ),
    Defect(
        id="ML-3676a",
        effect="--load-main-params-from-ckpt makes the experts' main parameters of the model's weights in half "
        "precision, not of those that the checkpoint has in fp32",
        severity=2,
        signs=Sign(f"{_OPTIMIZER}:ChainedOptimizer._split_state_dict", has="state_dicts[0] = state_dict"),
        affects=lambda run: (
            _loads_main_params_of_experts(run)
            and _keeps_main_params_apart(run)
            and not run.virtual_pipeline_model_parallel_size
        ),
        when=f"{_LOADS_MAIN_PARAMS}, without interleaved stages, --use-precision-aware-optimizer and "
        "--use-megatron-fsdp",
        state="fixed in 0.18.0",
        evidence="reproduced",
        second_reading="sources of 0.16.1, 0.17.1 and 0.18.2, and which optimizers read a checkpoint so",
    ),
    Defect(
        id="ML-3676b",
        effect="--load-main-params-from-ckpt ends in an error: Wrong state_dict format",
        kind="crash",
        severity=3,
        signs=Sign(f"{_OPTIMIZER}:ChainedOptimizer._split_state_dict", has="state_dicts[0] = state_dict"),
        affects=lambda run: (
            _loads_main_params_of_experts(run)
            and run.virtual_pipeline_model_parallel_size
            and not run.use_megatron_fsdp  # whose optimizer of all chunks has their experts as well
        ),
        when=f"{_LOADS_MAIN_PARAMS} and interleaved stages, without --use-megatron-fsdp",
        state="fixed in 0.18.0",
        evidence="reproduced",
        second_reading="sources of 0.16.1, 0.17.1 and 0.18.2, and which optimizers read a checkpoint so",
    ),
)
