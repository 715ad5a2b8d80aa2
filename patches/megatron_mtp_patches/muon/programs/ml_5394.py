"""One step of Muon with --clip-grad 1 where the gradient of the embedding has exploded to 1e12: the norm of the update
of another matrix, beside that without clipping.
"""

from ...defects.labs.lab import make_config, make_ddp, make_gpt, make_optimizer, norm, start

NEEDS = ("Muon",)


def reproduce():
    start()
    return tuple(norm_of_update(clip) for clip in (0.0, 1.0))


def norm_of_update(clip):
    import torch

    torch.manual_seed(1)
    config = make_config()
    model = make_ddp(config, make_gpt(config))
    for param in model.parameters():
        param.main_grad.copy_(torch.randn(param.shape))
    model.module.embedding.word_embeddings.weight.main_grad.fill_(1e12)
    weight = model.module.decoder.layers[0].mlp.linear_fc1.weight
    before = weight.detach().clone()
    make_optimizer(model, optimizer="muon", weight_decay=0.0, clip_grad=clip).step()
    return norm(weight.detach() - before)
