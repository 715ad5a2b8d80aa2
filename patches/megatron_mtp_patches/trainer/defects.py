"""The training scripts, and the reduction of gradients in data parallelism."""

from __future__ import annotations

from typing import Any

from ..defects.declare import Defect, Sign

_BUCKETS = "megatron.core.distributed.param_and_grad_buffer"
_GROUPS_BUCKETS = Sign(
    "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__",
    has="force_single_bucket_group=disable_bucketing",
    lacks="reduce_scatter_with_fp32_accumulation=",
)
_GROUPS_OF_BUCKETS = (
    "--ddp-reduce-scatter-with-fp32-accumulation with --overlap-grad-reduce and --fp8-param-gather or (from 0.17 on) "
    "--fp4-param-gather, without --use-megatron-fsdp"
)


def _reduces_groups_of_buckets(run: Any) -> bool:
    """True if gradients that are added up in fp32 are reduced in backward, and some weights are in fp8 or fp4."""
    adds_in_fp32 = run.ddp_reduce_scatter_with_fp32_accumulation or run.reduce_scatter_with_fp32_accumulation
    has_two_types = run.fp8_param_gather or run.fp4_param_gather
    return bool(adds_in_fp32 and has_two_types and run.overlap_grad_reduce and not run.use_megatron_fsdp)


DEFECTS = (
    Defect(
        id="ML-3693",
        effect="Gradients may be reduced before they are scaled or added up, because the reduction waits for the "
        "default CUDA stream, and the hooks of DDP run on the stream on which the trainer has built it",
        severity=3,
        signs=Sign(f"{_BUCKETS}:", has="self.communication_stream.wait_stream(torch.cuda.default_stream())"),
        affects=lambda run: (
            run.overlap_grad_reduce
            and (run.num_distributed_optimizer_instances or 1) > 1
            and not run.use_megatron_fsdp  # which has buffers and streams of its own
        ),
        when="--num-distributed-optimizer-instances > 1 with --overlap-grad-reduce, without --use-megatron-fsdp",
        only_if="the reduction begins too early (a race) and DDP is built on a stream other than the default one, as "
        "Megatron's trainer builds it, or backward runs on one, as in CUDA graphs",
        instead="leave out --overlap-grad-reduce, and --overlap-param-gather, which needs it",
        more_links=("NVIDIA/Megatron-LM#3670",),
        state="fixed in 0.17.0",
        evidence="read",
        second_reading="buckets, hooks and the trainer of 0.16.1, buckets of 0.17.1; the threads of #3693 and #3670",
    ),
    Defect(
        id="ML-4410",
        effect="The first step ends in an assertion that only 1 bucket is supported, because weights in fp8 or fp4 "
        "share a group of buckets with other weights",
        kind="crash",
        severity=3,
        signs=_GROUPS_BUCKETS,
        affects=_reduces_groups_of_buckets,
        when=_GROUPS_OF_BUCKETS,
        instead="leave out --ddp-reduce-scatter-with-fp32-accumulation",
        state="fixed in 0.18.0, but for virtual pipeline stages after the first of a rank (ML-4410b)",
        evidence="read",
        second_reading="how 0.16.1, 0.17.1, 0.18.2 and main group buckets, and what reduces them; the thread of #4410; "
        "doctor under its flags and just outside",
    ),
    Defect(
        id="ML-4410b",
        effect="The first step ends in an assertion that only 1 bucket is supported, because each virtual pipeline "
        "stage after the first of a rank puts all its buckets into one group, also those of weights in fp8 or fp4 and "
        "of other weights",
        kind="crash",
        severity=3,
        signs=Sign(
            f"{_BUCKETS}:partition_buckets",
            has=("if force_single_bucket_group:", "reduce_scatter_with_fp32_accumulation"),
        ),
        fixed_by=_GROUPS_BUCKETS,  # where ML-4410 says it of all stages
        affects=lambda run: _reduces_groups_of_buckets(run) and (run.virtual_pipeline_model_parallel_size or 1) > 1,
        when=f"{_GROUPS_OF_BUCKETS}, and with virtual pipeline stages",
        instead="leave out --ddp-reduce-scatter-with-fp32-accumulation",
        introduced_by=("NVIDIA/Megatron-LM#4410",),
        evidence="read",
        second_reading="how 0.16.1 to main group buckets, and for which model chunks trainers disable buckets; the "
        "groups that 0.18.2 and 0.19.2 make of a buffer in fp8 and one in bf16; cases of its predicate",
    ),
    Defect(
        id="ML-5926",
        effect="--freeze-all-layers is ignored, so the model that should stay as it is trains",
        severity=5,
        signs=Sign("megatron.training.training:", has=("if args.freeze_all_layers:", "build_distributed_models(")),
        fixed_by=Sign("megatron.training.training:", has="pre_wrap_hooks.append(_freeze_all_model_chunks)"),
        affects=lambda run: run.freeze_all_layers,
        when="--freeze-all-layers",
        only_if="the script builds the model with a ModelBuilder, as pretrain_gpt.py and pretrain_hybrid.py do",
        state="fixed on main",
        evidence="reproduced",
        patch="freeze-all-layers",
        seen_by="moves",
        second_reading="the trainer of 0.18.2, which has no such flag, of 0.19.0 and of main; pretrain_gpt.py, "
        "pretrain_hybrid.py and pretrain_vlm.py of 0.19.0; its program; doctor under its flag",
    ),
)
