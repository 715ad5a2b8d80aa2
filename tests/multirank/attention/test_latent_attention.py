"""The gradients of multi-latent attention (MLA) do not depend on how its heads are dealt out over ranks.

The reference is a model that each rank has whole, with the same weights and samples.
"""

import functools
import zlib
from importlib.util import find_spec

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt import gpt_layer_specs as specs
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import random
from megatron.core.transformer import MLATransformerConfig

from scripts.tiny_gpt import causal_inputs, run_microbatches

pytestmark = [
    pytest.mark.forked("patched"),
    pytest.mark.guards("sum-gradients-of-shared-latents", "count-duplicated-weights-once"),
    pytest.mark.ranks(2),
]

te = pytest.importorskip("megatron.core.extensions.transformer_engine", reason="MLA has layers of TransformerEngine")
pytest.importorskip("transformer_engine", reason="MLA has layers of TransformerEngine")

VOCABULARY, LENGTH, MICROBATCHES = 32, 16, 2
QUERY, LATENT, POSITION = 8, 12, 4
ABSORBED = "megatron.core.transformer.experimental_attention_variant.absorbed_mla"
# From 0.19 on the fused projection trains with tensor parallelism; before, it ends in an error.
needs_fused_projection = pytest.mark.skipif(
    not find_spec("megatron.core.transformer.mla_qk_norm_config"), reason="the fused projection needs 0.19"
)


def build(kind, ranks=1, **settings):
    """A GPT of one layer with an MTP head in DDP, with weights that depend on their names alone.

    `kind` is the down projection: duplicated, split, or fused with that of the queries.
    """
    fused = {"mla_down_proj_fusion": True} if kind == "fused" else {}
    config = build_config(mtp_num_layers=1, tensor_model_parallel_size=ranks, **fused, **settings)
    spec = specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=True, multi_latent_attention=True, **fused)
    if kind == "split":
        attention = spec.submodules.self_attention.submodules
        attention.linear_q_down_proj = attention.linear_kv_down_proj = te.TEColumnParallelLinear
    heads = specs.get_gpt_mtp_block_spec(config, spec, True)
    gpt = GPTModel(config, spec, VOCABULARY, LENGTH, position_embedding_type="rope", mtp_block_spec=heads)
    fill(gpt)
    config.finalize_model_grads_func = finalize_model_grads
    return DistributedDataParallel(config, DistributedDataParallelConfig(), gpt)


def build_config(**settings):
    random.model_parallel_cuda_manual_seed(1)
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "q_lora_rank": QUERY, "kv_lora_rank": LATENT}
    sizes |= {"qk_head_dim": 4, "qk_pos_emb_head_dim": POSITION, "v_head_dim": 4, "num_layers": 1}
    defaults = {"rope_type": "rope", "normalization": "RMSNorm", "qk_layernorm": True, "add_bias_linear": False}
    defaults |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "gradient_accumulation_fusion": False}
    return MLATransformerConfig(**{**sizes, **defaults, "use_cpu_initialization": True, **settings})


def fill(model):
    for name, param in model.named_parameters():
        size = parallel_state.get_tensor_model_parallel_world_size()
        shape, along = list(param.shape), partition_dim(model, name)
        if along >= 0:
            shape[along] *= size
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        whole = torch.randn(shape, generator=generator) * 0.3 + ("norm" in name)
        if along >= 0:
            parts = [part.chunk(size, along) for part in pieces(name, whole)]
            whole = torch.cat([part[parallel_state.get_tensor_model_parallel_rank()] for part in parts], along)
        with torch.no_grad():
            param.copy_(whole)


def partition_dim(model, name):
    """Along which dimension a parameter is split; -1 for a copy, however it is marked."""
    is_copied = type(model.get_submodule(name.rpartition(".")[0])) is te.TELinear
    param = model.get_parameter(name)
    return param.partition_dim if getattr(param, "tensor_model_parallel", False) and not is_copied else -1


def pieces(name, whole):
    """The weights in one: a fused projection has that of the queries and that of keys and values."""
    rows = whole.size(0)
    share = rows * QUERY // (QUERY + LATENT + POSITION)
    return whole.split([share, rows - share]) if name.endswith("linear_qkv_down_proj.weight") else [whole]


def whole_gradients(model, from_all_ranks):
    """{name: gradient of the whole weight}. Copies have the same on all ranks."""
    gradients = {}
    for name, param in model.module.named_parameters():
        copies, along = from_all_ranks(param.main_grad.clone()), partition_dim(model.module, name)
        size = parallel_state.get_tensor_model_parallel_world_size()
        if along < 0:
            assert all(torch.allclose(copy, copies[0], rtol=1e-4, atol=1e-6) for copy in copies), f"{name} differs"
            gradients[name] = copies[0]
        else:
            parts = zip(*(pieces(name, copy) for copy in copies[:size]), strict=True)
            gradients[name] = torch.cat([torch.cat(part, along) for part in parts], along)
    return gradients


def compute_gradients(model):
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(VOCABULARY, (MICROBATCHES, 2, LENGTH + 1), generator=generator)
    microbatches = iter(tokens)

    def forward_step(_, model):
        *inputs, labels = causal_inputs(next(microbatches))
        losses = model(*inputs, labels=labels, loss_mask=torch.ones(labels.shape))
        return losses, lambda losses: (losses.sum(), torch.tensor(losses.numel(), dtype=torch.int), {})

    model.zero_grad_buffer()
    run_microbatches(model, forward_step, MICROBATCHES, LENGTH, 2)


