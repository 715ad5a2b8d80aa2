"""A model on two tensor-parallel ranks with --no-initialization, and a gradient of 1 for each weight of its embedding
alone: the gradient norm.
"""

from ...defects.labs.lab import VOCABULARY, make_config, make_ddp, make_gpt, make_optimizer, start

RANKS = 2


def reproduce():
    import torch

    start(tensor_model_parallel_size=2)
    config = make_config(tensor_model_parallel_size=2, perform_initialization=False)
    model = make_gpt(config)
    for param in model.parameters():
        torch.nn.init.constant_(param, 0.5)
    model = make_ddp(config, model)
    optimizer = make_optimizer(model)
    for name, param in model.named_parameters():
        param.main_grad.fill_("word_embeddings" in name)
    _, grad_norm, _ = optimizer.step()
    return (VOCABULARY * config.hidden_size) ** 0.5, float(grad_norm)
