"""The wrappers that keep DDP and Megatron-FSDP from waiting for gradients that parameters never get.

Those of a frozen main model have none; nor has the MTP stage's copy of the embedding where the heads are detached.
"""

from __future__ import annotations

from collections import OrderedDict

from torch.utils.hooks import RemovableHandle

from megatron_overrides.call import Call
from megatron_overrides.mtp.heads.detached_heads import REPORTS_ZERO_EMBEDDING_GRAD


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


def register_no_hook_on_frozen_parameters(call: Call) -> None:
    """Wraps MegatronFSDP._register_fsdp_hooks, which in 0.16 also hooks into the gradients of frozen parameters.

    torch refuses that. Later releases leave these parameters out themselves.
    """
    frozen = [param for param in call.instance.parameters() if not param.requires_grad]
    for param in frozen:
        param.register_post_accumulate_grad_hook = lambda hook: RemovableHandle(OrderedDict())
    try:
        call.proceed()
    finally:
        for param in frozen:
            del param.register_post_accumulate_grad_hook


def reduce_groups_that_train(call: Call) -> None:
    """Wraps ParamAndGradBuffer.reduce_scatter_gradients: it asks each group of parameters for its gradient buffer.

    Groups of frozen parameters have none, and it would raise an AttributeError.
    """
    groups = call.instance.parameter_groups
    call.instance.parameter_groups = [group for group in groups if group.main_grad_buffer is not None]
    try:
        call.proceed()
    finally:
        call.instance.parameter_groups = groups
