"""A mixture of experts with heads trains alike however it is cut: all repairs of its losses and norms at once.

It trains over context- or tensor-parallel ranks, replicas and expert-parallel ranks, under DDP and under Megatron-FSDP,
with uneven loss masks, padding, an auxiliary loss and a z-loss. The reference is a training in which each rank has the
whole model and all samples. `--write-tables` trains for ten steps, and as Megatron does without the patches, too.
"""

import functools
import zlib
from typing import NamedTuple

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt import gpt_layer_specs as specs
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.transformer.spec_utils import ModuleSpec

from scripts.tiny_gpt import causal_inputs, make_config, run_microbatches

pytestmark = [
    pytest.mark.forked("patched"),
    pytest.mark.guards("count-moe-tokens-once", "weight-moe-losses-by-token"),
    pytest.mark.ranks(4),
]

pytest.importorskip("transformer_engine", reason="norms under sequence parallelism are TransformerEngine's")
pytest.importorskip("einops", reason="Megatron-FSDP needs einops")

STEPS, STEPS_OF_TABLE = 2, 10
BATCH, MICROBATCHES, LENGTH, VOCABULARY, EXPERTS = 2, 2, 16, 32, 4


class Cut(NamedTuple):
    """How a training is shared out over four ranks; `microbatches` are those of one rank, `samples` those of one."""

    sizes: dict[str, int]
    microbatches: int = 1
    samples: int = BATCH
    is_fsdp: bool = False


CUTS = {
    "CP2 EP2": Cut({"context_parallel_size": 2, "expert_model_parallel_size": 2}),
    "TP2 EP2": Cut(
        {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    ),
    "CP2, Megatron-FSDP": Cut({"context_parallel_size": 2}, is_fsdp=True),
}
# Megatron's z-loss of a padded sequence that ranks share is right with per-token loss alone (z-loss-of-each-rank).
MODES = {
    "mean": {"moe_router_load_balancing_type": "aux_loss"},
    "per token": {
        "moe_router_load_balancing_type": "seq_aux_loss",
        "calculate_per_token_loss": True,
        "moe_z_loss_coeff": 0.1,
    },
}
# Per token, the number of samples in a microbatch must not matter, either: the whole training has one in each.
WHOLE = {"mean": Cut({}, MICROBATCHES), "per token": Cut({}, MICROBATCHES * BATCH, samples=1)}


def build(cut, has_attention, **settings):
    """The model of a cut with weights that depend on their names alone, wrapped; and its optimizer."""
    model_parallel_cuda_manual_seed(1)
    sizes = {**cut.sizes, "sequence_parallel": "tensor_model_parallel_size" in cut.sizes}
    config = make_config(
        hidden_size=16,
        num_moe_experts=EXPERTS,
        mtp_num_layers=2,
        mtp_loss_scaling_factor=0.5,
        moe_router_topk=2,
        moe_aux_loss_coeff=0.5,
        moe_token_dispatcher_type="alltoall",
        add_bias_linear=False,
        gradient_accumulation_fusion=False,
        **sizes,
        **settings,
    )
    spec = specs.get_gpt_layer_with_transformer_engine_spec(EXPERTS, moe_grouped_gemm=False)
    if not has_attention:  # TransformerEngine's over context-parallel ranks computes in half precision only
        spec.submodules.self_attention = ModuleSpec(IdentityOp, {"attn_mask_type": AttnMaskType.causal})
        spec.submodules.self_attn_bda = IdentityFuncOp
    heads = specs.get_gpt_mtp_block_spec(config, spec, True)
    gpt = GPTModel(config, spec, VOCABULARY, LENGTH, position_embedding_type="rope", mtp_block_spec=heads)
    for name, param in gpt.named_parameters():
        fill(name, param)
    wrap = DistributedDataParallel
    fsdp = {}
    if cut.is_fsdp:
        from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel as wrap

        fsdp = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}
        fsdp |= {"overlap_grad_reduce": True, "overlap_param_gather": True}
    config.finalize_model_grads_func = finalize_model_grads
    model = wrap(config, DistributedDataParallelConfig(use_distributed_optimizer=True, **fsdp), gpt)
    adam = OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=1.0, use_distributed_optimizer=True)
    return model, get_megatron_optimizer(adam, [model])


