"""The run that an args.json or a YAML file of ms-swift describes."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

from .configuration import Configuration, make_dtype, make_source, read_hugging_face_sizes
from .places import MS_SWIFT

# Arguments of ms-swift's Megatron commands, of which its others have none. Each has a default, so a file may lack some.
_ARGUMENTS = re.compile(
    r"(micro|global)_batch_size|train_iters|mtp_num_layers|mcore_model"
    r"|(tensor_model|pipeline_model|context|expert_model)_parallel_size"
)
# What a run has whose file says nothing of it, where this is not Megatron's default. An args.json says it.
DEFAULTS = {
    "cross_entropy_loss_fusion": True,
    "data_parallel_sharding_strategy": "optim_grads_params",
    "expert_tensor_parallel_size": 1,
    "finetune": True,
    "global_batch_size": 16,
    "micro_batch_size": 1,
    "moe_grouped_gemm": True,
    "moe_router_dtype": "fp32",
    "moe_token_dispatcher_type": "alltoall",
    "recompute_granularity": "selective",
    "use_distributed_optimizer": True,
}


def is_one(content: dict[Any, Any]) -> bool:
    """It names a model, which other files describe in a section or by another name, and has arguments of Megatron."""
    has_model = any(isinstance(content.get(name), str) for name in ("model", "mcore_model"))
    return has_model and any(_ARGUMENTS.fullmatch(str(name)) for name in content)


def read(content: dict[Any, Any]) -> Configuration:
    """The run of a file."""
    sizes, notes = read_hugging_face_sizes(content.get("model"), has_heads=False)
    # As ms-swift computes them of other arguments, which its YAML file does not say.
    fixed = {"use_distributed_optimizer": False} if "muon" in str(content.get("optimizer")) else {}
    is_sft = content.get("task_type") in (None, "causal_lm") and not content.get("rlhf_type")
    is_virtual = bool(content.get("virtual_pipeline_model_parallel_size"))
    defaults = {**DEFAULTS, "calculate_per_token_loss": is_sft, "overlap_p2p_comm": is_virtual}
    untrained = "" if content.get("mtp_num_layers") else "mtp_num_layers is not set, so the model has no MTP heads"
    return Configuration(
        sources=[
            SimpleNamespace(**fixed),
            make_source(content),
            make_dtype(content.get("torch_dtype") or "bfloat16"),
            *sizes,
            SimpleNamespace(**defaults, is_of_ms_swift=True),
        ],
        sections=[("", content)],
        places=MS_SWIFT,
        untrained_heads=untrained,
        shows_patches=not MS_SWIFT.sections[""].isdisjoint(content),  # arguments that the patches add to ms-swift's
        notes=notes,
        content=content,
    )
