"""DDP and what MTP heads leave untrained: a copy of the embedding, or the whole main model."""

from __future__ import annotations

from megatron_overrides.call import Call
from megatron_overrides.mtp.heads.detached_heads import REPORTS_ZERO_EMBEDDING_GRAD
from megatron_overrides.settings.model_settings import check_frozen_main_model, is_main_model_frozen


def mark_layers_needing_embedding_grad(call: Call) -> None:
    """Wraps DistributedDataParallel.__init__(config, ddp_config, module, ...): marks layers that must report a zero.

    With --overlap-grad-reduce DDP asserts, after the first step, that each parameter of a bucket has had a gradient.
    The MTP stage's copy of the embedding gets none from detached heads. The distributed optimizer gives the copy a
    separate bucket, unless buckets of fp8 and bf16 parameters are joined.
    """
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

    call.proceed()
    config, ddp = call["config"], call["ddp_config"]
    separate_bucket = ddp.use_distributed_optimizer and not getattr(ddp, "fp8_param_gather", False)
    if ddp.overlap_grad_reduce and not separate_bucket and getattr(config, "pipeline_model_parallel_size", 1) > 1:
        for module in call["module"].modules():
            if isinstance(module, MultiTokenPredictionLayer):
                setattr(module, REPORTS_ZERO_EMBEDDING_GRAD, True)


def freeze_what_is_wrapped(call: Call) -> None:
    """Wraps the __init__(config, ddp_config, module, ...) of DDP, Megatron-FSDP and FSDP2.

    A GPTModel is frozen already; what has one as a part of it is not.

    Raises:
        ValueError: the settings of the frozen model cannot work; a trainer without argparse learns of it here.
    """
    if is_main_model_frozen(call["config"]):
        # Imported here: this module is imported while the first of these classes is being imported.
        from megatron_overrides.mtp.frozen.frozen_main_model import freeze

        check_frozen_main_model(call["config"], is_complete=True)
        freeze(call["module"])
    call.proceed()
