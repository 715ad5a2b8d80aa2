"""A checkpoint in the format fully_reshardable after one step, with overlapped gradients in several buckets: of so many
parameters, how many have their own fp32 weights in it.
"""

from ...defects.labs.lab import make_config, make_ddp, make_gpt, make_optimizer, start, take_step


def reproduce():
    import torch

    start()
    config = make_config(bf16=True, params_dtype=torch.bfloat16)
    model = make_ddp(
        config,
        make_gpt(config).bfloat16(),
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        bucket_size=1000,
    )
    optimizer = make_optimizer(model, bf16=True, use_distributed_optimizer=True)
    take_step(model, optimizer)
    model_state = model.module.sharded_state_dict()
    weights = {(tensor.key, tensor.global_offset): tensor.data for tensor in model_state.values()}
    metadata = {"distrib_optim_sharding_type": "fully_reshardable"}
    saved = optimizer.sharded_state_dict(model_state, metadata=metadata)["param_state"]
    own = 0
    for state in saved.values():
        weight = state["param"]
        name = weight.key.removeprefix("optimizer.state.param.")
        own += torch.equal(weight.data.bfloat16().cpu(), weights[name, weight.global_offset].cpu())
    return len(saved), own
