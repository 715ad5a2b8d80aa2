#!/usr/bin/env python3
"""The same seeded training of MTP heads on any release, number by number, and a comparison of two such records.

    python -m megatron_mtp_patches run --device cpu scripts/parity.py record OUT.json [--layout NAME]
    python scripts/parity.py compare EXPECTED.json OUT.json...

`record` writes, for each of 50 steps, the losses, both gradient norms, both clip factors and the acceptance counts, and
at the end a hash of every parameter. With MEGATRON_MTP_PATCHES=none 0.19.2 gives upstream's own numbers. `compare`
ends with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "demo"))

from train import one_process

STEPS, VOCABULARY, LENGTH, BATCH, CLIP = 50, 64, 32, 4, 0.25
LAYOUTS: dict[str, dict[str, Any]] = {
    "detached": {"mtp_detach_heads": True},
    "attached": {},
    "per_token": {"mtp_detach_heads": True, "calculate_per_token_loss": True},
    "recompute": {
        "mtp_detach_heads": True,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


def record(file: Path, layout: str, bf16: bool) -> None:
    import torch
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    one_process()
    torch.distributed.init_process_group("nccl" if torch.distributed.is_nccl_available() else "gloo")
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    dtype = torch.bfloat16 if bf16 else torch.float32
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        mtp_num_layers=2,
        mtp_loss_scaling_factor=0.5,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=bf16,
        params_dtype=dtype,
        finalize_model_grads_func=finalize_model_grads,
        **LAYOUTS[layout],
    )
    spec = get_gpt_layer_local_spec()
    heads = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    gpt = GPTModel(
        config,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        mtp_block_spec=heads,
    )
    gpt = gpt.cuda().to(dtype)
    fill(gpt)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=bf16), gpt)
    settings = OptimizerConfig(
        optimizer="adam", lr=3e-3, clip_grad=CLIP, bf16=bf16, params_dtype=dtype, use_distributed_optimizer=bf16
    )
    config.grad_scale_func = None
    optimizer = get_megatron_optimizer(settings, [model])
    generator = torch.Generator().manual_seed(7)
    steps = []
    for _ in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = []

        def forward_step(data: Any, model: Any, losses: list = losses) -> Any:
            tokens = torch.randint(0, 8, (BATCH, LENGTH + 1), generator=generator).cumsum(1) % VOCABULARY
            mask = torch.ones(1, 1, LENGTH, LENGTH).tril().logical_not().cuda()
            positions = torch.arange(LENGTH).expand(BATCH, -1).cuda()
            weights = (torch.rand(BATCH, LENGTH, generator=generator) > 0.1).float().cuda()
            output = model(
                tokens[:, :-1].contiguous().cuda(),
                positions,
                mask,
                labels=tokens[:, 1:].contiguous().cuda(),
                loss_mask=weights,
            )

            def loss_function(output: torch.Tensor) -> tuple:
                loss = (output.float() * weights).sum()
                losses.append(float(loss.detach() / weights.sum()))
                return loss, weights.sum().to(torch.int), {}

            return output, loss_function

        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([]),
            model=[model],
            num_microbatches=2,
            seq_length=LENGTH,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        tracker = MTPLossLoggingHelper.tracker
        counts = [tracker[key].tolist() for key in ("correct_values", "total_values")]
        mtp_losses = (tracker["loss_values"] / 2).tolist()
        MTPLossLoggingHelper.track_mtp_metrics(0.5, 1, None)
        _, norm, _ = optimizer.step()
        groups = {group: float(value) for group, value in optimizer.grad_norms_by_group.items()}
        clips = [min(1.0, CLIP / (value + 1e-6)) for value in (float(norm), *groups.values())]
        steps.append(
            {"losses": losses, "mtp losses": mtp_losses, "norm": float(norm), **groups, "clip": clips, "counts": counts}
        )
    bytes_of = [param.detach().float().cpu().numpy().tobytes() for param in gpt.parameters()]
    hashes = [hashlib.sha256(some).hexdigest() for some in bytes_of]
    file.write_text(json.dumps({"steps": steps, "parameters": hashes}), encoding="utf-8")
    torch.distributed.destroy_process_group()


def fill(model: Any) -> None:
    """The same numbers on every release, which differ in how they initialise and in one name."""
    import torch

    generator = torch.Generator().manual_seed(3)
    for name, param in model.named_parameters():
        if param.dim() > 1:
            param.data.copy_(0.05 * torch.randn(param.shape, generator=generator))
        else:
            param.data.fill_(float(name.endswith("weight")))


def flatten(value: Any, name: str = "") -> dict[str, float | str]:
    if isinstance(value, dict):
        return {key: number for part in value for key, number in flatten(value[part], f"{name}/{part}").items()}
    if isinstance(value, list):
        return {key: number for i, part in enumerate(value) for key, number in flatten(part, f"{name}/{i}").items()}
    return {name: value}


def compare(expected: Path, others: list[Path]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("what", *(other.stem for other in others), title=f"largest relative difference from {expected.stem}")
    records = [flatten(json.loads(file.read_text(encoding="utf-8"))) for file in (expected, *others)]
    if any(record.keys() != records[0].keys() for record in records):
        raise SystemExit("the records hold different quantities: same layout, same flags?")
    all_equal = True
    kinds = dict.fromkeys(key.split("/")[3] if key.startswith("/steps") else "parameters" for key in records[0])
    for kind in kinds:
        keys = [key for key in records[0] if f"/{kind}" in key]
        cells = []
        for record in records[1:]:
            pairs = [(record[key], records[0][key]) for key in keys]
            cells.append("equal" if all(a == b for a, b in pairs) else difference(pairs))
        all_equal = all_equal and set(cells) == {"equal"}
        table.add_row(kind, *cells)
    Console().print(table)
    sys.exit(not all_equal)


def difference(pairs: list[tuple[Any, Any]]) -> str:
    """The largest relative one; NaN is no number, and a hash has no size."""
    if any(isinstance(a, str) or math.isnan(a - b) for a, b in pairs):
        return "differ"
    return f"{max(abs(a - b) / max(abs(b), 1e-12) for a, b in pairs):.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("file", type=Path)
    recording.add_argument("--layout", choices=LAYOUTS, default="detached")
    recording.add_argument("--bf16", action="store_true", help="and the distributed optimizer")
    comparing = commands.add_parser("compare")
    comparing.add_argument("expected", type=Path)
    comparing.add_argument("others", type=Path, nargs="+")
    arguments = parser.parse_args()
    if arguments.command == "record":
        record(arguments.file, arguments.layout, arguments.bf16)
    else:
        compare(arguments.expected, arguments.others)


if __name__ == "__main__":
    main()
