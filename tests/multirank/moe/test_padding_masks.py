"""Each microbatch is routed with the padding mask of the tokens that a rank has, also under the overlap of experts."""

import inspect

import pytest
import torch
from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan
from megatron.core.pipeline_parallel.utils import set_streams
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron_mtp_patches.defects.labs.lab import make_config

from tests.trainings.hybrid_model import find_hybrid_model

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("pass-padding-mask-to-routers"), pytest.mark.ranks(2)]

pytest.importorskip("transformer_engine", reason="Megatron's own layers have no nodes for this overlap")
VOCABULARY, LENGTH, EXPERTS = 32, 16, 4
PADDING = (3, 11)  # positions at the end of the first and of the second microbatch


@pytest.fixture
def make_model(make_gpt, parallel):
    """A GPT of experts that two ranks share, without MTP heads unless `settings` say otherwise."""

    def make(tensor_model_parallel_size=1, **settings):
        settings.setdefault("mtp_num_layers", None)
        sizes = {"expert_model_parallel_size": 2, "tensor_model_parallel_size": tensor_model_parallel_size}
        parallel(**sizes, expert_tensor_parallel_size=1)
        set_streams()
        model_parallel_cuda_manual_seed(1)
        MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1))
        half = {"bf16": True, "params_dtype": torch.bfloat16}
        experts = {"num_moe_experts": EXPERTS, "expert_tensor_parallel_size": 1, "add_bias_linear": False, **sizes}
        routing = {"moe_token_dispatcher_type": "alltoall", "init_method_std": 0.2, "num_layers": 2}
        model = make_gpt(VOCABULARY, LENGTH, transformer_engine=True, **half, **experts, **routing, **settings)
        return model.bfloat16()

    return make


def make_batches(rank):
    generator = torch.Generator().manual_seed(rank)
    for padding in PADDING:
        tokens = torch.randint(VOCABULARY, (1, LENGTH + 1), generator=generator)
        yield {
            "input_ids": tokens[:, :-1].contiguous(),
            "position_ids": torch.arange(LENGTH).unsqueeze(0),
            "attention_mask": None,
            "labels": tokens[:, 1:].contiguous(),
            "padding_mask": torch.arange(LENGTH).unsqueeze(0) >= LENGTH - padding,
        }


def take_router_gradients(model):
    routers = {name: param for name, param in model.named_parameters() if name.endswith("router.weight")}
    gradients = {name: param.grad.float().clone() for name, param in routers.items()}
    model.zero_grad()
    assert gradients and all(gradient.any() for gradient in gradients.values())
    return gradients


@pytest.mark.parametrize(
    "losses",
    [
        {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1.0},
        {"moe_router_load_balancing_type": "none", "moe_z_loss_coeff": 1.0},
    ],
    ids=["aux_loss", "z-loss"],
)
def test_overlapping_microbatches_have_the_gradients_of_separate_ones(make_model, rank, losses):
    """The forward pass of the second one runs between the parts of the backward pass of the first one.

    On 0.16 and 0.17 the head has no mask in either.
    """
    model = make_model(mtp_num_layers=1, **losses)
    for batch in make_batches(rank):
        (0 * model(**batch)).sum().backward()
    separate = take_router_gradients(model)
    first, second = (model.build_schedule_plan(**batch) for batch in make_batches(rank))
    run = TransformerModelChunkSchedulePlan.run
    nothing = torch.zeros_like(run(first, None))
    run(second, first, b_grad=nothing)
    run(None, second, b_grad=nothing)
    overlapping = take_router_gradients(model)
    for name, gradient in overlapping.items():
        assert torch.allclose(gradient, separate[name], rtol=0.03, atol=0.01 * float(separate[name].abs().max())), name


@pytest.fixture
def masks_of_routers(monkeypatch):
    """What routers were given, in the order of their calls."""
    masks = []
    forward = TopKRouter.forward

    def record(self, input, padding_mask=None):
        masks.append(padding_mask)
        return forward(self, input, padding_mask)

    monkeypatch.setattr(TopKRouter, "forward", record)
    return masks


def make_biased_model(make_model, **settings):
    routing = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid", "moe_router_topk": 2}
    return make_model(moe_router_load_balancing_type="none", **routing, **settings)


def take_expert_loads(model):
    """How many tokens have chosen each expert, in all layers, without padding."""
    routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
    loads = [router.local_tokens_per_expert.clone() for router in routers]
    for router in routers:
        router.local_tokens_per_expert.zero_()
    return torch.stack(loads)


def test_the_load_of_experts_counts_no_padding(make_model, rank):
    """NVIDIA/Megatron-LM#6114: without the patch the first step ends in an error about the sizes of tensors."""
    model = make_biased_model(make_model)
    for batch, padding in zip(make_batches(rank), PADDING, strict=True):
        model(**batch)
        loads = take_expert_loads(model)
        assert loads.sum(-1).tolist() == [2 * (LENGTH - padding)] * 2
        TransformerModelChunkSchedulePlan.run(model.build_schedule_plan(**batch), None)
        assert torch.equal(take_expert_loads(model), loads)


