"""The models that ms-swift trains: with mtp_detach_heads the MTP loss leaves exactly zero outside the heads.

mcore-bridge's GPTModel, configuration and MTP layer over TransformerEngine's layers. What ms-swift puts around them
(a tokenizer, weights from a hub, its trainer) does not run.
"""

import megatron_mtp_patches
import pytest
import torch

pytest.importorskip("mcore_bridge", reason="mcore-bridge is not installed")

from mcore_bridge import ModelConfig
from mcore_bridge.model.gpt_model import GPTModel
from mcore_bridge.model.modules.mtp_layer import MultiTokenPredictionLayer
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

pytestmark = [pytest.mark.forked("patched"), pytest.mark.ranks(1, 2)]

VOCABULARY, LENGTH, BATCH = 64, 16, 2


@pytest.fixture
def make_model(parallel, world_size):
    parallel(tensor_model_parallel_size=world_size)

    def make(**settings):
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        torch.manual_seed(0)
        config = ModelConfig(
            num_layers=2,
            hidden_size=32,
            num_attention_heads=4,
            ffn_hidden_size=64,
            padded_vocab_size=VOCABULARY,
            max_position_embeddings=LENGTH,
            normalization="RMSNorm",
            mcore_model_type="gpt",
            perform_initialization=True,
            tensor_model_parallel_size=world_size,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            gradient_accumulation_fusion=False,
            apply_rope_fusion=False,
            mtp_loss_scaling_factor=1.0,
            **{"mtp_num_layers": 2, "untie_embeddings_and_output_weights": True, **settings},
        )
        layers = get_gpt_decoder_block_spec(config, use_transformer_engine=True, normalization=config.normalization)
        heads = get_gpt_mtp_block_spec(config, layers, use_transformer_engine=True)
        for spec in heads.layer_specs if heads else ():
            spec.module = MultiTokenPredictionLayer
        return GPTModel(config, layers, mtp_block_spec=heads)

    return make


@pytest.fixture(autouse=True)
def fresh_tracker():
    MTPLossLoggingHelper.tracker.clear()
    yield
    MTPLossLoggingHelper.tracker.clear()


@pytest.fixture
def batch():
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(5))
    return {
        "input_ids": tokens[:, :-1].contiguous(),
        "position_ids": torch.arange(LENGTH).expand(BATCH, -1).contiguous(),
        "attention_mask": torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool(),
        "labels": tokens[:, 1:].contiguous(),
    }


def reached(model, batch, main_loss=0.0):
    """The first names of the parameters that a gradient reaches; `main_loss` is a factor of the main model's loss."""
    (main_loss * model(**batch).mean()).backward()
    with_gradient = (name for name, param in model.named_parameters() if param.grad is not None and param.grad.any())
    return {name.partition(".")[0] for name in with_gradient}


@pytest.mark.parametrize(
    "settings", [{}, {"untie_embeddings_and_output_weights": False}, {"mtp_shared_weights": True}], ids=str
)
def test_the_mtp_loss_leaves_exactly_zero_outside_detached_heads(make_model, batch, settings):
    everything = {"embedding", "decoder", "mtp"} | ({"output_layer"} if "untie" not in str(settings) else set())
    assert reached(make_model(**settings), batch) == everything
    assert reached(make_model(mtp_detach_heads=True, **settings), batch) == {"mtp"}


def test_the_main_model_trains_as_without_heads(make_model, batch):
    gradients = []
    for settings in ({"mtp_num_layers": None}, {"mtp_detach_heads": True}):
        model = make_model(**settings)
        torch.manual_seed(3)
        with torch.no_grad():
            for name, param in sorted(model.named_parameters()):
                if not name.startswith("mtp."):
                    param.copy_(0.1 * torch.randn(param.shape))
        reached(model, batch, main_loss=1.0)
        gradients.append({name: p.grad for name, p in model.named_parameters() if not name.startswith("mtp.")})
    alone, beside_heads = gradients
    assert alone.keys() == beside_heads.keys() and len(alone) > 10
    assert all(torch.equal(alone[name], beside_heads[name]) for name in alone)


def test_detached_heads_train_as_attached_ones(make_model, batch):
    gradients = []
    for is_detached in (False, True):
        model = make_model(mtp_detach_heads=is_detached)
        reached(model, batch)
        gradients.append({name: p.grad for name, p in model.named_parameters() if name.startswith("mtp.")})
    attached, detached = gradients
    assert all(torch.equal(attached[name], detached[name]) for name in attached)


def test_the_acceptance_rate_is_that_of_the_whole_vocabulary(make_model, batch, world_size, from_all_ranks):
    model = make_model(mtp_num_layers=1)
    projected = []
    model.output_layer.register_forward_hook(lambda layer, args, output: projected.append(output[0].detach()))
    with torch.no_grad():
        model(**batch)
    predicted = torch.cat(from_all_ranks(projected[0]), dim=-1).argmax(-1)  # [s, b] of the head
    batch["labels"] = predicted.t().roll(1, dims=-1).contiguous()  # at each position the token that it predicts
    MTPLossLoggingHelper.tracker.clear()
    model(**batch)
    tracker = MTPLossLoggingHelper.tracker
    assert tracker["total_values"].item() == BATCH * (LENGTH - 1)  # the last position has no label
    assert tracker["correct_values"].item() == BATCH * (LENGTH - 1)
    assert len(predicted.unique()) > 2 and (world_size == 1 or predicted.max() >= VOCABULARY // 2)


@pytest.mark.parametrize(
    "settings",
    [
        {"mtp_loss_type": "tv"},
        {"mtp_logits_chunk_size": 8},
        {"mtp_acceptance_interval": 2},
        {"mtp_depth_weights": "1,2"},
        {"mtp_position_weights": "dpace"},
        {"mtp_acceptance_length_interval": 1},
        {"mtp_eval": False},
        {"freeze_base_model_for_mtp": True},
    ],
    ids=str,
)
def test_what_acts_in_megatron_s_loss_alone_is_refused(make_model, settings):
    (name,) = settings
    with pytest.raises(ValueError, match=rf"\(config.{name}\) .* has no effect under mcore-bridge"):
        make_model(**settings)
    assert make_model(
        mtp_num_layers=None,
        **({} if name in ("mtp_loss_type", "mtp_position_weights", "freeze_base_model_for_mtp") else settings),
    )


def test_a_limit_for_heads_without_a_separate_norm_is_refused_by_its_field(make_model):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    model = make_model()
    chunk = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    with pytest.raises(ValueError, match=r"\(config.mtp_clip_grad\) needs MTP heads with a separate norm"):
        get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=0.1, mtp_clip_grad=0.05), [chunk])


@pytest.mark.parametrize("compute", [True, False])
def test_an_mtp_pass_is_refused(make_model, batch, compute):
    model = make_model()
    with megatron_mtp_patches.mtp_pass(compute), pytest.raises(NotImplementedError, match="mtp_pass has no effect"):
        model(**batch)
    assert not MTPLossLoggingHelper.tracker
