"""The training scripts, and the reduction of gradients in data parallelism."""

from ..defects.declare import Defect, Sign

_BUCKETS = "megatron.core.distributed.param_and_grad_buffer"

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
        signs=Sign(
            "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__",
            has="force_single_bucket_group=disable_bucketing",
            lacks="reduce_scatter_with_fp32_accumulation=",
        ),
        affects=lambda run: (
            (run.ddp_reduce_scatter_with_fp32_accumulation or run.reduce_scatter_with_fp32_accumulation)
            and (run.fp8_param_gather or run.fp4_param_gather)
            and run.overlap_grad_reduce
            and not run.use_megatron_fsdp
        ),
        when="--ddp-reduce-scatter-with-fp32-accumulation with --overlap-grad-reduce and --fp8-param-gather or (0.17) "
        "--fp4-param-gather, without --use-megatron-fsdp",
        instead="leave out --ddp-reduce-scatter-with-fp32-accumulation",
        state="fixed in 0.18.0, but for virtual pipeline stages after the first of a rank",
        evidence="read",
        second_reading="how 0.16.1, 0.17.1, 0.18.2 and main group buckets, and what reduces them; the thread of #4410; "
        "doctor under its flags and just outside",
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
