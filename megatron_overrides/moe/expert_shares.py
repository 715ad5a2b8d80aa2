"""Share out the experts of a layer-wise optimizer where they have replicas and dense layers have none.

LayerWiseDistributedOptimizer shares nothing out if one rank has the whole data-parallel group of the dense layers. The
ranks that hold replicas of an expert then all update it and count its gradient in sums over all ranks.
"""

from __future__ import annotations

from typing import Any

from megatron_overrides.call import Call


def share_out_experts(call: Call) -> None:
    """Wraps LayerWiseDistributedOptimizer.shard_params, which returns before it looks at the replicas of experts."""
    from megatron.core.utils import get_pg_rank, get_pg_size

    call.proceed()
    optimizer = call.instance
    replicas = getattr(optimizer.pg_collection, "expt_dp", None)
    if optimizer.dp_cp_params_list is not None or get_pg_size(replicas) == 1:
        return
    layouts = call.get("full_param_layouts")
    if layouts is not None:
        optimizer._shard_params_from_layout(call["optimizers"], layouts, 1, get_pg_size(replicas))
        return
    groups = [group for one in call["optimizers"] for group in one.param_groups if group.get("is_expert_parallel")]
    optimizer.expt_dp_params_list = _deal_out(groups, get_pg_rank(replicas), get_pg_size(replicas))


def _deal_out(groups: list[dict[str, Any]], rank: int, ranks: int) -> list[list[Any]] | None:
    """Leave in the param `groups` what `rank` updates; return the parameters of each rank, None if there are none."""
    params = sorted((param for group in groups for param in group["params"]), key=lambda param: param.numel())
    shares = [params[place::ranks] for place in range(ranks)]
    own = {id(param) for param in shares[rank]}
    for group in groups:
        group["params"] = [param for param in group["params"] if id(param) in own]
    return shares if params else None
