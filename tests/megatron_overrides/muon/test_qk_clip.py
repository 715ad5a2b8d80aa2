"""What QK clipping scales, when, and what it refuses; the multirank tests compare weights with the rule."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.optimizer.qk_clip import clip_qk
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import MLATransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp

from megatron_overrides.muon.qk_clip import clipping
from megatron_overrides.muon.qk_clip.checks import check_run
from megatron_overrides.muon.qk_clip.clipping import attention_layers
from megatron_overrides.muon.qk_clip.weights import scale_rows
from megatron_overrides.norms.step_decision import Excess, StepDecision
from megatron_overrides.norms.step_state import StepState

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("clip-qk-of-all-layers")]

LAYERS, THRESHOLD, ALPHA = 2, 3.5, 0.5


@pytest.fixture
def model(make_gpt):
    """A GPT of two layers and an MTP head; the largest logits of the two heads of each layer are 7 and 1."""
    gpt = make_gpt(16, 8, mtp_num_layers=1, qk_clip=True, qk_clip_threshold=THRESHOLD, qk_clip_alpha=ALPHA)
    for layer in attention_layers([gpt]):
        layer.core_attention.current_max_attn_logits = torch.tensor([7.0, 1.0])
    return gpt


def clipped_layers(model, **options):
    """Clip; (the maximum, how many layers have other weights)."""
    before = [layer.linear_qkv.weight.clone() for layer in attention_layers([model])]
    largest = clip_qk([model], **options)
    after = [layer.linear_qkv.weight for layer in attention_layers([model])]
    return largest, sum(not torch.equal(*pair) for pair in zip(before, after, strict=True))


@pytest.mark.parametrize(
    "decision, clipped",
    [(StepDecision(), LAYERS + 1), (StepDecision(Excess(2.0, 1.0)), 0), (StepDecision(overflowed=True), 0)],
)
def test_weights_are_rescaled_only_if_the_step_was_taken(model, monkeypatch, decision, clipped):
    state = StepState()
    state.decision = decision
    monkeypatch.setattr(clipping, "last_step_state", lambda: state)
    assert clipped_layers(model, log_max_only=False) == (7.0, clipped)


def test_measuring_only_stays_measuring_only(model):
    assert clipped_layers(model, log_max_only=True) == (7.0, 0)


def test_at_the_threshold_nothing_is_clipped(model):
    model.config.qk_clip_threshold = 7.0
    assert clipped_layers(model) == (7.0, 0)


def test_a_model_whose_configuration_does_not_ask_is_left_alone(model):
    model.config.qk_clip = False
    assert clipped_layers(model) == (0.0, 0)
    model.config.log_max_attention_logit = True
    assert clipped_layers(model) == (7.0, 0)


def test_attention_that_reports_no_logits_is_refused(model):
    del next(attention_layers([model])).core_attention.current_max_attn_logits
    with pytest.raises(ValueError, match=r"--qk-clip: DotProductAttention of layer 1 .*--transformer-impl"):
        clip_qk([model])


def test_for_the_log_alone_it_is_left_out_with_a_warning(model, caplog):
    del next(attention_layers([model])).core_attention.current_max_attn_logits
    for _ in range(2):
        for layer in list(attention_layers([model]))[1:]:
            layer.core_attention.current_max_attn_logits = torch.tensor([3.0])
        assert clip_qk([model], log_max_only=True) == 3.0
    assert caplog.text.count("DotProductAttention of layer 1 does not report its largest logits") == 1


def test_logits_of_other_heads_are_refused(model):
    next(attention_layers([model])).core_attention.current_max_attn_logits = torch.tensor([7.0])
    with pytest.raises(ValueError, match=r"logits of \[1\] heads, but this rank has 2; leave --qk-clip out"):
        clip_qk([model])


def test_a_layer_without_weights_of_keys_is_refused(model):
    layer = next(attention_layers([model]))
    layer.linear_q = layer._modules.pop("linear_qkv")
    with pytest.raises(ValueError, match=r"SelfAttention of layer 1 has no linear_qkv.*leave --qk-clip out"):
        clip_qk([model])


def test_an_adapter_is_refused(model):
    layer = next(attention_layers([model]))
    layer.linear_qkv = torch.nn.Sequential(layer.linear_qkv)
    with pytest.raises(ValueError, match="linear_qkv of layer 1 is a Sequential without a weight of its own"):
        clip_qk([model])


def test_no_weight_is_scaled_where_a_later_one_is_refused(model):
    *_, last = layers = list(attention_layers([model]))
    last.linear_qkv.weight = torch.nn.Parameter(torch.ones(5, 16))
    before = layers[0].linear_qkv.weight.clone()
    with pytest.raises(ValueError, match=r"has 5 rows, where its heads have 48; leave --qk-clip out"):
        clip_qk([model])
    assert torch.equal(layers[0].linear_qkv.weight, before)


def test_sharded_weights_are_refused(model):
    layer = next(attention_layers([model]))
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    weight = torch.distributed.tensor.distribute_tensor(layer.linear_qkv.weight.detach(), mesh)
    layer.linear_qkv.weight = torch.nn.Parameter(weight)
    with pytest.raises(
        ValueError, match=r"linear_qkv of layer 1 \(SelfAttention\) is sharded \(Megatron-FSDP, FSDP2\)"
    ):
        clip_qk([model])


@pytest.mark.parametrize(
    "graphs, is_refused",
    [
        ({"enable_cuda_graph": True}, True),
        ({"external_cuda_graph": True}, True),
        ({"cuda_graph_impl": "local"}, True),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": "full"}, True),
        ({"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["moe_router", "attn"]}, True),
        ({"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": [SimpleNamespace(name="attn")]}, True),
        ({"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["moe_router"]}, False),
        ({"cuda_graph_impl": "transformer_engine", "cuda_graph_scope_deprecated": ["moe_router"]}, False),
        ({"cuda_graph_impl": "none", "cuda_graph_scope": "full"}, False),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration_inference"}, False),
    ],
)
def test_cuda_graphs_of_attention_are_refused(graphs, is_refused):
    check_run(SimpleNamespace(qk_clip=False, **graphs))
    if not is_refused:
        check_run(SimpleNamespace(qk_clip=True, **graphs))
        return
    with pytest.raises(ValueError, match="--qk-clip reads the largest logits .* without attention"):
        check_run(SimpleNamespace(qk_clip=True, **graphs))


@pytest.mark.parametrize("name", ["use_megatron_fsdp", "use_torch_fsdp2", "overlap_param_gather_with_optimizer_step"])
def test_what_does_not_go_with_it_is_refused_at_the_start(name):
    with pytest.raises(ValueError, match=f"--qk-clip: --{name.replace('_', '-')} .*; leave one of the two out"):
        check_run(SimpleNamespace(**{"qk_clip": True, name: True}))


def test_attention_of_the_local_implementation_is_refused_at_the_start():
    check_run(SimpleNamespace(qk_clip=True, transformer_impl="transformer_engine"))
    check_run(SimpleNamespace(qk_clip=False, transformer_impl="local"))
    with pytest.raises(ValueError, match="--transformer-impl local .*; give --transformer-impl transformer_engine"):
        check_run(SimpleNamespace(qk_clip=True, transformer_impl="local"))


def test_cross_attention_is_scaled_head_by_head(model):
    """That of T5 has a weight for queries and one for the key and the value of each head."""
    layer = next(attention_layers([model]))
    layer.linear_q, layer.linear_kv = (torch.nn.Linear(4, rows) for rows in (16, 32))
    del layer.linear_qkv
    model = torch.nn.ModuleList([layer])
    before = [linear.weight.detach().clone() for linear in (layer.linear_q, layer.linear_kv)]
    clip_qk([model])
    half = 0.5**ALPHA
    factors = [[half] * 8 + [1.0] * 8, [half] * 8 + [1.0] * 24]
    for linear, old, row_factors in zip((layer.linear_q, layer.linear_kv), before, factors, strict=True):
        torch.testing.assert_close(linear.weight.detach(), old * torch.tensor(row_factors).unsqueeze(1))


def test_a_main_weight_of_unknown_place_is_refused():
    param = torch.nn.Parameter(torch.ones(4, 2))
    param.main_param = torch.ones(5)
    with pytest.raises(ValueError, match=r"shape \[4, 2\] has the shape \[5\].*before the optimizer is created"):
        scale_rows(param, torch.ones(4))
    assert torch.equal(param, torch.ones(4, 2))


class ReportsLogits(torch.nn.Module):
    """An inner attention that says that the two heads of this rank have the largest logits 7 and 1."""

    def __init__(self, **_):
        super().__init__()
        self.current_max_attn_logits = torch.tensor([7.0, 1.0])


@pytest.mark.parametrize("query_rank", [None, 4])
def test_absorbed_latent_attention_scales_its_weight_of_keys(query_rank):
    """Megatron pairs it with sparse attention alone, which reports no logits: they are stubbed.

    Up to 0.18 it has a weight of keys and one of values; later one of both.
    """
    absorbed = pytest.importorskip(
        "megatron.core.transformer.experimental_attention_variant.absorbed_mla", reason="0.16 has none"
    )
    config = MLATransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        q_lora_rank=query_rank,
        kv_lora_rank=4,
        qk_head_dim=4,
        qk_pos_emb_head_dim=2,
        v_head_dim=6,
        rope_type="rope",
        add_bias_linear=False,
        use_cpu_initialization=True,
        qk_clip=True,
        qk_clip_threshold=THRESHOLD,
        qk_clip_alpha=ALPHA,
    )
    linear = {f"linear_{name}": ColumnParallelLinear for name in ("q_proj", "q_down_proj", "q_up_proj", "kv_down_proj")}
    submodule_names = absorbed.AbsorbedMLASelfAttentionSubmodules.__dataclass_fields__
    key_and_value_layers = ("linear_k_up_proj", "linear_v_up_proj", "linear_kv_up_proj")
    up = {name: ColumnParallelLinear for name in key_and_value_layers if name in submodule_names}
    others = {"core_attention": ReportsLogits, "linear_proj": IdentityOp, "q_layernorm": IdentityOp}
    submodules = absorbed.AbsorbedMLASelfAttentionSubmodules(**linear, **up, **others, kv_layernorm=IdentityOp)
    layer = absorbed.AbsorbedMLASelfAttention(config, submodules, 1, AttnMaskType.causal)
    model = torch.nn.ModuleList([layer])
    query = layer.linear_q_proj if query_rank is None else layer.linear_q_up_proj
    weights = [query.weight, *(getattr(layer, name).weight for name in up)]
    before = [weight.detach().clone() for weight in weights]
    assert clip_qk([model]) == 7.0
    half = 0.5**ALPHA
    factors = {
        "linear_k_up_proj": [half] * 4 + [1.0] * 4,
        "linear_v_up_proj": [1.0] * 12,
        "linear_kv_up_proj": [half] * 4 + [1.0] * 16,
    }
    query_factors = [half] * 4 + [0.5] * 2 + [1.0] * 6
    for old, new, row_factors in zip(before, weights, [query_factors, *(factors[name] for name in up)], strict=True):
        torch.testing.assert_close(new.detach(), old * torch.tensor(row_factors).unsqueeze(1))


def test_of_a_shared_layer_the_weights_are_scaled_once(model):
    """A module that two places of a model hold is one layer."""
    holder = torch.nn.ModuleList([model, model])
    before = next(attention_layers([model])).linear_qkv.weight.clone()
    clip_qk([holder])
    after = next(attention_layers([model])).linear_qkv.weight
    size = len(before) // 6  # query, key and value of two heads
    torch.testing.assert_close(after[:size].detach(), before[:size] * 0.5**ALPHA)


def test_a_bias_is_scaled_with_its_rows(make_gpt):
    gpt = make_gpt(16, 8, mtp_num_layers=None, qk_clip=True, qk_clip_threshold=THRESHOLD, add_qkv_bias=True)
    layer = next(attention_layers([gpt]))
    layer.core_attention.current_max_attn_logits = torch.tensor([7.0, 1.0])
    for other in list(attention_layers([gpt]))[1:]:
        other.core_attention.current_max_attn_logits = None
    with torch.no_grad():
        layer.linear_qkv.bias.fill_(1.0)
    clip_qk([gpt])
    parts = layer.linear_qkv.bias.detach().chunk(6)  # query, key and value of each head
    assert [round(float(part[0]), 4) for part in parts] == [0.7071, 0.7071, 1.0, 1.0, 1.0, 1.0]
