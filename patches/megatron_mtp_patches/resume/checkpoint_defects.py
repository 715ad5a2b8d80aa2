"""Checkpoints: what a save loses, and what only the run that saved it reads rightly."""

from __future__ import annotations

from typing import Any

from ..defects.conditions import (
    expert_parallel,
    expert_tensor_parallel,
    has_gated_delta_net,
    has_megatron_fsdp,
    has_torch_dist_format,
    is_layer_wise,
    layers_of_hybrid,
    pipeline_parallel,
    tensor_parallel,
)
from ..defects.declare import Defect, Diff, Sign

_CHECKPOINTING = "megatron.training.checkpointing"
_FSDP = "megatron.core.transformer.fsdp_dtensor_checkpoint"


def _has_distributed_optimizer(run: Any) -> bool:
    """True if a distributed optimizer has all main parameters, or, beside Muon as 0.18 lays it out, the others."""
    return bool(run.use_distributed_optimizer or (is_layer_wise(run) and run.use_layer_wise_param_layout is True))


def _has_several_buckets(run: Any) -> bool:
    """True if gradients are reduced in several buckets; the embedding that pipeline stages share has a separate one."""
    shares_embedding = bool(run.mtp_num_layers) or run.untie_embeddings_and_output_weights is False
    return bool(run.overlap_grad_reduce or (pipeline_parallel(run) > 1 and shares_embedding))


