"""Wrong numbers in the log: losses, norms and counts."""

from typing import Any

from ..defects.conditions import context_parallel, data_parallel, has_any_aux_loss, is_layer_wise, type_name
from ..defects.declare import Defect, Sign

_TRAINING = "megatron.training.training"
_PARAMS_NORMS = tuple(f"megatron.training.{module}:calc_params_l2_norm" for module in ("utils", "utils.common_utils"))


def _keeps_main_params_inside(run: Any) -> bool:
    """True if TransformerEngine's Adam, and no tensor of Megatron's, has the main parameters."""
    is_plain = run.fp8_recipe in (None, "delayed") or type_name(run.main_params_dtype) not in ("", "float32")
    return bool(
        run.use_precision_aware_optimizer and not run.use_megatron_fsdp and (is_plain or run.optimizer_cpu_offload)
    )


def _balances_without_weight(run: Any) -> bool:
    """True if a loss that balances experts has the coefficient 0."""
    named = run.moe_router_load_balancing_type
    names = named if isinstance(named, (list, tuple)) else [named]
    has_loss = {"aux_loss", "seq_aux_loss", "global_aux_loss"}.intersection(names)
    return bool(run.num_experts and has_loss and not has_any_aux_loss(run))


DEFECTS = (
    Defect(
        id="ML-3388",
        effect="The validation loss of each set leaves out the last samples that do not fill a micro batch on every "
        "data-parallel rank, and validation hangs on a set that has no others",
        kind="wrong log",
        severity=3,
        signs=Sign(
            "megatron.training.datasets.data_samplers:", has="full_validation", lacks="MegatronFullValidationSampler"
        ),
        affects=lambda run: run.full_validation and run.multiple_validation_sets,  # of one set it ends in an error
        when="--full-validation with --multiple-validation-sets",
        state="fixed in 0.18.0",
        evidence="reproduced",
        second_reading="samplers, iterators and validation of 0.16.1, 0.17.1 and 0.18.2; the commit of #3388; runs of "
        "0.17.1 with one set, with two, and with one that is smaller than a micro batch",
    ),
    Defect(
        id="ML-3564",
        effect="The validation loss is NaN if a microbatch has no token that counts",
        kind="wrong log",
        severity=1,
        signs=Sign(f"{_TRAINING}:evaluate", has="val = val[:, 0] / val[:, 1]\nval = val.mean()"),
        affects=lambda run: run.sft and run.eval_iters,
        when="--sft with --eval-iters > 0",
        only_if="a microbatch, or a context-parallel rank's part of one, has no token that counts",
        state="fixed in 0.17.0",
        evidence="read",
        second_reading="the validation of 0.16.1 and 0.17.1; the commit of #3564",
    ),
    Defect(
        id="ML-4015",
        effect="The logged number of zeros in the gradients is not exact above 16.8 million",
        kind="wrong log",
        severity=1,
        signs=Sign(
            "megatron.core.optimizer.clip_grads:count_zeros_fp32",
            has="total_num_zeros = torch.zeros(1, dtype=torch.float, device='cuda')",
        ),
        affects=lambda run: run.log_num_zeros_in_grad,
        when="--log-num-zeros-in-grad",
        state="fixed in 0.17.0",
        evidence="reproduced",
        second_reading="the count of 0.16.1 and 0.17.1; the commit of #4015",
    ),
    Defect(
        id="ML-6238",
        effect="The second line of the log has the mean losses and step time of the first two steps of the process, a "
        "resumed one included; TensorBoard and Weights & Biases get the right losses",
        kind="wrong log",
        severity=1,
        signs=Sign(
            f"{_TRAINING}:training_log",
            has="should_reset = not is_first_iteration",
            lacks=("should_reset_loss_stats", "not is_first_iteration or"),
        ),
        affects=lambda run: run.is_of_megatron_trainer and (run.log_interval == 1 or (run.load and not run.finetune)),
        when="--log-interval 1, or --load without --finetune",
        only_if="the first step of the process ends an interval, as each step does with --log-interval 1",
        instead="use --log-interval 2 or more, and save after steps whose number it divides",
        more_links=(
            "NVIDIA/Megatron-LM#7092",
            "NVIDIA/Megatron-LM#6237",
        ),
        state="fixed after main of 2026-08-22",
        evidence="reproduced",
        patch="log-first-step-once",
        second_reading="the log of 0.16.1, 0.18.2, 0.19.0 and main; the issue and the pull requests; its program; a "
        "resume on 0.19.2 with --log-interval 10; doctor under its flags and just outside",
    ),
    Defect(
        id="ML-1555",
        effect="A loss of exactly 0 is not printed, as the one that balances experts is where its coefficient is 0",
        kind="wrong log",
        severity=1,
        signs=Sign(f"{_TRAINING}:training_log", has="if avg > 0.0:"),
        affects=_balances_without_weight,
        when="--num-experts with --moe-router-load-balancing-type aux_loss (the default), seq_aux_loss or "
        "global_aux_loss, without --moe-aux-loss-coeff",
        state="fixed in 0.17.0",
        evidence="reproduced",
        second_reading="the log, the MoE losses in it and routers without coefficients of 0.16.1; the log of 0.17.1; "
        "the commit of #1555; its program; cases of its predicate",
    ),
    Defect(
        id="weight-norm-before-gather",
        effect="The logged norm of the parameters is taken before the ranks have gathered the new weights, so weights "
        "that other ranks update may be from the step before",
        kind="wrong log",
        severity=1,
        signs=tuple(Sign(target, has="force_create_fp32_copy", lacks="sync") for target in _PARAMS_NORMS),
        affects=lambda run: (
            run.log_params_norm
            and run.overlap_param_gather
            and (is_layer_wise(run) or (run.use_distributed_optimizer and not run.bf16))
            and not run.use_megatron_fsdp
            and data_parallel(run) * context_parallel(run) > 1
        ),
        when="--log-params-norm with --overlap-param-gather and data or context parallelism, without "
        "--use-megatron-fsdp, and --optimizer dist_muon or use_layer_wise_distributed_optimizer, which Megatron's "
        "trainer sets where another optimizer than Adam and SGD has the distributed optimizer, or "
        "--use-distributed-optimizer without --bf16",
        instead="leave out --overlap-param-gather",
        more_links=("NVIDIA/Megatron-LM#7131", "NVIDIA/Megatron-LM#7132"),
        state="open",
        evidence="reproduced",
        second_reading="the norm of 0.16.1, 0.18.2 and 0.19.0, and what validate_args of these makes of other "
        "optimizers than Adam and SGD; which weights of 0.18.2 have sharded main parameters; its program; "
        "the threads of #7131 and #7132 (of layer-wise optimizers); doctor of 0.17.1 and 0.19.2 under its "
        "flags",
    ),
    Defect(
        id="weight-norm-of-precision-aware-optimizer",
        effect="The logged norm of the parameters leaves out all that are in bf16, because the precision-aware "
        "optimizer has their main parameters: it is 0 where all are",
        kind="wrong log",
        severity=1,
        signs=Sign(
            "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._build_model_and_main_param_groups",
            has=(
                "shard_main_param = None",
                "model_param.main_param = shard_main_param\nmodel_param.main_param_sharded = True",
            ),
        ),
        affects=lambda run: run.log_params_norm and run.bf16 and _keeps_main_params_inside(run),
        when="--log-params-norm with --bf16 and --use-precision-aware-optimizer, and --fp8-recipe delayed (the "
        "default), --main-params-dtype fp16 or --optimizer-cpu-offload",
        instead="leave out --use-precision-aware-optimizer, and the data types that need it",
        evidence="reproduced",
        second_reading="the norm and the optimizer of 0.16.1 and 0.19.0; its program; doctor of 0.17.1, 0.18.2 and "
        "0.19.2 under its flags and just outside",
    ),
    Defect(
        id="ML-7174",
        effect="The run ends in a TypeError: at its first validation, because the number of its steps is broadcast as "
        "a number and read as a list, or before its first step where ranks have no validation data, as with tensor "
        "parallelism or more than two pipeline stages",
        kind="crash",
        severity=3,
        signs=Sign(
            "megatron.training.training:evaluate_and_print_results",
            has="eval_iters = torch.tensor(args.eval_iters, dtype=torch.long, device='cuda')",
        ),
        affects=lambda run: run.full_validation and not run.multiple_validation_sets and run.is_of_megatron_trainer,
        when="--full-validation without --multiple-validation-sets",
        instead="leave out --full-validation, and set --eval-interval and --eval-iters",
        more_links=("NVIDIA/Megatron-LM#7177",),
        state="open",
        evidence="reproduced",
        second_reading="the validation, the loaders of data, how samples are counted and the ranks that have some in "
        "0.16.1, 0.17.1, 0.18.2, 0.19.0 and main; the threads of #7174 and #7177; what --multiple-validation-sets does "
        "on middle pipeline stages and to a test set (an error as well)",
    ),
)
