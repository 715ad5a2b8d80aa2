"""Known defects that no patch removes; `doctor` says how to avoid them."""

from __future__ import annotations

from ..engine import Defect
from .conditions import resumes_optimizer

TYPE_CHECKING = False  # as in engine/engine.py: typing itself is not imported
if TYPE_CHECKING:
    from typing import Any

_OTHER_STRATEGY = "choose another --data-parallel-sharding-strategy"


def _has_fsdp(run: Any, strategy: str) -> bool:
    return bool(run.use_megatron_fsdp) and run.data_parallel_sharding_strategy == strategy


# Left out, with the reason: NVIDIA/Megatron-LM#6010 (up to 0.19.2 multimodal models give their language model no
# tokens, so its MTP heads cannot run at all) and #3965 (0.17.1 builds one layer where it was given several specs, and
# says so; no wrong number was found).
UNPATCHED = (
    Defect(
        "The gradient norm counts experts twice, so gradients are clipped too much; on 0.18 this comes with "
        "count-experts-in-grad-norm",
        releases=("0.18.2", "0.19.2"),
        affects=lambda run: (
            _has_fsdp(run, "no_shard")
            and run.num_experts
            and (run.expert_model_parallel_size or 1) == 1
            and (run.expert_tensor_parallel_size or 1) < (run.tensor_model_parallel_size or 1)
        ),
        avoid=_OTHER_STRATEGY,
    ),
    Defect(
        "The gradient norm counts each data-parallel rank once, though all have the same gradients, so it is too large "
        "and gradients are clipped too much",
        releases=("0.16.1", "0.17.1"),
        affects=lambda run: _has_fsdp(run, "no_shard") and run.overlap_grad_reduce and run.overlap_param_gather,
        avoid=_OTHER_STRATEGY,
    ),
    Defect(
        "Gradients are never reduced, so each data-parallel rank trains a model of its own",
        releases=("0.16.1", "0.17.1"),
        affects=lambda run: _has_fsdp(run, "no_shard") and not run.overlap_grad_reduce and run.overlap_param_gather,
        avoid=_OTHER_STRATEGY,
    ),
    Defect(
        "The first step ends in an AttributeError about fetch_bucket",
        releases=("0.16.1", "0.17.1"),
        affects=lambda run: _has_fsdp(run, "no_shard") and not run.overlap_param_gather,
        avoid=_OTHER_STRATEGY,
    ),
    Defect(
        "Each data-parallel rank adds its own gradient to the mean of all, so gradients are too large",
        releases=("0.16.1",),
        affects=lambda run: _has_fsdp(run, "optim") and run.overlap_grad_reduce,
        avoid=f"{_OTHER_STRATEGY}, or leave out --overlap-grad-reduce",
    ),
    Defect(
        "With context parallelism each rank takes its part of the whole sequence, but attention takes the documents "
        "for sequences, so tokens attend to the wrong ones",
        releases=("0.19.2", "main"),
        affects=lambda run: run.dataloader_inter_document_masking and (run.context_parallel_size or 1) > 1,
        avoid="leave out --dataloader-inter-document-masking, or train without --context-parallel-size",
    ),
    Defect(
        "A context-parallel rank without a token that counts adds a loss of zero to the mean of the main loss, so its "
        "gradients are too small",
        releases=("0.19.2", "main"),
        affects=lambda run: run.sft and (run.context_parallel_size or 1) > 1 and not run.calculate_per_token_loss,
        avoid="add --calculate-per-token-loss; MTP heads then also need count-mtp-tokens-over-ranks, without which "
        "Megatron weights their tokens by counts of each rank",
    ),
    Defect(
        "A checkpoint of the precision-aware optimizer cannot be resumed",
        releases=("0.16.1",),
        affects=lambda run: run.use_precision_aware_optimizer and resumes_optimizer(run),
        avoid="leave out --use-precision-aware-optimizer, or save with --no-save-optim and load with --no-load-optim",
    ),
)
