"""A layer of MLA whose heads are on two tensor-parallel ranks, without sequence parallelism: the norm of the gradient
of the down projection for keys and values. It is that of the layer on one rank.
"""

from ...defects.labs.latent_lab import norms_of_down_projection

RANKS = 2
NEEDS = ("transformer-engine",)


def reproduce():
    return norms_of_down_projection(is_split=False)
