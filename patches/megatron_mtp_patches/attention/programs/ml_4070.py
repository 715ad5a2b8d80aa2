"""Sparse attention with --dsa-indexer-loss-coeff 1: the norm of the indexer's gradients in a step of four microbatches,
as a multiple of that in a step of one, to which the four are equal.
"""

from ...defects.labs.lab import make_ddp, make_sparse_gpt, norm, run_microbatches, start

NEEDS = ("transformer-engine",)


def reproduce():
    start()
    model = make_sparse_gpt(dsa_indexer_loss_coeff=1.0)
    model = make_ddp(model.config, model)
    return 1.0, norm_of_indexer(model, 4) / norm_of_indexer(model, 1)


def norm_of_indexer(model, microbatches):
    model.zero_grad_buffer()
    run_microbatches(model, microbatches)
    return norm(*(param.main_grad for name, param in model.named_parameters() if "indexer" in name))
