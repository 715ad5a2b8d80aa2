"""With mtp_detach_heads no gradient of the MTP loss leaves the heads, and the heads train as before, to the bit."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron_mtp_patches.engine.call import Call

from megatron_overrides.mtp.heads.detached_heads import TAKES_MAIN_HIDDEN_STATES, detach_scheduled_layer

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("detach-mtp-heads")]

FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
REPEATED = "mtp_use_repeated_layer"
needs_repeated_layer = pytest.mark.skipif(
    REPEATED not in TransformerConfig.__dataclass_fields__, reason="0.16 has no repeated MTP layer"
)
MODELS = [
    pytest.param({}, id="2 deep"),
    pytest.param({"mtp_num_layers": 1}, id="1 deep"),
    pytest.param({"mtp_num_layers": 3}, id="3 deep"),
    pytest.param({"mtp_num_layers": 3, REPEATED: True}, id="repeated layer", marks=needs_repeated_layer),
    pytest.param({"tied": True, "mtp_num_layers": 3}, id="tied"),
    pytest.param(FULL_RECOMPUTE, id="full recompute"),
    pytest.param({"tied": True, **FULL_RECOMPUTE}, id="tied, full recompute"),
    pytest.param({"calculate_per_token_loss": True}, id="loss per token"),
]


def split(gradients):
    heads = {name: gradient for name, gradient in gradients.items() if name.startswith("mtp.")}
    return {name: gradient for name, gradient in gradients.items() if name not in heads}, heads


@pytest.mark.parametrize("settings", MODELS)
def test_the_mtp_loss_alone_reaches_the_heads_and_nothing_else(make_model, batch, gradients, settings):
    model = make_model(mtp_detach_heads=True, **settings)
    main, heads = split(gradients(model, model(**batch), weight=0.0))
    assert {name for name, gradient in main.items() if gradient.any()} == set()
    assert set(heads) == {name for name, _ in model.named_parameters() if name.startswith("mtp.")}
    assert all(gradient.any() for name, gradient in heads.items() if name.endswith("eh_proj.weight"))


@pytest.mark.parametrize("settings", MODELS)
def test_without_detaching_it_reaches_the_main_model(make_model, batch, gradients, settings):
    model = make_model(**settings)
    main, _ = split(gradients(model, model(**batch), weight=0.0))
    assert main["embedding.word_embeddings.weight"].any() and main["decoder.final_layernorm.weight"].any()


@pytest.mark.parametrize("settings", MODELS)
def test_the_main_model_trains_as_if_there_were_no_heads(make_model, batch, gradients, settings):
    model = make_model(mtp_detach_heads=True, **settings)
    bare = make_model(
        **{name: value for name, value in settings.items() if name != REPEATED} | {"mtp_num_layers": None}
    )
    bare.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("mtp.")})
    expected = gradients(bare, bare(**batch))
    main, _ = split(gradients(model, model(**batch)))
    assert set(main) == set(expected)
    assert all(torch.equal(main[name], expected[name]) for name in expected)


def test_the_heads_train_as_they_do_without_detaching(make_model, batch, gradients):
    attached, detached = make_model(), make_model(mtp_detach_heads=True)
    _, expected = split(gradients(attached, attached(**batch)))
    _, heads = split(gradients(detached, detached(**batch)))
    assert all(torch.equal(heads[name], expected[name]) for name in expected)


def test_a_deeper_head_trains_the_heads_before_it(make_model, batch, monkeypatch):
    from megatron.core.transformer import multi_token_prediction as mtp

    model = make_model(mtp_detach_heads=True)
    attach, depths = mtp.MTPLossAutoScaler.apply, []

    def attach_second_only(hidden, loss):
        depths.append(loss)
        return attach(hidden, loss) if len(depths) == 2 else hidden

    monkeypatch.setattr(mtp.MTPLossAutoScaler, "apply", attach_second_only)
    (0.0 * model(**batch).mean()).backward()
    assert len(depths) == 2
    assert model.mtp.layers[0].eh_proj.weight.grad.any()


def test_under_the_overlap_of_experts_the_heads_are_detached_too(make_model, batch, gradients, run_overlapped, experts):
    del batch["loss_mask"]
    model = make_model(mtp_detach_heads=True, **experts).bfloat16()
    loss, backward = run_overlapped(model, batch)
    plain = model(**batch)
    assert torch.equal(loss, plain)
    expected = gradients(model, plain)
    model.zero_grad()
    backward(torch.full_like(loss, 1 / loss.numel()))
    got = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    assert set(got) == set(expected)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "overlap, distributed, waits", [(True, False, True), (True, True, False), (False, False, False)]
)
def test_the_mtp_stage_copy_of_the_embedding_reports_a_gradient_of_zero(make_model, batch, overlap, distributed, waits):
    """The case of the last of several pipeline stages, where nothing else gives it one and DDP waits for one."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    model = make_model(mtp_detach_heads=True)
    model.config.pipeline_model_parallel_size = 2
    ddp = DistributedDataParallelConfig(overlap_grad_reduce=overlap, use_distributed_optimizer=distributed)
    wrapper = DistributedDataParallel(model.config, ddp, model)
    reported = []
    model.embedding.word_embeddings.weight.register_hook(reported.append)
    hidden = torch.zeros(12, 2, 16, requires_grad=True)
    inputs = {name: batch[name] for name in ("input_ids", "position_ids", "attention_mask")}
    model.mtp(hidden_states=hidden, embedding=model.embedding, **inputs, rotary_pos_emb=None)[12:].sum().backward()
    assert [gradient.any().item() for gradient in reported] == [False] * waits
    assert not wrapper.module.embedding.word_embeddings.weight.main_grad.any() and not hidden.grad.any()


def test_a_deferred_embedding_gradient_is_refused():
    with pytest.raises(ValueError, match="--mtp-detach-heads .* leave one of the two out"):
        TransformerConfig(
            num_layers=1,
            hidden_size=8,
            num_attention_heads=1,
            mtp_detach_heads=True,
            defer_embedding_wgrad_compute=True,
            pipeline_model_parallel_size=2,
            gradient_accumulation_fusion=True,
            pipeline_dtype=torch.bfloat16,
        )


@pytest.mark.parametrize("settings, detached", [({}, False), ({"mtp_detach_heads": True}, True)])
def test_the_configuration_of_a_scheduled_layer_may_lack_the_field(settings, detached):
    """Upstream's own tests build the callables of a layer with a configuration that is not a TransformerConfig."""
    layer = SimpleNamespace(config=SimpleNamespace(**settings))
    build = Call(lambda layer: ([lambda node, hidden_states: hidden_states], None), None, (layer,), {})
    (forward,), _ = detach_scheduled_layer(build)
    forward(SimpleNamespace(is_first_layer=True), torch.zeros(1))
    assert hasattr(layer, TAKES_MAIN_HIDDEN_STATES) is detached
