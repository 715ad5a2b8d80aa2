"""The training scripts, and the reduction of gradients in data parallelism."""

from ..defects.declare import Defect, Sign

_BUCKETS = "megatron.core.distributed.param_and_grad_buffer"

DEFECTS = (
    Defect(
        id="ML-3693",
        effect="Gradients may be reduced before they are computed, because the reduction waits for the default CUDA "
        "stream, not for the one on which backward runs",
        severity=2,
        signs=Sign(f"{_BUCKETS}:", has="self.communication_stream.wait_stream(torch.cuda.default_stream())"),
        affects=lambda run: run.overlap_grad_reduce and (run.num_distributed_optimizer_instances or 1) > 1,
        when="--num-distributed-optimizer-instances > 1 with --overlap-grad-reduce",
        only_if="backward runs on a stream other than the default one, as it does in CUDA graphs",
        state="fixed in 0.17.0",
        evidence="read",
        second_reading="the fixing commit",
    ),
    Defect(
        id="ML-4410",
        effect="The first step ends in an assertion that a group of buckets has one bucket",
        kind="crash",
        severity=3,
        signs=Sign(
            "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__",
            has="force_single_bucket_group=disable_bucketing",
            lacks="reduce_scatter_with_fp32_accumulation=",
        ),
        affects=lambda run: (  # only weights in fp8 share a group of buckets with others
            (run.ddp_reduce_scatter_with_fp32_accumulation or run.reduce_scatter_with_fp32_accumulation)
            and run.fp8_param_gather
        ),
        when="--ddp-reduce-scatter-with-fp32-accumulation with --fp8-param-gather",
        instead="leave out --ddp-reduce-scatter-with-fp32-accumulation",
        state="fixed in 0.18.0",
        evidence="read",
        second_reading="the fixing commit",
    ),
    Defect(
        id="ML-5926",
        effect="--freeze-all-layers is ignored, so the model that should stay as it is trains",
        severity=3,
        signs=Sign("megatron.training.training:", has=("if args.freeze_all_layers:", "build_distributed_models(")),
        fixed_by=Sign("megatron.training.training:", has="pre_wrap_hooks.append(_freeze_all_model_chunks)"),
        affects=lambda run: run.freeze_all_layers,
        when="--freeze-all-layers",
        only_if="the script builds the model with a ModelBuilder",
        state="fixed on main",
        evidence="reproduced",
        patch="freeze-all-layers",
        seen_by="moves",
        second_reading="source of 0.19.0 and of pretrain_gpt.py; title of the fixing commit; its program",
    ),
)