def fill(name, param):
    """Give a parameter this rank's part of a tensor that its name determines."""
    shape, part = list(param.shape), slice(None)
    along = getattr(param, "partition_dim", -1) if getattr(param, "tensor_model_parallel", False) else -1
    if ".local_experts." in name:
        before, _, after = name.partition(".local_experts.")
        number, _, rest = after.partition(".")
        local = EXPERTS // parallel_state.get_expert_model_parallel_world_size()
        name = f"{before} {int(number) + local * parallel_state.get_expert_model_parallel_rank()} {rest}"
    elif along >= 0:
        size = shape[along]
        shape[along] *= parallel_state.get_tensor_model_parallel_world_size()
        first = size * parallel_state.get_tensor_model_parallel_rank()
        part = (slice(None),) * along + (slice(first, first + size),)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(shape, generator=generator) * 0.2 + (
        1.0 if "norm" in name and name.endswith("weight") else 0.0
    )
    with torch.no_grad():
        param.copy_(values[part])


def make_microbatches(step, cut):
    """Of each microbatch of this rank what the model takes by position, and labels, loss mask and padding mask."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (MICROBATCHES, BATCH, LENGTH + 1), generator=generator)
    place, sample = torch.arange(LENGTH).expand(BATCH, LENGTH), torch.arange(BATCH)[:, None]
    numbers = [parallel_state.get_data_parallel_rank()] if cut.sizes else range(MICROBATCHES)
    for number in numbers:
        ids, positions, mask, labels = causal_inputs(tokens[number])
        is_padding = place >= LENGTH - 2 - 3 * number
        counts = (place >= 2 + 3 * number + sample) & ~is_padding  # not in the prompt
        by_position = map(take_context_part, (ids, positions, labels, counts.float(), is_padding))
        for parts in zip(*(one.split(cut.samples) for one in by_position), strict=True):
            ids, positions, labels, counts, is_padding = parts
            yield (ids, positions, mask), {"labels": labels, "loss_mask": counts, "padding_mask": is_padding}


def take_context_part(sequence):
    """This rank's chunk from the front and its chunk from the back, [1, length / ranks]."""
    ranks, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    chunks = sequence.chunk(2 * ranks, 1)
    return torch.cat((chunks[rank], chunks[2 * ranks - rank - 1]), 1)


def train(cut, steps, **settings):
    """[(loss, norm)] of the steps: the mean over all tokens, and the norm before clipping."""
    model, optimizer = build(cut, **settings)
    numbers = []
    for step in range(steps):
        batches = make_microbatches(step, cut)
        report = torch.zeros(2)

        def forward_step(_, model, batches=batches, report=report):
            inputs, more = next(batches)

            def loss_func(losses):
                total, tokens = (losses * more["loss_mask"]).sum(), more["loss_mask"].sum()
                report.add_(torch.stack((total.detach(), tokens)))
                return total, tokens.int(), {}

            return model(*inputs, **more), loss_func

        model.zero_grad_buffer()
        optimizer.zero_grad()
        run_microbatches(model, forward_step, cut.microbatches, LENGTH, cut.samples)
        _, norm, _ = optimizer.step()
        torch.distributed.all_reduce(report)
        numbers.append((float(report[0] / report[1]), float(norm)))
    return numbers


@pytest.fixture(scope="module")
def train_whole(parallel):
    """train_whole(steps, mode, has_attention): the numbers of the training that is not cut."""

    @functools.cache
    def train_once(steps, mode, has_attention):
        parallel()
        return train(WHOLE[mode], steps, has_attention=has_attention, **MODES[mode])

    return train_once


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CUTS)
def test_a_training_does_not_depend_on_how_it_is_cut(
    parallel, train_whole, name, mode, unpatched, pytestconfig, record_property
):
    cut, writes = CUTS[name], pytestconfig.option.write_tables
    steps, has_attention = STEPS_OF_TABLE if writes else STEPS, "context_parallel_size" not in cut.sizes
    whole = train_whole(steps, mode, has_attention)
    parallel(**cut.sizes)
    patched = train(cut, steps, has_attention=has_attention, **MODES[mode])
    if writes:
        with unpatched():
            MTPLossLoggingHelper.tracker.clear()  # Megatron's own counts in other dtypes
            plain = train(cut, steps, has_attention=has_attention, **MODES[mode])
        record_property("repairs", [f"{name}, {mode}", {"whole": whole, "patched": patched, "unpatched": plain}])
    assert patched == [pytest.approx(numbers, rel=1e-4) for numbers in whole]
