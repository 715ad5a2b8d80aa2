"""A layer of MLA whose heads and whose down projection for keys and values are split over two tensor-parallel ranks,
with sequence parallelism: the norm of the gradient of the down projection. It is that of the layer on one rank.
"""

from ...defects.labs.latent_lab import norms_of_down_projection

RANKS = 2
NEEDS = ("transformer-engine",)


def reproduce():
    return norms_of_down_projection(is_split=True, sequence_parallel=True)
