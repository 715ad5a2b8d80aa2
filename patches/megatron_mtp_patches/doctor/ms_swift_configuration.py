"""The run that an args.json or a YAML file of ms-swift describes, or the arguments of a command."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from ..catalog import SETTINGS
from ..megatron_engine import ENGINE
from .configuration import Configuration, make_dtype, make_source, read_hugging_face_sizes
from .ms_swift_arguments import complete, find_unknown
from .places import MS_SWIFT, sections_of

# Arguments of ms-swift's Megatron commands, of which its others have none. Each has a default, so a file may lack some.
_ARGUMENTS = re.compile(
    r"(micro|global)_batch_size|train_iters|mtp_\w+|mcore_model|sequence_parallel|recompute_granularity"
    r"|(tensor_model|pipeline_model|context|expert_model)_parallel_size"
)
RANKS = ("NPROC_PER_NODE", "NNODES")  # variables of which `megatron` makes options of torchrun
_SWITCHES = {"true": True, "t": True, "yes": True, "y": True, "1": True}
_SWITCHES |= {"false": False, "f": False, "no": False, "n": False, "0": False}
_BOOLS = {setting.name for setting in SETTINGS.values() if setting.type is bool}
# What a run has whose file says nothing of it, where a defect depends on it. An args.json says it.
DEFAULTS = {
    "clip_grad": 1.0,
    "cross_entropy_loss_fusion": True,
    "data_parallel_sharding_strategy": "optim_grads_params",
    "expert_tensor_parallel_size": 1,
    "finetune": True,
    "fp8_recipe": "delayed",
    "global_batch_size": 16,
    "micro_batch_size": 1,
    "moe_grouped_gemm": True,
    "moe_router_dtype": "fp32",
    "moe_token_dispatcher_type": "alltoall",
    "perform_initialization": False,
    "recompute_granularity": "selective",
    "use_distributed_optimizer": True,
}


def is_one(content: dict[Any, Any]) -> bool:
    """It names a model, which other files describe in a section or by another name, and has arguments of Megatron."""
    has_model = any(isinstance(content.get(name), str) for name in ("model", "mcore_model"))
    return has_model and (has_added_arguments(content) or any(_ARGUMENTS.fullmatch(str(name)) for name in content))


def has_added_arguments(content: Mapping[Any, Any]) -> bool:
    """It has arguments that the patches add to those of ms-swift, so its run has the patches."""
    return not MS_SWIFT.sections[""].isdisjoint(content)


def read(content: dict[Any, Any], world_size: int | None = None) -> Configuration:
    """The run of these arguments, with the variables of the section `ENV` that a file may have.

    Args:
        world_size: the number of ranks where the variables do not say it.
    """
    variables = content["ENV"] if isinstance(content.get("ENV"), dict) else {}
    names = {name: complete(str(name).replace("-", "_")) for name in content if name != "ENV"}
    content = {name: _parse(name, content[written]) for written, name in names.items()}
    sizes, notes = read_hugging_face_sizes(content.get("model"), has_heads=False)
    # As ms-swift computes them of other arguments, which its YAML file does not say.
    fixed = {"use_distributed_optimizer": False} if "muon" in str(content.get("optimizer")) else {}
    dtype = content.get("torch_dtype") or "bfloat16"
    if "bfloat16" in str(dtype) and content.get("main_grads_dtype") in (None, "fp32"):
        fixed["accumulate_allreduce_grads_in_fp32"] = True
    is_sft = content.get("task_type") in (None, "causal_lm") and not content.get("rlhf_type")
    is_virtual = bool(content.get("virtual_pipeline_model_parallel_size"))
    computed: dict[str, Any] = {"calculate_per_token_loss": is_sft, "overlap_p2p_comm": is_virtual}
    computed |= {"fp8": content.get("fp8_format"), "fp4": content.get("fp4_format")}
    patches = str(variables.get(ENGINE.project.choice_variable) or "").strip()
    return Configuration(
        sources=[
            SimpleNamespace(world_size=_count_ranks(variables) or world_size, **fixed),
            make_source(extra_fields(content)),
            make_source(content),
            make_dtype(dtype),
            *sizes,
            SimpleNamespace(**DEFAULTS, **computed, is_of_ms_swift=True),
        ],
        sections=[
            *((name, section) for name, section in sections_of(content) if name != "megatron_extra_kwargs"),
            ("ENV", variables),
        ],
        places=MS_SWIFT,
        untrained_heads=why_no_head_trains(content),
        hints=() if "swift_version" in content else tuple(find_unknown(content)),  # an args.json has computed names
        patches=patches,
        shows_patches=bool(patches) or has_added_arguments(content),
        is_enabled_by_variable=bool(patches),
        notes=notes,
        content=content,
    )


def why_no_head_trains(arguments: Mapping[Any, Any]) -> str:
    """Why the model has no MTP heads; '' if it has some."""
    has_heads = {**arguments, **extra_fields(arguments)}.get("mtp_num_layers")
    return "" if has_heads else "mtp_num_layers is not set, so the model has no MTP heads"


def extra_fields(arguments: Mapping[Any, Any]) -> dict[str, Any]:
    """The fields of the model's configuration that replace arguments, which may be written as JSON."""
    fields = arguments.get("megatron_extra_kwargs")
    try:
        fields = json.loads(fields) if isinstance(fields, str) else fields
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _parse(name: str, value: Any) -> Any:
    """A value that is written as text, as in a command or as 1e-5 in YAML, as ms-swift reads it."""
    if isinstance(value, list):
        return [_parse(name, one) for one in value]
    if name in _BOOLS:
        return _SWITCHES.get(str(value).lower(), value)
    if not isinstance(value, str):
        return value
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            pass
    return {"true": True, "false": False}.get(value.lower(), value)


def _count_ranks(variables: dict[str, Any]) -> int | None:
    """As `megatron` does, which starts torchrun if one of them is set; None where they are no numbers."""
    numbers = [str(variables[name]) for name in RANKS if name in variables]
    return math.prod(map(int, numbers)) if numbers and all(map(str.isdecimal, numbers)) else None
