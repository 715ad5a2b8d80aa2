"""The flags that a small run on a CPU leaves out, with the reason, as patterns of fnmatch."""

from __future__ import annotations

from fnmatch import fnmatchcase

NEEDS_GPU = "it needs a GPU"
EVEN_LAYERS = "the small run divides its layers evenly"
OWN_LENGTH = "the small run has its own length and rates"
OWN_DATA, CHANGES_NOTHING = "the small run has its own weights and data", "it changes no number"
UNREAD = {OWN_DATA, CHANGES_NOTHING}  # reasons of flags that need not be valid
_PATTERNS = {
    NEEDS_GPU: """
        fp8-* fp4-* disable-fp8-* keep-fp8-* enable-cuda-graph external-cuda-graph optimizer-cuda-graph cuda-graph-*
        use-flash-attn tp-comm-* disable-tp-comm-* te-precision-config-file te-rng-tracker
        use-transformer-engine-op-fuser use-nccl-ub use-sharp sharp-enabled-group nccl-* high-priority-*
        moe-enable-deepep moe-flex-dispatcher-backend moe-deepep-* moe-hybridep-* moe-permute-fusion-into-hybridep
        moe-paged-stash* moe-router-padding-for-* fine-grained-* offload-modules min-offloaded-* cpu-offload*
        optimizer-cpu-offload optimizer-offload-fraction overlap-cpu-optimizer-* use-torch-optimizer-for-cpu-offload
        record-memory-history first-last-layers-bf16 num-layers-at-* disable-symmetric-* symmetric-ar-type
        use-kitchen-* kitchen-* fsdp-manual-registration fsdp-double-buffer distributed-backend
        init-model-with-meta-device deterministic-mode
    """,
    "it is random": """
        moe-input-jitter-eps moe-router-force-* hidden-dropout attention-dropout data-parallel-random-init
    """,
    OWN_DATA: """
        data-path data-args-path data-cache-path train-data-path valid-data-path test-data-path per-split-*
        per-dataset-* split mock-data tokenizer-* null-tokenizer-* vocab-* merge-file tiktoken-* trust-remote-code
        chat-template padded-vocab-size disable-pad-vocab-size make-vocab-size-divisible-by load save finetune
        pretrained-checkpoint ckpt-step ckpt-convert-* use-checkpoint-args use-mp-args-from-checkpoint-args
        exit-on-missing-checkpoint no-load-* no-save-* no-ckpt-fully-* ckpt-fully-* auto-detect-ckpt-format
        dist-ckpt-format use-dist-ckpt async-save use-persistent-ckpt-worker moe-use-upcycling mtp-init seed
        init-method-* embedding-init-method-std num-workers dataloader-type dataloader-save dataloader-fast-*
        dataloader-defer-* num-dataset-* no-mmap-* disable-use-tokenizer-* phase-transition-iterations
        fim-*
    """,
    OWN_LENGTH: """
        train-iters train-samples lr lr-* min-lr weight-decay start-weight-decay end-weight-decay
        weight-decay-incr-style decoupled-* warmup override-opt* use-checkpoint-opt* adam-* micro-batch-size
        global-batch-size rampup-batch-size step-batch-size-* decrease-batch-size-* exit-* eval-* start-eval-* save-*
        non-persistent-* persistent-* log-interval skip-train full-validation multiple-validation-sets
        iterations-to-skip check-weight-hash-* gpu-sniff-* train-sync-* mtp-acceptance-interval
    """,
    CHANGES_NOTHING: """
        tensorboard-* wandb-* log-timers-* log-memory-* log-throughput log-progress log-validation-* log-world-size-*
        log-device-* log-energy log-straggler disable-log-* profile profile-* use-pytorch-profiler pytorch-profiler-*
        timing-* no-barrier-* no-one-logger one-logger-* enable-one-logger distributed-timeout-* manual-gc manual-gc-*
        disable-manual-gc-* empty-unused-* app-tag-* inprocess-* enable-ft-* calc-ft-* ft-* straggler-*
        disable-straggler-* run-workload-* flight-recorder-* disable-flight-* config-logger-dir logging-level
        check-for-* no-check-for-* rerun-mode adlr-* memory-snapshot-path nvtx-ranges local-rank result-rejected-*
        record-shapes disable-jit-fuser test-mode error-injection-* inference-* rl-* grpo-* langrl-*
    """,
    EVEN_LAYERS: """
        decoder-first-* decoder-last-* account-for-* pipeline-model-parallel-layout num-layers-per-virtual-*
        num-virtual-stages-* microbatch-group-size-* heterogeneous-layers-* hierarchical-context-parallel-sizes
    """,
}
_PRECISION = {
    "the small run computes in fp32": """
        overlap-moe-expert-parallel-comm delay-wgrad-compute
        bf16 fp16 loss-scale initial-loss-scale min-loss-scale loss-scale-window hysteresis
        accumulate-allreduce-grads-in-fp32 attention-softmax-in-fp32 fp32-residual-connection fp16-lm-cross-entropy
        main-grads-dtype main-params-dtype exp-avg-dtype exp-avg-sq-dtype use-precision-aware-optimizer
        megatron-fsdp-*-dtype disable-bf16-* reuse-grad-buf-* ddp-reduce-scatter-with-fp32-* ddp-param-name-patterns-*
    """,
}


def reason_to_leave_out(name: str, dtype: str) -> str:
    """Why a run of this dtype leaves the flag `--name` out; '' where it has it."""
    patterns = _PATTERNS | _PRECISION if dtype == "fp32" else _PATTERNS
    return next((why for why, names in patterns.items() if any(fnmatchcase(name, one) for one in names.split())), "")
