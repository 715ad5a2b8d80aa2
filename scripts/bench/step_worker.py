"""One rank of one Megatron: makes chained optimizers; rank 0 takes orders from step.py, one JSON line each.

{"case": "bf16"} is answered with the seconds of a step on the slowest rank, {"case": "bf16", "count": 2} with what a
step does besides computing (counting.py), the mean of two. Every fourth parameter is an expert's, so that two
optimizers are chained; every tenth is in a norm group, if the case has them. Ranks are tensor-parallel: they share one
norm.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from scripts import study
from scripts.bench.counting import count
from scripts.bench.step import ANSWER, CASES
from scripts.tiny_gpt import start_process_groups

SIDE, WARM_UP = 16, 3


def make_step(case: str, number: int) -> tuple[Callable[[], None], Callable[[], Any], Any]:
    """(what gives new gradients, the step, its optimizer) of `number` square matrices."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    precision, groups = CASES[case]
    dtype = getattr(torch, precision)
    torch.manual_seed(dist.get_rank())
    matrices = torch.nn.ParameterList(torch.randn(SIDE, SIDE, dtype=dtype, device="cuda") for _ in range(number))
    for index, param in enumerate(matrices):
        param.allreduce = index % 4 != 0
        param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, 0, 1
        if groups and index % 10 == 0:
            param.grad_norm_group = "mtp"
    config = TransformerConfig(num_layers=1, hidden_size=SIDE, num_attention_heads=1)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), matrices)
    settings = {"optimizer": "adam", "lr": 1e-3, "clip_grad": 1.0, "params_dtype": dtype}
    optimizer = get_megatron_optimizer(OptimizerConfig(bf16=dtype == torch.bfloat16, **settings), [model])
    buffers = [*model.buffers, *model.expert_parallel_buffers]
    gradients = [torch.randn_like(buffer.grad_data) for buffer in buffers]

    def refill() -> None:  # a step clips some of them where they are
        for buffer, gradient in zip(buffers, gradients, strict=True):
            buffer.grad_data.copy_(gradient)

    return refill, optimizer.step, optimizer


def rank_sets(optimizer: Any) -> int:
    """Over how many different sets of ranks the norms of the chained optimizers are summed."""
    groups = [child.get_grad_stats_parallel_group() for child in optimizer.chained_optimizers]
    return len({tuple(dist.get_process_group_ranks(group)) for group in groups})


def timed(refill: Callable[[], None], step: Callable[[], Any]) -> float:
    refill()
    torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    device, parameters = sys.argv[1], int(sys.argv[2])
    if device == "gpu":
        torch.cuda.set_device(dist.get_node_local_rank(0))
    start_process_groups(tensor_model_parallel_size=int(os.environ["WORLD_SIZE"]))
    orders = dist.new_group(backend="gloo")  # a rank that waits in NCCL keeps its GPU busy
    is_first = dist.get_rank() == 0
    cases: dict[str, Any] = {}

    def answer(value: Any) -> None:
        if is_first:
            print(ANSWER + json.dumps(value), flush=True)

    answer({"megatron-core": study.installed_release(), "torch": torch.__version__})
    while True:
        message = [json.loads(sys.stdin.readline() or "null") if is_first else None]
        dist.broadcast_object_list(message, group=orders)
        order = message[0]
        if order is None:
            break
        if order["case"] not in cases:
            cases[order["case"]] = make_step(order["case"], parameters)
            for _ in range(WARM_UP):
                timed(*cases[order["case"]][:2])
        refill, step, optimizer = cases[order["case"]]
        if "count" in order:
            refill()
            counts = count(step, order["count"], device == "gpu")
            answer({**counts._asdict(), "rank sets": rank_sets(optimizer)})
        else:
            timed(refill, step)  # the Megatron before has left the caches full of what is its own
            seconds: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(seconds, timed(refill, step), group=orders)
            answer(max(seconds))  # a step ends with its last rank
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
