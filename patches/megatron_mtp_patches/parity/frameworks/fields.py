"""The fields of a framework's configurations that flags of Megatron's trainer set.

The layout of a run, and what the controls of a finding change, are read from fields as flags, so that a run of a
framework has the cuts of one with flags; the flags of a cut are set as fields again.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

from ...catalog import CATALOG
from ...doctor.findings import RunSettings
from ...engine import AddField, UsageError
from ..flags import Flag
from ..left_out import EVEN_LAYERS, NEEDS_GPU, reason_to_leave_out
from ..training import MODELS


class Field(NamedTuple):
    """A field that a flag sets.

    Attributes:
        name: of the field, in each section that has it.
        absent: its value in a run without the flag; the flag of a bool sets the opposite.
    """

    name: str
    absent: Any


FIELDS = {
    "--tensor-model-parallel-size": Field("tensor_model_parallel_size", 1),
    "--pipeline-model-parallel-size": Field("pipeline_model_parallel_size", 1),
    "--num-virtual-stages-per-pipeline-rank": Field("virtual_pipeline_model_parallel_size", None),
    "--context-parallel-size": Field("context_parallel_size", 1),
    "--cp-comm-type": Field("cp_comm_type", None),
    "--expert-model-parallel-size": Field("expert_model_parallel_size", 1),
    "--expert-tensor-parallel-size": Field("expert_tensor_parallel_size", None),
    "--sequence-parallel": Field("sequence_parallel", False),
    "--use-distributed-optimizer": Field("use_distributed_optimizer", False),
    "--num-distributed-optimizer-instances": Field("num_distributed_optimizer_instances", 1),
    "--overlap-grad-reduce": Field("overlap_grad_reduce", False),
    "--overlap-param-gather": Field("overlap_param_gather", False),
    "--overlap-param-gather-with-optimizer-step": Field("overlap_param_gather_with_optimizer_step", False),
    "--no-align-grad-reduce": Field("align_grad_reduce", True),
    "--ddp-average-in-collective": Field("average_in_collective", False),
    "--use-megatron-fsdp": Field("use_megatron_fsdp", False),
    "--use-torch-fsdp2": Field("use_torch_fsdp2", False),
    "--data-parallel-sharding-strategy": Field("data_parallel_sharding_strategy", "no_shard"),
    "--outer-dp-sharding-strategy": Field("outer_dp_sharding_strategy", "no_shard"),
    "--use-tp-pp-dp-mapping": Field("use_tp_pp_dp_mapping", False),
    "--moe-shared-expert-overlap": Field("moe_shared_expert_overlap", False),
    "--overlap-moe-expert-parallel-comm": Field("overlap_moe_expert_parallel_comm", False),
    "--delay-wgrad-compute": Field("delay_wgrad_compute", False),
    "--defer-embedding-wgrad-compute": Field("defer_embedding_wgrad_compute", False),
    "--distribute-saved-activations": Field("distribute_saved_activations", False),
    "--overlap-p2p-communication-warmup-flush": Field("overlap_p2p_comm_warmup_flush", False),
    "--recompute-granularity": Field("recompute_granularity", None),
    "--recompute-method": Field("recompute_method", None),
    "--recompute-num-layers": Field("recompute_num_layers", None),
    "--untie-embeddings-and-output-weights": Field("share_embeddings_and_output_weights", True),
    "--no-gradient-accumulation-fusion": Field("gradient_accumulation_fusion", True),
    "--calculate-per-token-loss": Field("calculate_per_token_loss", False),
    "--use-precision-aware-optimizer": Field("use_precision_aware_optimizer", False),
}
_RENAMED = {
    "--num-experts": Field("num_moe_experts", None),
    "--no-rope-fusion": Field("apply_rope_fusion", True),
}
# The reasons to leave out fields that no flag of the same name sets.
_LEFT_OUT = {
    "fp8": NEEDS_GPU,
    "fp4": NEEDS_GPU,
    "cpu_offloading": NEEDS_GPU,
    "use_te_rng_tracker": NEEDS_GPU,
    "num_layers_in_first_pipeline_stage": EVEN_LAYERS,
    "num_layers_in_last_pipeline_stage": EVEN_LAYERS,
}
_SIZES = ("tensor", "pipeline", "context", "expert")


def read_flags(sections: Iterable[Any], dtype: str) -> list[Flag]:
    """The flags of FIELDS that a run with these sections has and its small run keeps."""
    settings = RunSettings(sections, None)
    flags = []
    for name, (field, absent) in FIELDS.items():
        value = getattr(settings, field)
        if value is None or value == absent or reason_to_leave_out(name.removeprefix("--"), dtype):
            continue
        if isinstance(value, bool):
            flags.append(Flag(name))
        else:
            flags.append(Flag(name, tuple(map(str, value if isinstance(value, list) else [value]))))
    return flags


def read_settings(sections: Iterable[Any]) -> RunSettings:
    """The settings by which a run is made small and cut, with the names that the arguments of Megatron have."""
    fields = RunSettings(sections, None)
    kinds, groups = fields.cp_comm_type, fields.num_query_groups
    aliases = SimpleNamespace(
        cp_comm_type=[kinds] if isinstance(kinds, str) else kinds,
        num_virtual_stages_per_pipeline_rank=fields.virtual_pipeline_model_parallel_size,
        num_distributed_optimizer_instances=fields.num_distributed_optimizer_instances or 1,
        group_query_attention=bool(groups) and groups != fields.num_attention_heads,
        **{f"{axis}_model_parallel_size": getattr(fields, f"{axis}_model_parallel_size") or 1 for axis in _SIZES},
        context_parallel_size=fields.context_parallel_size or 1,
    )
    return RunSettings([aliases, *sections], None)


def leave_out(title: str, section: Any, dtype: str) -> Iterator[tuple[str, Flag]]:
    """Give the fields that a small run leaves out Megatron's defaults. Yield the reason and the setting of each."""
    for field in dataclasses.fields(section):
        name, value = field.name, getattr(section, field.name, None)
        reason = _LEFT_OUT.get(name) or reason_to_leave_out(name.replace("_", "-"), dtype)
        default = _default_in_megatron(type(section), name)
        if reason and default is not dataclasses.MISSING and value != default:
            setattr(section, name, default)
            if value:
                yield reason, Flag(f"{title}.{name}", (str(value),))