@pytest.fixture(scope="module")
def gradients_of_whole(parallel):
    @functools.cache
    def compute(kind, **settings):
        parallel()
        model = build(kind, **settings)
        compute_gradients(model)
        return {name: param.main_grad.clone() for name, param in model.module.named_parameters()}

    return compute


@pytest.fixture
def deviations(parallel, world_size, from_all_ranks, gradients_of_whole):
    """deviations(kind, model, **settings): {name: by how much of itself a gradient differs from that of the whole}."""

    def compare(kind, model, **settings):
        expected = gradients_of_whole(kind, **model)
        parallel(tensor_model_parallel_size=world_size)
        cut = build(kind, world_size, **model, **settings)
        compute_gradients(cut)
        gradients = whole_gradients(cut, from_all_ranks)
        assert set(gradients) == set(expected)
        return {name: float((gradients[name] - right).norm() / right.norm()) for name, right in expected.items()}

    return compare


@pytest.fixture
def recompute_without_compiler(monkeypatch):
    """Megatron compiles the function that gives an output the memory of its recomputation; a copy does it here."""

    def share(output, recomputed):
        storage, source = output.untyped_storage(), recomputed.untyped_storage()
        storage.resize_(source.nbytes())
        storage.copy_(source)

    monkeypatch.setattr(random, "_get_share_storage", lambda: share, raising=False)


UP_PROJECTION = {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}
LAYERS = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SAME = pytest.approx(0.0, abs=1e-4)


@pytest.mark.parametrize(
    "kind, model, recomputation, is_sequence_parallel",
    [
        ("duplicated", {}, {}, False),
        ("duplicated", {"q_lora_rank": None, "calculate_per_token_loss": True}, UP_PROJECTION, True),
        ("split", {}, LAYERS, True),
        pytest.param("fused", {}, UP_PROJECTION, False, marks=needs_fused_projection),
    ],
)
def test_the_latents_learn_from_the_heads_of_all_ranks(
    deviations, recompute_without_compiler, kind, model, recomputation, is_sequence_parallel
):
    by_name = deviations(kind, model, sequence_parallel=is_sequence_parallel, **recomputation)
    assert by_name == dict.fromkeys(by_name, SAME)


@pytest.mark.parametrize("is_sequence_parallel", [False, True])
def test_the_gradient_norm_counts_copies_once(parallel, world_size, gradients_of_whole, is_sequence_parallel):
    expected = sum(float(gradient.norm() ** 2) for gradient in gradients_of_whole("duplicated").values()) ** 0.5
    parallel(tensor_model_parallel_size=world_size)
    model = build("duplicated", world_size, sequence_parallel=is_sequence_parallel)
    compute_gradients(model)
    _, norm, _ = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3), [model]).step()
    assert float(norm) == pytest.approx(expected, rel=1e-4)


class AttentionOfLatents(torch.nn.Module):
    """Attention whose keys and values are the latents, [tokens, batch, 1, width]: absorbed MLA has no other."""

    def __init__(self, **_):
        super().__init__()

    def forward(self, query, latents, *_, **__):
        weights = torch.einsum("sbnc,tbc->bnst", query, latents.squeeze(2)).softmax(-1)
        return torch.einsum("bnst,tbc->sbnc", weights, latents.squeeze(2)[..., :LATENT]).flatten(2)


@pytest.fixture
def gradient_of_down_projection(parallel):
    """The gradient of this rank's down projection for keys and values in a layer of absorbed MLA."""
    absorbed = pytest.importorskip(ABSORBED, reason="absorbed MLA came with 0.17")

    def compute(down, ranks):
        parallel(tensor_model_parallel_size=ranks)
        config = build_config(tensor_model_parallel_size=ranks, sequence_parallel=ranks > 1)
        up = [name for name in vars(absorbed.AbsorbedMLASelfAttentionSubmodules()) if name.endswith("v_up_proj")]
        keys = ["linear_k_up_proj"] if "linear_v_up_proj" in up else []
        layer = absorbed.AbsorbedMLASelfAttention(
            config,
            absorbed.AbsorbedMLASelfAttentionSubmodules(
                linear_q_down_proj=down,
                linear_q_up_proj=te.TEColumnParallelLinear,
                linear_kv_down_proj=down,
                core_attention=AttentionOfLatents,
                linear_proj=te.TERowParallelLinear,
                q_layernorm=te.TENorm,
                kv_layernorm=te.TENorm,
                **dict.fromkeys(up + keys, te.TEColumnParallelLinear),
            ),
            layer_number=1,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
        fill(layer)
        generator = torch.Generator().manual_seed(5)
        rank = parallel_state.get_tensor_model_parallel_rank()
        states, weights = (torch.randn(LENGTH, 2, 16, generator=generator).chunk(ranks)[rank] for _ in range(2))
        (layer(states, None)[0] * weights).sum().backward()
        return layer.linear_kv_down_proj.weight.grad

    return compute


def test_split_latents_of_absorbed_layers_learn_from_the_heads_of_all_ranks(gradient_of_down_projection, rank):
    expected = gradient_of_down_projection(te.TELinear, ranks=1).chunk(2)[rank]
    gradient = gradient_of_down_projection(te.TEColumnParallelLinear, ranks=2)
    assert float((gradient - expected).norm() / expected.norm()) == SAME
