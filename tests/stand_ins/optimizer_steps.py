"""A step of an optimizer whose heads have a separate norm: whether it updated, the main norm, and that of the heads."""

from megatron_mtp_patches import functional


def by_patches(optimizer):
    """The patched Megatron's."""
    updated, norm, _ = optimizer.step()
    return updated, norm, optimizer.mtp_grad_norm


def by_functions(optimizer):
    """The same by the functions for custom trainers."""
    optimizer.prepare_grads()
    norms = functional.grad_norms(optimizer)
    decision = functional.decide(norms, optimizer.config)
    functional.clip(optimizer, norms, decision)
    return functional.update(optimizer, norms, decision), norms.total[None], norms.total["mtp"]
