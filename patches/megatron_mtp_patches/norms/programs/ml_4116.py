"""The gradient norms by which two data-parallel ranks clip detached MTP heads under dist_muon, where one weight of the
heads has a gradient of ones.
"""

from ...defects.labs.lab import gather, make_config, make_gpt, make_optimizer, start

RANKS = 2
NEEDS = ("Muon",)


def reproduce():
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.training.training import wrap_model_chunks_with_ddp

    start()
    config = make_config(mtp_num_layers=1, mtp_detach_heads=True)
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    chunks = [make_gpt(config).bfloat16()]
    (model,) = wrap_model_chunks_with_ddp(chunks, config, ddp_config, use_layer_wise_distributed_optimizer=True)
    optimizer = make_optimizer(model, optimizer="dist_muon", bf16=True)
    weight = model.module.mtp.layers[0].eh_proj.weight
    weight.main_grad.fill_(1.0)
    optimizer.step()
    right = weight.numel() ** 0.5
    return [right, right], gather(float(optimizer.grad_norms_by_group["mtp"]))
