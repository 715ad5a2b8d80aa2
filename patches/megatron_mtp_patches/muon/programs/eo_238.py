"""The norms of Muon's update of one gradient, and of the same gradient times 1e-12: the size should not matter."""

from ...defects.labs.lab import norm

WITHOUT_CUDA = True
NEEDS = ("emerging-optimizers",)


def reproduce():
    import torch
    from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz

    torch.manual_seed(1)
    gradient = torch.randn(16, 8)
    right = norm(newton_schulz(gradient, steps=5))
    return [right, right], [norm(newton_schulz(gradient * size, steps=5)) for size in (1.0, 1e-12)]
