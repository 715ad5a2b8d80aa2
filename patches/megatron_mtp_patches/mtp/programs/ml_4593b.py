"""An MTP head with full activation recomputation gets packed sequences."""

import inspect

from ...defects.labs.lab import LENGTH, make_config, make_gpt, start

EXPECTED = "hidden states"
NEEDS = ("transformer-engine",)


def reproduce():
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    start()
    config = make_config(mtp_num_layers=1)
    (head,) = make_gpt(config, transformer_engine=True).mtp.layers
    config.recompute_method, config.recompute_num_layers = "uniform", 1
    ends = torch.tensor([0, 5, LENGTH]).int()
    takes_function = "forward_func" in inspect.signature(head._checkpointed_forward).parameters
    head._checkpointed_forward(
        *[head._proj_and_transformer_layer] * takes_function,
        hidden_states=torch.randn(LENGTH, 1, config.hidden_size, requires_grad=True),
        decoder_input=torch.randn(LENGTH, 1, config.hidden_size),
        attention_mask=None,
        packed_seq_params=PackedSeqParams("thd", ends, ends, max_seqlen_q=LENGTH, max_seqlen_kv=LENGTH),
    )
    return EXPECTED, "hidden states"
