"""Only the heads train: what the main model keeps, what it costs, and what is refused."""

import importlib
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron_mtp_patches.engine.call import Call

from tests.trainings.heads import LENGTH, VOCABULARY, HeadTraining, kept_bytes, train_detached, train_frozen

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("freeze-base-model-for-mtp")]

STEPS, COMPARED = 10, 5
ROUTED = {"num_moe_experts": 4, "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
ROUTED |= {"moe_aux_loss_coeff": 0.01, "add_bias_linear": False}
FROZEN, DETACHED = {"freeze_base_model_for_mtp": True}, {"mtp_detach_heads": True}


@pytest.fixture
def make(make_gpt):
    """make(**config): a HeadTraining of one rank; `clip` limits the norm of the heads."""

    def build(clip=0.0, optimizer=(), **config):
        settings = {"clip_grad": 0.0, "mtp_clip_grad": clip} if config.get("mtp_detach_heads") else {"clip_grad": clip}
        return HeadTraining([make_gpt(VOCABULARY, LENGTH, **config)], **dict(optimizer), **settings)

    return build


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"tied": True},
        ROUTED,
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"mtp_loss_type": "tv"},
        {"mtp_loss_type": "e2e_tv", "mtp_logits_chunk_size": 8},
        {"mtp_logits_chunk_size": 8},
    ],
    ids=["dense", "tied", "experts", "recomputed", "tv", "e2e_tv", "chunked"],
)
def test_heads_train_as_detached_heads_over_a_main_model_that_is_put_back(make, model):
    """`train_frozen` compares the bits of the main model."""
    frozen, detached = make(**model, **FROZEN), make(**model, **DETACHED)
    actual, right = train_frozen(frozen, COMPARED), train_detached(detached, COMPARED)
    assert frozen.losses == detached.losses and len(frozen.losses) == COMPARED
    assert all(torch.equal(tensor, right[name]) for name, tensor in actual.items())


def test_heads_of_a_hybrid_model_train_alone(train_hybrid):
    frozen, detached = train_hybrid(**FROZEN), train_hybrid(**DETACHED)
    actual, right = train_frozen(frozen, COMPARED), train_detached(detached, COMPARED)
    assert frozen.losses == detached.losses and len(frozen.losses) == COMPARED
    assert all(torch.equal(tensor, right[name]) for name, tensor in actual.items())


def test_muon_steps_the_heads_alone(make):
    pytest.importorskip("emerging_optimizers", reason="Muon needs it")
    if not hasattr(importlib.import_module("megatron.core.optimizer"), "_get_megatron_emerging_optimizer"):
        pytest.skip("before 0.18 another function makes Muon")
    train_frozen(make(optimizer={"optimizer": "muon", "lr": 1e-2, "adam_beta2": 0.95}, **FROZEN), COMPARED)


def test_gradients_and_optimizer_state_are_those_of_the_heads(make):
    training = make(**FROZEN)
    training.step(0)
    heads = sum(param.numel() for param in training.bare[0].mtp.parameters())
    assert sum(buffer.grad_data.numel() for chunk in training.model for buffer in chunk.buffers) == heads
    (leaf,) = training.optimizer.chained_optimizers
    states = list(leaf.optimizer.state.values())
    moments = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]
    assert sum(moment.numel() for moment in moments) == 2 * heads


def test_no_activation_of_the_main_model_is_kept(make):
    """Its number of layers does not matter, and its logits are not kept either."""
    frozen = [kept_bytes(make(num_layers=layers, **FROZEN)) for layers in (1, 4)]
    detached = [kept_bytes(make(num_layers=layers, **DETACHED)) for layers in (1, 4)]
    assert frozen[0] == frozen[1] < detached[0] < detached[1]


@pytest.fixture(params=["make_model", "make_hybrid"])
def frozen_model(request):
    """A GPT, or a hybrid model, that nothing wraps."""
    return request.getfixturevalue(request.param)(**FROZEN)


def test_a_new_model_is_frozen_before_anything_wraps_it(frozen_model):
    """From 0.18 on, trainers lay out gradient buffers from the parameters of a bare model that require gradients."""
    training = {name.split(".")[0] for name, param in frozen_model.named_parameters() if param.requires_grad}
    assert training == {"mtp"}


def test_what_has_a_frozen_model_as_a_part_is_frozen_before_it_is_sharded(make_gpt, shard):
    gpt = make_gpt(VOCABULARY, LENGTH, **FROZEN)
    whole = torch.nn.ModuleDict({"encoder": torch.nn.Linear(2, 2), "gpt": gpt})
    shard(gpt.config, whole)
    assert not any(param.requires_grad for param in whole["encoder"].parameters())
    assert all(param.requires_grad for param in gpt.mtp.layers.parameters())


