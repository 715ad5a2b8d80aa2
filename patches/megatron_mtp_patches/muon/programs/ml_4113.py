"""The distance of a matrix from the mean of two data-parallel ranks after a step of Muon, in mean updates. The
ranks have other gradients, which DDP reduces for its distributed optimizer.
"""

from ...defects.labs.lab import make_config, make_ddp, make_gpt, make_optimizer, norm, start

RANKS = 2
NEEDS = ("Muon",)


def reproduce():
    import torch

    start()
    config = make_config()
    model = make_ddp(config, make_gpt(config), use_distributed_optimizer=True)
    optimizer = make_optimizer(model, optimizer="muon", use_distributed_optimizer=True)
    weight = model.module.decoder.layers[0].mlp.linear_fc1.weight
    before = weight.detach().clone()
    torch.manual_seed(torch.distributed.get_rank())
    for param in model.parameters():
        param.main_grad.copy_(torch.randn(param.shape))
    model.finish_grad_sync()
    optimizer.step()
    mean = weight.detach().clone()
    torch.distributed.all_reduce(mean)
    mean /= 2
    return 0.0, norm(weight.detach() - mean) / norm(mean - before)
