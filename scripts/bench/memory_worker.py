"""The ranks of memory.py: train what a patch is about; rank 0 writes the bytes that each rank holds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from scripts.bench.held import Held, held, shard_elements
from scripts.tiny_gpt import build_gpt, causal_inputs, make_config, start_process_groups

LENGTH = 32


class Outcome(NamedTuple):
    """`saves`: the differences that theory expects between the run without the patch and the one with it."""

    held: Held
    saves: dict[str, int]
    note: str = ""


def make_model(case: SimpleNamespace, vocabulary: int, heads: int | None = None, **placement: Any) -> tuple[Any, Any]:
    bf16 = {"bf16": True, "params_dtype": torch.bfloat16}
    config = make_config(num_layers=case.layers, hidden_size=case.hidden, mtp_num_layers=heads, **bf16)
    return config, build_gpt(config, vocabulary, LENGTH, tied=False, **placement).bfloat16().cuda()


def fsdp_without_master_weights(case: SimpleNamespace) -> Outcome:
    """Three steps of a GPT in Megatron-FSDP (optim_grads_params) with a precision-aware FusedAdam."""
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

    vocabulary = 512
    config, net = make_model(case, vocabulary)
    fp32_gradients: dict[str, Any] = {"grad_reduce_in_fp32": True}
    if hasattr(DistributedDataParallelConfig, "megatron_fsdp_main_grads_dtype"):
        fp32_gradients = {"megatron_fsdp_main_grads_dtype": torch.float32}
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy="optim_grads_params",
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        **fp32_gradients,
    )
    model = FullyShardedDataParallel(config, ddp, net)
    settings = OptimizerConfig(
        optimizer="adam", lr=1e-2, bf16=True, use_distributed_optimizer=True, use_precision_aware_optimizer=True
    )
    optimizer = get_megatron_optimizer(settings, [model])
    *inputs, labels = causal_inputs(torch.randint(vocabulary, (2, LENGTH + 1), device="cuda"))
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(*inputs, labels=labels).float().mean()
        loss.backward()
        model.finish_grad_sync()
        optimizer.step()
        losses.append(float(loss))
    trains = "the loss changes" if losses[-1] != losses[0] else "the loss does not change"
    return Outcome(held([model], optimizer), {"optimizer_state": 4 * shard_elements(optimizer)}, trains)


def tag_mtp_stage_embedding(case: SimpleNamespace) -> Outcome:
    """The last of several pipeline stages, with an MTP head, in dist_muon; the embedding is most of it.

    Newer releases tag it themselves; without the patch it loses the tag here, to see what that would hold.
    """
    config, net = make_model(case, 64 * case.hidden, heads=1, pre_process=False)
    copy = net.embedding.word_embeddings.weight
    if not case.patched and hasattr(copy, "is_embedding_or_output_parameter"):
        del copy.is_embedding_or_output_parameter
    is_sharded = "use_layer_wise_distributed_optimizer" in OptimizerConfig.__dataclass_fields__  # from 0.18 on
    settings: dict[str, Any] = {"optimizer": "muon", "lr": 0.01, "bf16": True, "use_distributed_optimizer": is_sharded}
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=is_sharded)
    if is_sharded:
        from megatron.training.training import wrap_model_chunks_with_ddp

        chunks = wrap_model_chunks_with_ddp([net], config, ddp, use_layer_wise_distributed_optimizer=True)
        settings["use_layer_wise_distributed_optimizer"] = True
        optimizer = get_megatron_optimizer(OptimizerConfig(**settings), chunks, use_gloo_process_groups=False)
    else:
        from megatron.core.optimizer.muon import get_megatron_muon_optimizer

        chunks = [DistributedDataParallel(config, ddp, net)]
        layer_wise = {"layer_wise_distributed_optimizer": True, "use_gloo_process_groups": False}
        optimizer = get_megatron_muon_optimizer(OptimizerConfig(**settings), chunks, **layer_wise)
    for buffer in chunks[0].buffers:
        buffer.grad_data.fill_(0.01)
    optimizer.step()
    saves = {}
    if not is_sharded:
        mine = optimizer.dp_cp_params_list[torch.distributed.get_rank()]
        saves["optimizer_state"] = -4 * copy.numel() * any(param is copy for param in mine)
    return Outcome(held(chunks, optimizer), saves, f"the copy has {copy.numel():,} elements")


CASES = {
    "fsdp-without-master-weights": fsdp_without_master_weights,
    "tag-mtp-stage-embedding": tag_mtp_stage_embedding,
}


def main() -> None:
    file, case = Path(sys.argv[1]), SimpleNamespace(**json.loads(sys.argv[2]))
    start_process_groups()
    outcome = CASES[case.patch](case)
    result = {"held": outcome.held._asdict(), "saves": outcome.saves, "note": outcome.note}
    if not case.on_cpu:
        result["allocator"] = {"allocated": torch.cuda.memory_allocated(), "peak": torch.cuda.max_memory_allocated()}
    everyones: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyones, result)
    if torch.distributed.get_rank() == 0:
        file.write_text(json.dumps(everyones))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