def test_the_main_model_sends_no_gradient_into_an_input_that_requires_one(frozen_model, batch):
    """An encoder's output, or what an earlier pipeline stage has sent, would make autograd keep all activations."""
    shape = (*reversed(batch["input_ids"].shape), frozen_model.config.hidden_size)
    decoder_input = torch.randn(shape, requires_grad=True)
    frozen_model(**batch, decoder_input=decoder_input).mean().backward()
    assert decoder_input.grad is None


def test_running_statistics_stay(make_gpt):
    model = make_gpt(VOCABULARY, LENGTH, **FROZEN)
    model.statistics = torch.nn.BatchNorm1d(3)
    training = HeadTraining([model])
    for chunk in training.model:
        chunk.train()
    model.statistics(torch.randn(5, 3))
    assert not model.statistics.running_mean.any() and model.statistics.num_batches_tracked == 0


def test_the_biases_of_routers_in_the_main_model_stay(make, monkeypatch):
    """The routers are given unequal loads, as if something had counted them without gradients."""
    finalize = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    training = make(**ROUTED, **FROZEN)
    (model,) = training.bare
    routers = {name: module for name, module in model.named_modules() if hasattr(module, "expert_bias")}
    for router in routers.values():
        router.local_tokens_per_expert.copy_(torch.arange(4.0))
    finalize._update_router_expert_bias(training.model, model.config)
    moved = {name for name, router in routers.items() if router.expert_bias.any()}
    assert moved == {name for name in routers if name.startswith("mtp.")} != set(routers)


def test_the_balance_of_quantiles_in_the_main_model_stays(make):
    finalize = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    if not hasattr(finalize, "_update_router_qb_beta"):
        pytest.skip("routers balance by quantiles from 0.19 on")
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, mtp_num_layers=1, **FROZEN)
    router = torch.nn.Module()
    router.qb_beta, router.qb_beta_accum, router.qb_beta_count = torch.ones(4), torch.zeros(4), torch.zeros(1)
    config.moe_router_quantile_balancing_ema = 0.9
    finalize._update_router_qb_beta([torch.nn.Sequential(router)], config)
    assert torch.equal(router.qb_beta, torch.ones(4))


def test_evaluation_needs_no_gradient_and_gives_the_same_loss(make, batch):
    losses = []
    for settings in (FROZEN, {}):
        model = make(**settings).model[0]
        with torch.no_grad():
            losses.append(model(**batch))
    assert torch.equal(*losses) and not losses[0].requires_grad


@pytest.mark.parametrize(
    "name, value",
    [
        ("overlap_moe_expert_parallel_comm", True),
        ("cuda_graph_impl", "local"),
        ("qk_clip", True),
        ("freeze_base_for_mtp", True),
        ("qad_train_target", "base"),
        ("freeze_all_layers", True),
        ("defer_embedding_wgrad_compute", True),
        ("cpu_offloading", True),
        ("fine_grained_activation_offloading", True),
        ("moe_paged_stash", True),
    ],
)
def test_what_cannot_work_is_refused_by_its_flag(name, value):
    from megatron_overrides.settings.checks import check, declared_settings

    settings = partial(TransformerConfig, num_layers=1, hidden_size=8, num_attention_heads=1, mtp_num_layers=1)
    config = settings(**FROZEN)
    setattr(config, name, value)
    with pytest.raises(ValueError, match=f"--freeze-base-model-for-mtp .*--{name.replace('_', '-')}"):
        check(config, declared_settings(TransformerConfig))
    config.freeze_base_model_for_mtp = False
    check(config, declared_settings(TransformerConfig))


@pytest.mark.parametrize(
    "settings", [{"use_layer_wise_distributed_optimizer": True}, {"optimizer": "dist_muon"}], ids=["setting", "name"]
)
def test_a_layer_wise_optimizer_is_refused_over_pipeline_stages(settings):
    from megatron_overrides.mtp.frozen.checks import check_frozen_main_model

    run = SimpleNamespace(**FROZEN, **settings, pipeline_model_parallel_size=1)
    check_frozen_main_model(run)
    run.pipeline_model_parallel_size = 2
    with pytest.raises(ValueError, match="dist_muon"):
        check_frozen_main_model(run)


def test_a_class_without_heads_is_refused():
    from megatron_overrides.mtp.frozen.frozen_main_model import freeze_new_model

    model = SimpleNamespace(config=SimpleNamespace(**FROZEN))
    with pytest.raises(ValueError, match="SimpleNamespace of this Megatron has none"):
        freeze_new_model(Call(lambda: None, model, (), {}))


def test_a_model_without_heads_is_refused_when_it_is_wrapped(make_gpt):
    with pytest.raises(ValueError, match="add --mtp-num-layers"):
        HeadTraining([make_gpt(VOCABULARY, LENGTH, mtp_num_layers=None, **FROZEN)])
