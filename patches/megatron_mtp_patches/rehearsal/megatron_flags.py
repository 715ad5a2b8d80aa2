"""Megatron's command line on a CPU: other defaults, and errors that name each flag that no CPU can obey.

Only defaults change, so a flag that the user gives takes precedence. A script that does not build Megatron's parser is
not affected. The engine installs the two wrappers around those of the user's patches, so that a command line is refused
before any other check fails.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from ..engine import Patch, UsageError, Wrap
from ..engine.call import Call
from ..megatron_engine import ENGINE
from . import transformer_engine, with_transformer_engine

PATCH = Patch(
    id="cpu-rehearsal",
    summary="Megatron's command line on a CPU: other defaults, and errors that name the flags that need a GPU",
    edits=(
        Wrap(
            "megatron.training.arguments:add_megatron_arguments",
            "megatron_mtp_patches.rehearsal.megatron_flags:set_cpu_defaults",
            check_source=False,
        ),
        Wrap(
            "megatron.training.arguments:validate_args",
            "megatron_mtp_patches.rehearsal.megatron_flags:refuse_gpu_flags",
            check_source=False,
        ),
    ),
)

# Also with TransformerEngine: the first two belong to `--transformer-impl local`, which the user may choose.
_ALWAYS: dict[str, Any] = {
    "no_persist_layer_norm": True,
    "masked_softmax_fusion": False,
    "num_workers": 0,
    "distributed_backend": "gloo",
}
_WITHOUT_TRANSFORMER_ENGINE: dict[str, Any] = {
    "transformer_impl": "local",
    "attention_backend": "unfused",
    "gradient_accumulation_fusion": False,
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
}


class RehearsalRefusal(UsageError):
    """The command line asks for something that a rehearsal on the CPU cannot do."""


class _Refusal(NamedTuple):
    dest: str
    asked_for: Callable[[Any], bool]
    advice: str


def _is_set(value: Any) -> bool:
    return bool(value)


def _other_than(*harmless: Any) -> Callable[[Any], bool]:
    return lambda value: getattr(value, "name", value) not in harmless


_GRAPHS = "CUDA graphs need a GPU: leave it out"
_NCCL = "there is no NCCL on a CPU: leave it out"
_TE = "it needs a kernel of TransformerEngine that has no stand-in: leave it out"
# Refusals that depend on whether TransformerEngine runs are in _transformer_engine_refusals().
_REFUSALS = (
    _Refusal("use_flash_attn", _is_set, "FlashAttention needs a GPU: leave it out"),
    _Refusal("fp8", _is_set, "fp8 needs a GPU: train in bf16"),
    _Refusal("fp4", _is_set, "fp4 needs a GPU: train in bf16"),
    _Refusal("te_precision_config_file", _is_set, _TE),
    _Refusal("use_transformer_engine_op_fuser", _is_set, _TE),
    _Refusal("tp_comm_overlap", _is_set, "it overlaps inside TransformerEngine: leave it out"),
    _Refusal("enable_cuda_graph", _is_set, _GRAPHS),
    _Refusal("external_cuda_graph", _is_set, _GRAPHS),
    _Refusal("cuda_graph_impl", _other_than(None, "none"), _GRAPHS),
    _Refusal("optimizer_cuda_graph", _is_set, _GRAPHS),
    _Refusal("nccl_ub", _is_set, _NCCL),
    _Refusal("use_sharp", _is_set, _NCCL),
    _Refusal("nccl_communicator_config_path", _is_set, _NCCL),
    _Refusal("high_priority_stream_groups", _is_set, _NCCL),
    _Refusal("moe_token_dispatcher_type", _other_than("allgather", "alltoall"), "it needs DeepEP: use `alltoall`"),
    _Refusal("moe_enable_deepep", _is_set, "DeepEP needs a GPU: leave it out"),
    _Refusal("refit_method", _other_than("gloo", "nccl"), "there is no NVSHMEM on a CPU: use `gloo`"),
    _Refusal("record_memory_history", _is_set, "there is no GPU memory to record: leave it out"),
)


def install() -> None:
    """Add the two wrappers to the engine's base patches. Megatron's arguments module may be imported later or never."""
    ENGINE.add_base(PATCH)


def cpu_defaults() -> dict[str, Any]:
    """Return the defaults of a rehearsal by the dest of their flags."""
    return _ALWAYS if with_transformer_engine() else _WITHOUT_TRANSFORMER_ENGINE | _ALWAYS


def set_cpu_defaults(call: Call) -> Any:
    """Wraps add_megatron_arguments: gives the flags that this release has the defaults of a CPU."""
    parser: argparse.ArgumentParser = call.proceed()
    destinations = {action.dest for action in parser._actions}
    parser.set_defaults(**{dest: value for dest, value in cpu_defaults().items() if dest in destinations})
    return parser


def refuse_gpu_flags(call: Call) -> Any:
    """Wraps validate_args, the first function that also sees what --use-checkpoint-args took from a checkpoint."""
    arguments = call["args"]
    refuse(arguments)
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"rehearsal on the CPU over gloo: {', '.join(_describe(arguments))}", flush=True)
    return call.proceed()


def _describe(args: argparse.Namespace) -> list[str]:
    """List the changed defaults that no flag of the user overrides, and the TransformerEngine that runs."""
    values = {dest: getattr(args, dest, None) for dest in cpu_defaults()}
    values = {dest: getattr(value, "name", value) for dest, value in values.items()}
    described = [f"{dest}={value}" for dest, value in values.items() if value == cpu_defaults()[dest]]
    if getattr(args, "transformer_impl", "local") == "transformer_engine":
        described.append(f"TransformerEngine {transformer_engine.version()} with its kernels in torch")
    return described


def refuse(args: argparse.Namespace) -> None:
    """Raise one RehearsalRefusal that names every flag that a CPU cannot obey."""
    reasons = [
        f"{_flag(dest, getattr(args, dest))}: {advice}."
        for dest, asked_for, advice in (*_REFUSALS, *_transformer_engine_refusals())
        if hasattr(args, dest) and asked_for(getattr(args, dest))
    ]
    is_tensor_parallel = getattr(args, "tensor_model_parallel_size", 1) > 1
    is_local = getattr(args, "transformer_impl", "local") == "local"
    has_norm = importlib.util.find_spec("apex") if is_local else with_transformer_engine()
    if getattr(args, "sequence_parallel", False) and is_tensor_parallel and not has_norm:
        instead = (
            "use `--transformer-impl transformer_engine`"
            if with_transformer_engine()
            else transformer_engine.installation_advice()
        )
        reasons.append(
            f"--sequence-parallel: it needs the LayerNorm of Apex or TransformerEngine: leave it out, or {instead}."
        )
    if reasons:
        raise RehearsalRefusal("\n  ".join(["a rehearsal on the CPU cannot run this command line.", *reasons]))


def _transformer_engine_refusals() -> tuple[_Refusal, ...]:
    if with_transformer_engine():
        return (
            _Refusal(
                "transformer_impl", _other_than("local", "transformer_engine"), "use `transformer_engine` or `local`"
            ),
            _Refusal(
                "attention_backend",
                _other_than("auto", "fused", "unfused", "local"),
                "use `auto`, `fused` or `unfused`",
            ),
        )
    instead = transformer_engine.installation_advice()
    return (
        _Refusal("transformer_impl", _other_than("local"), f"use `local`, or {instead}"),
        _Refusal("attention_backend", _other_than("unfused", "local", "auto"), f"use `unfused`, or {instead}"),
        _Refusal("use_precision_aware_optimizer", _is_set, f"leave it out, or {instead}"),
    )


_FLAG_OF_DEST = {"fp8": "--fp8-format", "fp4": "--fp4-format", "nccl_ub": "--use-nccl-ub"}


def _flag(dest: str, value: Any) -> str:
    flag = _FLAG_OF_DEST.get(dest) or "--" + dest.replace("_", "-")
    return flag if value is True else f"{flag} {getattr(value, 'name', value)}"
