"""The models of splits.py: a GPT with an MTP head, and one with GatedDeltaNet in place of attention, under Muon."""

from __future__ import annotations

import importlib
from statistics import mean
from typing import Any

import torch

from scripts.acceptance.training import VOCABULARY, texts
from scripts.common.markdown import Table

LENGTH, BATCH, HELD_OUT_BATCHES = 64, 16, 16
GLU, HEADS, GDN = "muon_split_glu", "muon_split_qkv_per_head", "muon_split_gdn"
# Model, and the splits with which it is trained.
RUNS = (("GPT", ((), (GLU,), (HEADS,), (GLU, HEADS))), ("GatedDeltaNet", ((), (GDN,))))
SIZES = {"num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 256, "num_attention_heads": 4, "num_query_groups": 2}
GDN_SIZES = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": [1, 1],  # both layers
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "deterministic_mode": True,
}


def losses(steps: int, seeds: int, lr: float) -> Table:
    """The loss of the main model on held-out text, in nats a byte, and how far it is from the same run unsplit."""
    text, held_out = texts()
    rows = []
    for kind, variants in RUNS:
        unsplit: list[float] = []
        for splits in variants:
            ends = [train(kind, splits, text, held_out, steps, seed, lr) for seed in range(1, seeds + 1)]
            unsplit = unsplit or ends
            differences = [end - other for end, other in zip(ends, unsplit, strict=True)]
            names = " ".join(f"--{name.replace('_', '-')}" for name in splits) or "unsplit"
            cells = [f"{mean(ends):.4f}", " ".join(f"{one:+.4f}" for one in differences) if splits else ""]
            rows.append([kind, names, *cells])
            print(*rows[-1], flush=True)
    columns = ["model", "flags", f"loss after {steps} steps, mean of {seeds} seeds", "minus unsplit, seed by seed"]
    return Table("small models under Muon", columns, rows, right=(2, 3))


def train(
    kind: str, splits: tuple[str, ...], text: torch.Tensor, held_out: torch.Tensor, steps: int, seed: int, lr: float
) -> float:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.muon import get_megatron_muon_optimizer

    net = make_model(kind, seed)
    model = DistributedDataParallel(net.config, DistributedDataParallelConfig(), net)
    settings: dict[str, Any] = {"lr": lr, "clip_grad": 0.0, "weight_decay": 0.0, "muon_extra_scale_factor": 0.2}
    settings["muon_fp32_matmul_prec"] = "highest"
    config = OptimizerConfig(optimizer="muon", **settings, **dict.fromkeys(splits, True))
    optimizer = get_megatron_muon_optimizer(config, [model])
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = config.lr * min(1.0, (step + 1) / 20, (steps - step) / (steps / 2))
        model.zero_grad_buffer()
        loss_of(model, batch(text, generator)).backward()
        model.finish_grad_sync()
        optimizer.step()
    generator = torch.Generator().manual_seed(0)
    model.eval()
    with torch.no_grad():
        return mean(float(loss_of(model, batch(held_out, generator))) for _ in range(HELD_OUT_BATCHES))


def batch(text: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    begins = torch.randint(0, len(text) - LENGTH - 1, (BATCH,), generator=generator)
    return torch.stack([text[begin : begin + LENGTH + 1] for begin in begins.tolist()])


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The mean loss of the main model; that of the MTP head is attached to it."""
    from scripts.tiny_gpt import causal_inputs

    *inputs, labels = causal_inputs(tokens)
    return model(*inputs, labels=labels).mean()


def make_model(kind: str, seed: int) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from scripts.tiny_gpt import build_gpt, make_config

    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    settings = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "add_bias_linear": False}
    settings |= {"normalization": "RMSNorm", "bias_activation_fusion": False, **SIZES}
    if kind == "GPT":
        return build_gpt(make_config(mtp_num_layers=1, **settings), VOCABULARY, LENGTH, tied=False)
    from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
        get_transformer_block_with_experimental_attention_variant_spec,
    )
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet

    for ancestor in GatedDeltaNet.__mro__:
        names = vars(importlib.import_module(ancestor.__module__))
        if "HAVE_FLA" in names:  # in deterministic_mode l2norm is all that a run takes of it
            names |= {"HAVE_FLA": True, "l2norm": lambda tensor: torch.nn.functional.normalize(tensor, dim=-1)}
    config = make_config(**settings, **GDN_SIZES)
    spec = get_transformer_block_with_experimental_attention_variant_spec(config)
    return GPTModel(config, spec, VOCABULARY, LENGTH, position_embedding_type="rope")