DEFECTS = (
    Defect(
        id="ML-5077",
        effect="The checkpoint has the fp32 weights and optimizer moments of other parameters: all buckets after the "
        "first one with padding are shifted, and the first step after a resume writes these into the model",
        kind="lost state",
        severity=5,
        signs=Sign(
            "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.sharded_param_state_fully_reshardable",
            has="world_tensors[state_key][param_world_start:param_world_end]",
        ),
        affects=lambda run: (
            run.save
            and not run.no_save_optim
            and has_torch_dist_format(run)
            and run.dist_ckpt_optim_fully_reshardable
            and _has_distributed_optimizer(run)
            and _has_several_buckets(run)
            and not run.use_megatron_fsdp
        ),
        when="--save in the format torch_dist with --dist-ckpt-optim-fully-reshardable and "
        "--use-distributed-optimizer or, without --no-use-layer-wise-param-layout, --optimizer "
        "dist_muon (without --no-save-optim and --use-megatron-fsdp), and --overlap-grad-reduce or, with "
        "--pipeline-model-parallel-size > 1, tied embeddings or MTP layers",
        only_if="a bucket before the last one has padding: its number of elements is not a multiple of 128 and of the "
        "data-parallel size, or --ddp-pad-buckets-for-high-nccl-busbw; and, with dist_muon, Megatron is 0.18 or "
        "newer than 0.19, whose pretrain_gpt.py lays parameters out as before",
        state="fixed on main",
        evidence="reproduced",
        patch="save-own-state-of-each-param",
        diff=Diff(
            "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.sharded_param_state_fully_reshardable",
            """
            # In the gathered state the buckets lie side by side, without the padding between them.
            bucket_id = buffer.param_index_map[model_param][2]
            before = sum(bucket.numel_unpadded for bucket in buffer.buckets[:bucket_id])
            padding = buffer.buckets[bucket_id].offset - before
            param_world_start, param_world_end = param_world_start - padding, param_world_end - padding
            """,
            "inside",
            "buffer.param_index_map.items()",
        ),
        seen_by="cast",
        second_reading="sources of 0.16.1, 0.17.1, 0.18.2, 0.19.0 and main, where each has buckets, and which "
        "optimizers save so; its program; predicate just outside; doctor with Muon on 0.17.1 to 0.19.2",
    ),
    Defect(
        id="ML-2288",
        effect="An asynchronous save may write other data: the memory that holds the state on the host is reused while "
        "it is being written",
        kind="lost state",
        severity=4,
        signs=Sign(
            "megatron.core.dist_checkpointing.strategies.async_utils:TemporalAsyncCaller.schedule_async_call",
            has="async_req.preload_fn()",
            lacks="preloaded_holder",
        ),
        affects=lambda run: run.async_save and not run.use_persistent_ckpt_worker and not run.is_of_megatron_trainer,
        when="--async-save without --use-persistent-ckpt-worker, in other trainers than Megatron's, which then saves "
        "synchronously",
        only_if="the process reuses that memory before the write ends (a race)",
        instead="--use-persistent-ckpt-worker",
        state="fixed in 0.17.0",
        evidence="reproduced",
        second_reading="sources of 0.16.1 and 0.17.1 and what their trainers do; the fixing commit",
    ),
    Defect(
        id="ML-4678",
        effect="A checkpoint in the old format (--ckpt-format torch) lacks the shards of the last tensor-parallel "
        "ranks: it has as many as there are ranks with different experts",
        kind="lost state",
        severity=5,
        signs=Sign(
            f"{_CHECKPOINTING}:save_checkpoint",
            has="mpu.get_expert_data_parallel_rank() == 0",
            lacks="mpu.get_data_parallel_rank() == 0 or mpu.get_expert_data_parallel_rank() == 0",
        ),
        affects=lambda run: (
            run.save
            and run.ckpt_format == "torch"
            and run.num_experts
            and tensor_parallel(run) > expert_parallel(run) * expert_tensor_parallel(run)
        ),
        when="--ckpt-format torch with --num-experts, and --tensor-model-parallel-size greater than "
        "--expert-model-parallel-size times --expert-tensor-parallel-size",
        instead="--ckpt-format torch_dist",
        state="fixed in 0.18.0",
        evidence="reproduced",
        second_reading="sources of 0.16.1, 0.17.1 and 0.18.2, and which ranks their groups put first; doctor under its "
        "flags on 0.17.1 and 0.18.2",
    ),
    Defect(
        id="ML-4899",
        effect="The convolutions of Mamba layers keep their initial values where a checkpoint of an older Megatron is "
        "loaded that is not in the format torch_dist, because they have other names there",
        kind="lost state",
        severity=5,
        signs=Sign("megatron.core.ssm.mamba_mixer:MambaMixer", has="self.conv1d_weight = nn.Parameter("),
        affects=lambda run: (
            "M" in layers_of_hybrid(run)
            and (run.load or run.pretrained_checkpoint)
            and run.ckpt_format in ("torch", "fsdp_dtensor")
        ),
        when="--load or --pretrained-checkpoint of a hybrid model with Mamba layers, with --ckpt-format torch or "
        "fsdp_dtensor",
        only_if="a Megatron before 0.19 has saved the checkpoint; if its optimizer is loaded as well, the run may end "
        "in an error about sizes",
        instead="convert a checkpoint in the format torch with the older Megatron (--ckpt-convert-format torch_dist)",
        evidence="reproduced",
        introduced_by=("NVIDIA/Megatron-LM#4899",),
    ),
    Defect(
        id="ML-3936",
        effect="A checkpoint of GatedDeltaNet layers is cut across its parts (query, key, value, gates) when it is "
        "loaded with another tensor-parallel size",
        kind="lost state",
        severity=3,
        signs=(
            Sign(f"{_FSDP}:", has="def handle_swiglu_in_state_dict(", lacks="def handle_gdn_in_state_dict("),
            # 0.18.0 has the function that would keep them apart, and the trainer does not call it
            Sign(
                "megatron.training.checkpointing:preprocess_fsdp_dtensor_state_dict", lacks="handle_gdn_in_state_dict"
            ),
        ),
        affects=lambda run: (  # Megatron-Bridge calls that function itself
            run.is_of_megatron_trainer
            and has_megatron_fsdp(run)
            and (run.save or run.load or run.pretrained_checkpoint)
            and has_gated_delta_net(run)
        ),
        when="--use-megatron-fsdp with --save, --load or --pretrained-checkpoint, and --experimental-attention-variant "
        "gated_delta_net (or gdn, gdn2) or G in --hybrid-layer-pattern, in Megatron's own trainer",
        only_if="the checkpoint is loaded with another --tensor-model-parallel-size",
        state="open",
        evidence="reproduced",
        second_reading="sources of 0.16.1 to main, and who calls the function that #3936 has added, in Megatron-Bridge "
        "0.5.1 and 0.6.2 as well; parity --resume from TP2 to one rank on 0.18.2",
    ),
    Defect(
        id="ML-5714",
        effect="A checkpoint mixes the rows of gate and value of each gated MLP, such as SwiGLU: only a run with the "
        "same data- and tensor-parallel sizes reads it rightly",
        kind="lost state",
        severity=3,
        signs=Sign(
            "megatron.core.transformer.mlp:apply_swiglu_sharded_factory",
            has="torch.chunk(",
            lacks="is_torch_fsdp2_param",
        ),
        affects=lambda run: (
            run.use_torch_fsdp2
            and (run.swiglu or run.quick_geglu or run.gated_linear_unit)
            and has_torch_dist_format(run)
            and (run.save or run.load or run.pretrained_checkpoint)
        ),
        when="--use-torch-fsdp2 with --swiglu or --quick-geglu, and --save, --load or --pretrained-checkpoint in the "
        "format torch_dist",
        only_if="the run gets past its first step, which in these releases ends in an error (ML-4953), and the "
        "checkpoint is converted, or saved and loaded with different data- or tensor-parallel sizes",
        state="fixed in 0.19.0",
        evidence="read",
        second_reading="sources of 0.16.1, 0.18.2 and 0.19.0, and what ends each run of these releases; the fixing "
        "commit",
    ),
    Defect(
        id="ML-6271",
        effect="Loading skips weights that the checkpoint names otherwise, and these keep their initial values: MTP "
        "layers of 0.16, or MLA's down projections after a change of --mla-down-proj-fusion",
        kind="lost state",
        severity=3,
        signs=Sign(
            f"{_CHECKPOINTING}:",
            has="allow_partial_load = not getattr(args, 'strict_fsdp_dtensor_load', False)",
            lacks="validate_fsdp_dtensor_model_load(",
        ),
        fixed_by=Sign("megatron.core.transformer.multi_token_prediction:", lacks="mtp_model_layer"),  # 0.16
        affects=lambda run: (
            run.use_megatron_fsdp
            and (run.load or run.pretrained_checkpoint)
            and run.strict_fsdp_dtensor_load is False
            and (run.mtp_num_layers or run.multi_latent_attention)
        ),
        when="--use-megatron-fsdp and --load or --pretrained-checkpoint with --no-strict-fsdp-dtensor-load, and "
        "--mtp-num-layers or --multi-latent-attention",
        only_if="the checkpoint was saved by 0.16, or with the other setting of --mla-down-proj-fusion",
        instead="leave out --no-strict-fsdp-dtensor-load (Megatron-Bridge: set strict_fsdp_dtensor_load): loading then "
        "ends in an error",
        state="fixed on main",
        evidence="read",
        second_reading="sources of 0.16.1 to main, and what main does with each of these names; the loading of "
        "Megatron-Bridge 0.6.2; doctor under its flags on 0.17.1 to 0.19.2",
    ),
)
