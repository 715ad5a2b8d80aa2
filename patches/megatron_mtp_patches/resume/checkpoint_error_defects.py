"""Checkpoints: saves and loads that end in an error."""

from __future__ import annotations

from ..defects.conditions import (
    has_torch_dist_format,
    is_layer_wise,
    loads_optimizer,
    type_name,
)
from ..defects.declare import Defect, Sign

_COMPARES_NOTHING = "assume_ok_unexpected"  # the default of --dist-ckpt-strictness


DEFECTS = (
    Defect(
        id="ML-4222",
        effect="A resume ends in an AssertionError: the checkpoint has the remainders of bfloat16 weights, from which "
        "TransformerEngine makes the main parameters, as float32, and it takes int16",
        kind="crash",
        severity=3,
        signs=Sign(
            "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._set_main_param_and_optimizer_states",
            has="self.optimizer.set_scaled_state(sharded_model_param, 'master_param', v)",
        ),
        affects=lambda run: (
            loads_optimizer(run)
            and run.use_precision_aware_optimizer
            and run.bf16
            and type_name(run.main_params_dtype) in ("", "float32")
            and (run.fp8_recipe or "delayed") == "delayed"
            and not run.optimizer_cpu_offload
            and not run.use_megatron_fsdp
            and (run.ckpt_format == "torch" or (has_torch_dist_format(run) and run.dist_ckpt_optim_fully_reshardable))
        ),
        when="--use-precision-aware-optimizer and --bf16 with --load (without --no-load-optim or --finetune), and "
        "--ckpt-format torch or --dist-ckpt-optim-fully-reshardable, without --main-params-dtype fp16, "
        "--optimizer-cpu-offload, a --fp8-recipe other than delayed, and --use-megatron-fsdp",
        instead="leave out --dist-ckpt-optim-fully-reshardable, with --ckpt-format torch_dist",
        state="open",
        evidence="reproduced",
        second_reading="sources of 0.16.1 to main, and TransformerEngine's FusedAdam; the pull request; parity "
        "--resume of DP2 on 0.18.2 in each format, which goes on rightly without that flag",
    ),
    Defect(
        id="ML-5684",
        effect="Saving a checkpoint in the old format (--ckpt-format torch) ends in an AttributeError: beside Muon's "
        "optimizer there is one for the other parameters, and the two together have no file of their own to save",
        kind="crash",
        severity=3,
        signs=Sign(
            "megatron.core.optimizer:_get_megatron_emerging_optimizer", has="use_separate_distributed_optimizer"
        ),
        fixed_by=(
            Sign("megatron.core.optimizer.optimizer:ChainedOptimizer", has="def save_state_dict_to_file"),
            # pretrain_gpt.py of 0.19 lays parameters out as before
            Sign(
                "megatron.training.training:setup_model_and_optimizer",
                has="builder.build_distributed_models(",
                lacks="use_layer_wise_param_layout",
            ),
        ),
        affects=lambda run: (
            run.save
            and run.is_of_megatron_trainer
            and run.ckpt_format == "torch"
            and is_layer_wise(run)
            and run.use_layer_wise_param_layout is True
        ),
        when="--save and --ckpt-format torch with --optimizer dist_muon, without --no-use-layer-wise-param-layout, in "
        "Megatron's own trainer",
        instead="--ckpt-format torch_dist",
        state="open",
        evidence="reproduced",
        second_reading="sources of 0.17.1 to main; the pull request; parity --resume with dist_muon on 0.18.2 and "
        "0.19.2",
    ),
    Defect(
        id="tensor-properties-of-newer-torch",
        effect="Loading ends in a TypeError, because torch 2.15 has a property of tensors that torch.empty lacks",
        kind="crash",
        severity=3,
        signs=Sign(
            "megatron.core.dist_checkpointing.strategies.torch:TorchDistLoadShardedStrategy.load_tensors_metadata",
            has="torch.empty(tp.size, **tp.properties.__dict__, device='meta')",
        ),
        affects=lambda run: (
            (run.load or run.pretrained_checkpoint)
            and has_torch_dist_format(run)
            and (run.dist_ckpt_strictness or _COMPARES_NOTHING) != _COMPARES_NOTHING
        ),
        when="--load or --pretrained-checkpoint with a --dist-ckpt-strictness other than assume_ok_unexpected",
        only_if="torch is 2.15 or newer",
        instead="leave out --dist-ckpt-strictness, and compare nothing",
        introduced_by=("pytorch/pytorch#194251",),
        evidence="reproduced",
        patch="read-tensor-metadata-of-newer-torch",
        second_reading="sources of 0.16.1 to main; its program",
    ),
)
