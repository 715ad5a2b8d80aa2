"""The gradient norm of an MTP head that runs for three depths, without and with --gradient-accumulation-fusion."""

from ...defects.labs.lab import compute_gradients, make_config, make_ddp, make_gpt, norm, start

NEEDS = ("transformer-engine", "Apex")


def reproduce():
    import torch

    start()
    return tuple(gradient_norm(torch, fused) for fused in (False, True))


def gradient_norm(torch, fused):
    torch.manual_seed(1)
    config = make_config(
        mtp_num_layers=3,
        mtp_use_repeated_layer=True,
        gradient_accumulation_fusion=fused,
    )
    model = make_ddp(config, make_gpt(config, transformer_engine=True))
    compute_gradients(model)
    return norm(*(param.main_grad for param in model.module.mtp.parameters()))
