"""A GPT of a run with --use-rope-scaling and --rope-scaling-factor 32, as Megatron's gpt_builders.py builds it: the
lowest frequency of its rotary embeddings, as a part of that without scaling.
"""

import math
from types import SimpleNamespace

from ...defects.labs.lab import make_config, start

NEEDS = ("megatron.training",)

BASE, FACTOR = 10000, 32.0
WITHOUT_CUDA = True


def reproduce():
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.training import global_vars

    start()
    global_vars.set_args(SimpleNamespace(use_rope_scaling=True, rope_scaling_factor=FACTOR))
    config = make_config(hidden_size=128, num_attention_heads=1)
    rope = {"position_embedding_type": "rope", "rotary_base": BASE, "rope_scaling": True}
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=32, max_sequence_length=16, **rope)
    lowest = BASE ** (-(config.kv_channels - 2) / config.kv_channels)
    assert 2 * math.pi / lowest > 8192 / 1.0  # longer than the old context divided by low_freq_factor: it is scaled
    return 1 / FACTOR, float(model.rotary_pos_emb.inv_freq.min()) / lowest