def _default_in_megatron(configuration: type, name: str) -> Any:
    """The default of a field in the first class that has it: a framework's own class may have another one."""
    own_fields = (vars(base).get("__dataclass_fields__", {}) for base in reversed(configuration.__mro__))
    field = next(names[name] for names in own_fields if name in names)
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def set_absent(sections: Iterable[Any]) -> None:
    """Give the fields of FIELDS the values that they have without flags."""
    for field, absent in FIELDS.values():
        _set(sections, field, absent)


def set_flags(sections: Iterable[Any], flags: Iterable[Flag]) -> None:
    """Set what flags say, in each section that has such a field; flags without a field are passed over."""
    for name, value in field_values(flags).items():
        _set(sections, name, value)


def field_values(flags: Iterable[Flag]) -> dict[str, Any]:
    """{field: its value} as the flags set them."""
    values = {}
    for flag in flags:
        field = FIELDS.get(flag.name) or _RENAMED.get(flag.name) or Field(flag.setting, False)
        values[field.name] = read_value(flag.values) if flag.values else not field.absent
    return values


def _set(sections: Iterable[Any], name: str, value: Any) -> None:
    for section in sections:
        if hasattr(section, name):
            current = getattr(section, name)
            if hasattr(type(current), "__members__") and isinstance(value, str):  # an enum
                setattr(section, name, type(current)[value])
            else:
                setattr(section, name, value)


def read_value(words: tuple[str, ...]) -> Any:
    """The value that the words of a flag spell: a number, a list such as [0]*1+[1]*3, or text."""
    (word,) = words
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        pass
    if word.startswith("(["):  # as Megatron's parser reads --moe-layer-freq
        parts = (part.split("*") for part in word.strip("()").split("+"))
        return [entry for entries, count in parts for entry in ast.literal_eval(entries) * int(count)]
    return word


def plain_settings(sections: Iterable[Any]) -> dict[str, Any]:
    """The settings of a training that are plain values, with what Megatron's arguments have in addition."""
    import torch
    from megatron.core import parallel_state

    plain = (str, int, float, bool, list, tuple, torch.dtype)
    settings: dict[str, Any] = {}
    for section in sections:
        for name, value in vars(section).items():
            if isinstance(value, plain):
                settings.setdefault(name, value)
    return {
        **settings,
        "world_size": torch.distributed.get_world_size(),
        "data_parallel_size": parallel_state.get_data_parallel_world_size(),
        "grad_reduce_in_bf16": not settings.get("grad_reduce_in_fp32", True),
    }


def refuse_other_models(chunks: Iterable[Any]) -> None:
    """Refuse a model that parity does not fill and watch.

    Raises:
        UsageError: a chunk is none of these models.
    """
    for model in chunks:
        while _path(model) not in MODELS and hasattr(model, "module"):  # a wrapper
            model = model.module
        if _path(model) not in MODELS:
            names = ", ".join(dict.fromkeys(name.rpartition(":")[2] for name in MODELS))
            raise UsageError(f"the run builds a {_path(model)}, and parity trains {names}")


def _path(model: Any) -> str:
    return f"{type(model).__module__}:{type(model).__qualname__}"


def refuse_unknown(title: str, section: dict[str, Any], instance: Any) -> None:
    """Refuse settings of a section that the object made of it lacks, unless they say what is so without them.

    The title is '' where the section is the whole file.

    Raises:
        UsageError: there is one; it names the patch that adds it, or says that the framework is another one.
    """
    added = {
        edit.field: (patch.id, edit.default)
        for patch in sorted(CATALOG, key=lambda patch: not patch.package)  # where several add it, not a framework's
        for edit in patch.edits
        if isinstance(edit, AddField)
    }
    for name, value in section.items():
        patch, default = added.get(name, ("", None))
        if name.startswith("_") or hasattr(instance, name) or value in (None, default):
            continue
        place = f"{title}.{name}" if title else name
        if patch:
            raise UsageError(f"{place} comes with the patch {patch}, which is left out or refused: see `status`")
        raise UsageError(f"{place}: the {type(instance).__name__} that is installed has no such field")
