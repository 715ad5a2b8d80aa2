#!/usr/bin/env python3
"""What a rank holds before and after a patch, counted tensor by tensor, on the installed Megatron; no GPU needed.

    python scripts/bench_memory.py [--only fsdp] [--ranks 2] [--layers 4] [--hidden 256] [--json FILE]

Without TransformerEngine its FusedAdam is the stand-in of tests/stand_ins, which keeps the same tensors.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


# -- one rank of one measurement --------------------------------------------------------------------------------------


def measure_fsdp(options: argparse.Namespace) -> dict[str, Any]:
    """Three steps of a GPT in Megatron-FSDP (optim_grads_params) with a precision-aware FusedAdam."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    from megatron_overrides.memory import held, shard_elements

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=options.layers,
        hidden_size=options.hidden,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    vocabulary, length = 512, 32
    net = GPTModel(config, get_gpt_layer_local_spec(), vocabulary, length, position_embedding_type="rope")
    fp32_gradients: dict[str, Any] = {"grad_reduce_in_fp32": True}
    if hasattr(DistributedDataParallelConfig, "megatron_fsdp_main_grads_dtype"):
        fp32_gradients = {"megatron_fsdp_main_grads_dtype": torch.float32}
    model = FullyShardedDataParallel(
        config,
        DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            use_megatron_fsdp=True,
            data_parallel_sharding_strategy="optim_grads_params",
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            **fp32_gradients,
        ),
        net.bfloat16().cuda(),
    )
    settings = OptimizerConfig(
        optimizer="adam", lr=1e-2, bf16=True, use_distributed_optimizer=True, use_precision_aware_optimizer=True
    )
    optimizer = get_megatron_optimizer(settings, [model])
    tokens = torch.randint(vocabulary, (2, length + 1), device="cuda")
    positions = torch.arange(length, device="cuda").expand(2, -1)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device="cuda").triu(1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).float().mean()
        loss.backward()
        model.finish_grad_sync()
        optimizer.step()
        losses.append(float(loss))
    elements = shard_elements(optimizer)
    theory = {"optimizer_state": 8 * elements}
    return {
        **held([model], optimizer)._asdict(),
        "elements": elements,
        "theory": theory,
        "trains": losses[-1] != losses[0],
    }


MEASUREMENTS = {"fsdp": ("fsdp-without-master-weights", measure_fsdp)}


def run_rank(options: argparse.Namespace) -> None:
    from megatron_mtp_patches import rehearsal

    if options.cpu:
        rehearsal.install(megatron_flags=False)
    import torch

    torch.distributed.init_process_group("gloo" if options.cpu else "nccl")
    with fused_adam():
        found = MEASUREMENTS[options.only][1](options)
    (options.rank_folder / f"{torch.distributed.get_rank()}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def fused_adam() -> Any:
    """TransformerEngine's, or the stand-in."""
    try:
        from transformer_engine.pytorch.optimizers import FusedAdam  # noqa: F401
    except ImportError:
        sys.path.insert(0, str(ROOT / "tests/stand_ins"))
        from fused_adam_stand_in import installed

        return installed()
    return nullcontext()


# -- all of them ------------------------------------------------------------------------------------------------------


def run_ranks(name: str, options: argparse.Namespace, patches: str) -> list[dict[str, Any]]:
    """What each rank found under this set of patches."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(options.ranks),
        ]
        command += [__file__, "--only", name, "--layers", str(options.layers), "--hidden", str(options.hidden)]
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'patches'}:{ROOT}:{os.environ.get('PYTHONPATH', '')}",
            "MEGATRON_MTP_PATCHES": patches,
            "TORCHDYNAMO_DISABLE": "1",
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            [*command, "--rank-folder", folder, *(["--cpu"] if options.cpu else [])],
            env=environment,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            sys.exit(f"{name} with MEGATRON_MTP_PATCHES={patches} failed:\n{(done.stdout + done.stderr)[-4000:]}")
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(options.ranks)]


def show(name: str, release: str, runs: dict[str, list[dict[str, Any]]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{name}, megatron-core {release}: bytes")
    for column in ("rank", "what", *runs, "theory"):
        table.add_column(column, justify="left" if column in ("rank", "what") else "right")
    after = runs["after"]
    for rank, found in enumerate(after):
        for what in ("parameters", "gradients", "main_weights", "optimizer_state"):
            values = [f"{run[rank][what]:,}" for run in runs.values()]
            theory = found["theory"].get(what)
            table.add_row(str(rank), what.replace("_", " "), *values, "" if theory is None else f"{theory:,}")
        table.add_row(str(rank), "trains", *("yes" if run[rank]["trains"] else "no" for run in runs.values()), "yes")
        saved = runs["before"][rank]["optimizer_state"] - found["optimizer_state"]
        theory = f"4 x {found['elements']:,} = {4 * found['elements']:,}" if saved else "native"
        table.add_row(str(rank), "saved", "", f"{saved:,}", theory, end_section=True)
    Console(width=110).print(table)
    if all(
        before["optimizer_state"] == found["optimizer_state"]
        for before, found in zip(runs["before"], after, strict=True)
    ):
        print(
            "This Megatron drops the master weights by itself: there is no measurement of what it would hold with them."
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MEASUREMENTS, help="one measurement instead of all")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--json", type=Path, help="write what was found there, too")
    parser.add_argument("--cpu", action="store_true", help="rehearse on the CPU, also where there is a GPU")
    parser.add_argument("--rank-folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_folder:
        run_rank(options)
        return
    import torch

    options.cpu = options.cpu or torch.cuda.device_count() < options.ranks
    record = {}
    for name in [options.only] if options.only else MEASUREMENTS:
        patch = MEASUREMENTS[name][0]
        runs = {"before": run_ranks(name, options, f"-{patch}"), "after": run_ranks(name, options, "all")}
        show(patch, version("megatron-core"), runs)
        record[patch] = runs
    if options.json:
        options.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
