"""The weights of a model with an offloaded optimizer are set to 2, as a load without the optimizer does it, and a step
with a learning rate of 0 follows: the smallest and the largest weight.
"""

from ...defects.labs.lab import make_config, make_ddp, make_gpt, make_optimizer, start, take_step


def reproduce():
    import torch

    start()
    config = make_config()
    model = make_ddp(config, make_gpt(config).bfloat16(), use_distributed_optimizer=True)
    optimizer = make_optimizer(
        model,
        lr=0.0,
        bf16=True,
        use_distributed_optimizer=True,
        optimizer_cpu_offload=True,
        optimizer_offload_fraction=1.0,
    )
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(2.0)
    optimizer.reload_model_params()
    take_step(model, optimizer)
    weights = torch.cat([param.flatten() for param in model.parameters()])
    return [2.0, 2.0], [float(weights.min()), float(weights.max())]
