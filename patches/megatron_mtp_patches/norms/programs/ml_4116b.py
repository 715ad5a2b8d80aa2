"""The separate gradient norm of detached MTP heads, under DDP and under Megatron-FSDP."""

from ...defects.labs.fsdp_lab import make_fsdp
from ...defects.labs.lab import compute_gradients, make_config, make_ddp, make_gpt, make_optimizer, start

RANKS = 2
NEEDS = ("einops",)


def reproduce():
    start()
    return norm_of_heads(make_ddp), norm_of_heads(make_fsdp)


def norm_of_heads(wrap):
    import torch

    torch.manual_seed(1)
    config = make_config(mtp_num_layers=1, mtp_detach_heads=True)
    model = wrap(config, make_gpt(config))
    optimizer = make_optimizer(model, use_distributed_optimizer=wrap is make_fsdp)
    compute_gradients(model)
    optimizer.step()
    return float(optimizer.grad_norms_by_group["mtp"]) if "mtp" in optimizer.grad_norms_by_group else "none"