def test_a_padded_token_is_left_out_of_the_expert_that_it_chose(make_model, rank):
    model = make_biased_model(make_model)
    router = model.decoder.layers[0].mlp.router
    routing_map = torch.eye(EXPERTS, dtype=torch.bool)  # as many tokens as experts: released Megatron drops an expert
    is_padding = torch.tensor([True, False, False, True])
    router._apply_expert_bias(routing_map[[0, 1, 1, 2]], padding_mask=is_padding)
    assert take_expert_loads(model)[0].tolist() == [0, 2, 0, 0]


def test_a_mask_that_another_library_has_given_the_form_of_the_map_is_taken_as_it_is(make_model, rank):
    """mcore-bridge hands it on as [tokens, 1]."""
    model = make_biased_model(make_model)
    routing_map = torch.ones(LENGTH, EXPERTS, dtype=torch.bool)
    is_padding = torch.arange(LENGTH).unsqueeze(-1) >= LENGTH - 3
    model.decoder.layers[0].mlp.router._apply_expert_bias(routing_map, padding_mask=is_padding)
    assert take_expert_loads(model)[0].tolist() == [LENGTH - 3] * EXPERTS


def test_a_router_that_reads_no_mask_takes_any(make_model, rank):
    """As Megatron does: neither in validation nor without an expert bias does it look at the mask."""
    without_bias = make_model(moe_router_load_balancing_type="none")
    routing_map, of_other_tokens = torch.ones(LENGTH, EXPERTS, dtype=torch.bool), torch.ones(3)
    without_bias.decoder.layers[0].mlp.router._apply_expert_bias(routing_map, of_other_tokens)
    with_bias = make_biased_model(make_model)
    with torch.no_grad():
        with_bias.decoder.layers[0].mlp.router._apply_expert_bias(routing_map, padding_mask=of_other_tokens)
    assert not take_expert_loads(with_bias).any()


@pytest.mark.skipif(not hasattr(TopKRouter, "quantile_balancing"), reason="quantile balancing came with 0.19")
def test_quantile_balancing_which_takes_no_mask_gets_none(make_model, rank, masks_of_routers):
    model = make_model(moe_router_load_balancing_type="quantile_balancing")
    batch, _ = make_batches(rank)
    TransformerModelChunkSchedulePlan.run(model.build_schedule_plan(**batch), None)
    assert masks_of_routers == [None, None]


def run_overlapping(model, batch):
    TransformerModelChunkSchedulePlan.run(model.build_schedule_plan(**batch), None)


def run_alone(model, batch):
    model(**batch)


@pytest.mark.parametrize("run", [run_overlapping, run_alone])
def test_a_later_stage_gives_its_routers_the_mask_of_the_tokens_of_their_rank(make_model, rank, masks_of_routers, run):
    """NVIDIA/Megatron-LM#5563: with sequence parallelism only the first pipeline stage splits the mask."""
    losses = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1.0}
    model = make_model(tensor_model_parallel_size=2, sequence_parallel=True, **losses)
    model.pre_process = model.decoder.pre_process = False
    hidden_size = model.config.hidden_size
    model.set_input_tensor(torch.randn(LENGTH // 2, 1, hidden_size, dtype=torch.bfloat16, requires_grad=True))
    batch, _ = make_batches(0)  # both ranks have parts of the same sequence
    run(model, batch)
    part = batch["padding_mask"].transpose(0, 1).chunk(2)[rank]
    assert len(masks_of_routers) == 2 and all(torch.equal(mask, part) for mask in masks_of_routers)


def test_a_hybrid_model_gives_its_routers_the_mask_of_the_tokens_of_their_rank(parallel, rank, masks_of_routers):
    """It hands the whole mask on, with sequence parallelism, too."""
    parallel(tensor_model_parallel_size=2)
    model_parallel_cuda_manual_seed(1)
    hybrid_model, spec = find_hybrid_model()
    experts = {"num_moe_experts": EXPERTS, "moe_ffn_hidden_size": 16, "moe_z_loss_coeff": 1.0, "add_bias_linear": False}
    config = make_config(tensor_model_parallel_size=2, sequence_parallel=True, normalization="RMSNorm", **experts)
    names = inspect.signature(hybrid_model.__init__).parameters
    pattern = next(name for name in ("hybrid_layer_pattern", "hybrid_override_pattern") if name in names)
    model = hybrid_model(config, spec, VOCABULARY, LENGTH, position_embedding_type="rope", **{pattern: "*E"})
    batch, _ = make_batches(0)
    model(**batch)
    part = batch["padding_mask"].transpose(0, 1).chunk(2)[rank]
    assert len(masks_of_routers) == 1 and torch.equal(masks_of_routers[0], part)


def test_a_mask_of_another_form_is_left_to_megatron(make_model, rank, masks_of_routers):
    """A flat mask of a whole microbatch has as many rows as a mask that is not split where there are TP samples."""
    model = make_model(tensor_model_parallel_size=2, sequence_parallel=True, moe_router_load_balancing_type="none")
    hidden_states = torch.randn(LENGTH // 2, 2, model.config.hidden_size, dtype=torch.bfloat16)
    model.decoder.layers[0].mlp.route(hidden_states, torch.zeros(LENGTH, dtype=torch.bool))
    assert masks_of_routers[0].shape == (LENGTH,)
