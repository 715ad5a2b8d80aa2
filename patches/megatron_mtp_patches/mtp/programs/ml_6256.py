"""A model with an MTP head under sequence parallelism whose embedding leaves the scatter to its caller, as that of a
multimodal model does: one forward pass.
"""

from ...defects.labs.lab import make_config, make_gpt, start, tokens

RANKS = 2
NEEDS = ("transformer-engine",)
EXPECTED = "a loss"


def reproduce():
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region

    start(tensor_model_parallel_size=2)
    config = make_config(mtp_num_layers=1, tensor_model_parallel_size=2, sequence_parallel=True)
    model = make_gpt(config, transformer_engine=True, scatter_embedding_sequence_parallel=False)
    ids, positions = tokens()
    embedded = scatter_to_sequence_parallel_region(
        model.embedding(ids, positions), group=parallel_state.get_tensor_model_parallel_group()
    )
    model(ids, positions, None, decoder_input=embedded, labels=ids, loss_mask=torch.ones(ids.shape))
    return EXPECTED, "a loss"
