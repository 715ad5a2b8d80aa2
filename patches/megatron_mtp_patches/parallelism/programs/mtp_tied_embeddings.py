"""The gradient norm of a word embedding that is the output weight, in a GPT with an MTP head on two pipeline stages:
with --no-gradient-accumulation-fusion and without it, on each of them.
"""

from ...defects.labs.lab import compute_gradients, gather, make_config, make_ddp, make_gpt, norm, start

RANKS = 2
NEEDS = ("transformer-engine", "Apex")


def reproduce():
    import torch

    start(pipeline_model_parallel_size=2)
    return tuple(gather(gradient_norm(torch, is_fused)) for is_fused in (False, True))


def gradient_norm(torch, is_fused):
    torch.manual_seed(1)
    stages = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}
    heads = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 1.0}
    config = make_config(gradient_accumulation_fusion=is_fused, **heads, **stages)
    model = make_ddp(config, make_gpt(config, transformer_engine=True, share_embeddings_and_output_weights=True))
    compute_gradients(model)
    return norm(model.module.embedding.word_embeddings.weight.main_grad)
