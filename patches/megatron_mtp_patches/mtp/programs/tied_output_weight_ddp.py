"""Two steps of a GPT with tied embeddings and an MTP head on two pipeline stages, with --overlap-grad-reduce."""

from ...defects.labs.lab import compute_gradients, make_config, make_ddp, make_gpt, start

RANKS = 2
EXPECTED = "two steps"


def reproduce():
    import torch

    start(pipeline_model_parallel_size=2)
    config = make_config(mtp_num_layers=1, pipeline_model_parallel_size=2, pipeline_dtype=torch.float32)
    model = make_ddp(config, make_gpt(config, share_embeddings_and_output_weights=True), overlap_grad_reduce=True)
    for _ in range(2):
        compute_gradients(model)
    return EXPECTED, "two steps"
