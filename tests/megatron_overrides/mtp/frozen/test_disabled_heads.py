"""Heads that stay in the model and do not train: what they keep, what they cost, and what is refused."""

import copy
import importlib

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron_mtp_patches import mtp_pass

from tests.trainings.heads import LENGTH, VOCABULARY, HeadTraining, kept_bytes, train_disabled

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("disable-mtp-loss")]

DISABLED = {"disable_mtp_loss": True}
WITHOUT_HEADS = {"mtp_num_layers": None}
ROUTED = {"num_moe_experts": 4, "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
ROUTED |= {"moe_aux_loss_coeff": 0.01, "add_bias_linear": False}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
STEPS = 5


@pytest.fixture
def train(make_gpt):
    """train(**config): a HeadTraining after some steps in which the heads did not change."""

    def run(like=None, **config):
        model = make_gpt(VOCABULARY, LENGTH, **config)
        if like is not None:
            model.load_state_dict(like, strict=False)
        training = HeadTraining([model], clip_grad=0.1)
        train_disabled(training, STEPS)
        return training

    return run


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model", [{}, ROUTED, RECOMPUTED], ids=["dense", "experts", "recomputed"])
def test_the_main_model_trains_as_one_without_heads(make_gpt, train, model, tied):
    start = copy.deepcopy(make_gpt(VOCABULARY, LENGTH, tied=tied, **model).state_dict())
    alone = train(start, tied=tied, **model, **WITHOUT_HEADS)
    disabled = train(start, tied=tied, **model, **DISABLED)
    assert disabled.norms == alone.norms and min(alone.norms) > 0.1
    right = alone.main_model()
    assert all(torch.equal(tensor, right[name]) for name, tensor in disabled.main_model().items())


def test_a_hybrid_model_trains_without_its_heads(train_hybrid):
    detached, disabled = train_hybrid(mtp_detach_heads=True), train_hybrid(**DISABLED)
    trained = train_disabled(disabled, STEPS)
    for number in range(STEPS):
        detached.step(number)
    assert detached.losses
    assert all(torch.equal(tensor, trained[name]) for name, tensor in detached.main_model().items())


def test_gradients_state_and_activations_are_those_of_a_model_without_heads(train):
    disabled, alone = train(**DISABLED), train(**WITHOUT_HEADS)
    assert _bytes(disabled) == _bytes(alone)
    heads = list(disabled.bare[0].mtp.parameters())
    assert heads and not any(param.requires_grad or hasattr(param, "main_grad") for param in heads)


def _bytes(training):
    """(gradients, optimizer state, what a forward pass keeps for its backward pass)"""
    (leaf,) = training.optimizer.chained_optimizers
    return (
        sum(buffer.grad_data.nbytes for chunk in training.model for buffer in chunk.buffers),
        sum(value.nbytes for state in leaf.optimizer.state.values() for value in state.values()),
        kept_bytes(training),
    )


def test_heads_run_in_an_mtp_pass_without_gradients_alone(make_model, batch):
    model = make_model(**DISABLED)
    ran = []
    model.mtp.layers[0].register_forward_hook(lambda *_: ran.append(1))
    with mtp_pass(compute=True) as measured:
        loss = model(**batch)
    assert not ran and not measured.reduce()
    with torch.no_grad():
        assert torch.equal(model(**batch), loss) and not ran
        with mtp_pass(compute=True) as measured:
            model(**batch)
    assert ran and "mtp_1 loss" in measured.reduce()


def test_adapters_of_heads_do_not_train(make_gpt):
    """They are added to a model that is there already."""
    model = make_gpt(VOCABULARY, LENGTH, **DISABLED)
    assert not any(param.requires_grad for param in model.mtp.parameters())
    model.mtp.layers[0].adapter = torch.nn.Linear(2, 2)
    assert not any(hasattr(param, "main_grad") for param in HeadTraining([model]).bare[0].mtp.parameters())


def test_adapters_of_heads_are_sharded_without_training(make_gpt, shard):
    model = make_gpt(VOCABULARY, LENGTH, **DISABLED)
    model.mtp.layers[0].adapter = torch.nn.Linear(2, 2)
    shard(model.config, model)
    assert not any(param.requires_grad for param in model.mtp.parameters())
    assert all(param.requires_grad for param in model.decoder.parameters())


def test_the_balance_of_quantiles_in_the_heads_stays(make_gpt):
    finalize = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    if not hasattr(finalize, "_update_router_qb_beta"):
        pytest.skip("routers balance by quantiles from 0.19 on")
    model = make_gpt(VOCABULARY, LENGTH, **ROUTED, **DISABLED)
    model.config.moe_router_quantile_balancing_ema = 0.9
    main, head = (next(m for m in block.modules() if hasattr(m, "expert_bias")) for block in (model.decoder, model.mtp))
    for router in (main, head):
        router.qb_beta, router.qb_beta_accum, router.qb_beta_count = torch.arange(4.0), torch.zeros(4), torch.zeros(1)
    finalize._update_router_qb_beta([model], model.config)
    assert torch.equal(head.qb_beta, torch.arange(4.0)) and not torch.equal(main.qb_beta, torch.arange(4.0))


def test_heads_that_another_library_runs_are_refused(make_model, batch, monkeypatch):
    """As verl does, whose _postprocess calls the block and projects the hidden states of all heads."""
    model = make_model(**DISABLED)
    monkeypatch.setattr(
        type(model),
        "_postprocess",
        lambda self, **given: self.mtp(
            embedding=self.embedding,
            **{
                name: given[name]
                for name in ("input_ids", "position_ids", "hidden_states", "attention_mask", "rotary_pos_emb")
            },
        ),
    )
    with pytest.raises(NotImplementedError, match="mtp.enable_train=false of verl"):
        model(**batch)


@pytest.mark.parametrize(
    "name, value",
    [
        ("freeze_base_model_for_mtp", True),
        ("freeze_base_for_mtp", True),
        ("qad_train_target", "mtp"),
        ("overlap_moe_expert_parallel_comm", True),
        ("cuda_graph_impl", "local"),
        ("moe_paged_stash", True),
    ],
)
def test_what_cannot_work_is_refused_by_its_flag(name, value):
    from megatron_overrides.settings.checks import check, declared_settings

    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, mtp_num_layers=1, **DISABLED)
    setattr(config, name, value)
    with pytest.raises(
        ValueError, match="--disable-mtp-loss .*leave one of the two out|--freeze-base-model-for-mtp .*--disable"
    ):
        check(config, declared_settings(TransformerConfig))
