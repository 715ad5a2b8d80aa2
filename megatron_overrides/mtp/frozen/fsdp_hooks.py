"""Megatron-FSDP of 0.16 with a partly frozen model."""

from __future__ import annotations

from collections import OrderedDict

from torch.utils.hooks import RemovableHandle

from megatron_overrides.call import Call


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
