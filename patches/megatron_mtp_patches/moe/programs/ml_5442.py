"""Two chunks of a dense GPT, as virtual pipeline stages have, become two of a mixture of experts."""

from ...defects.labs.lab import make_config, make_gpt, start

EXPECTED = "the weights of both chunks"


def reproduce():
    from megatron.core.transformer.moe.upcycling_utils import upcycle_state_dict

    start()
    settings = {"add_bias_linear": False, "num_layers": 1}
    experts = {"num_moe_experts": 2, "moe_ffn_hidden_size": 64, **settings}
    dense, moe = ([make_gpt(make_config(**one)) for _ in range(2)] for one in (settings, experts))
    upcycle_state_dict(moe, dense)
    return EXPECTED, EXPECTED
