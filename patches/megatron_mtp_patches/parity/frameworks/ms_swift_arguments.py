"""The arguments of ms-swift: those in a file of a run, and those of its small run."""

from __future__ import annotations

import argparse
import importlib
import json
import re
from dataclasses import MISSING, fields
from typing import Any, NoReturn
from unittest import mock

from ...doctor.ms_swift_configuration import extra_fields
from ...engine import UsageError
from ..flags import Flag
from ..left_out import OWN_DATA, reason_to_leave_out
from ..small import BATCH, LENGTH, VOCABULARY
from ..study import MissingPackageError
from .fields import FIELDS, field_values

STEPS = 2
# What the small run has of the arguments that configurations of Megatron and mcore-bridge lack.
_KEPT = {"model", "model_type", "template", "use_hf", "padding_free", "megatron_extra_kwargs", "muon_use_nesterov"}
_KEPT |= {"enable_dft_loss", "language_model_only", "apply_wd_to_qk_layernorm"}
# What ms-swift computes of other arguments; an args.json has it for the layout and dtype of that run.
_COMPUTED = {"batch_p2p_comm", "accumulate_allreduce_grads_in_fp32", "fp16", "bf16"}
_TRAINER = {
    "dataset": "none",
    "perform_initialization": True,
    "check_model": False,
    "train_iters": STEPS,
    "micro_batch_size": 1,
    "global_batch_size": BATCH,
    "max_length": LENGTH,
    "lr_decay_style": "constant",
    "lr_warmup_iters": 0,
    "eval_iters": 0,
    "logging_steps": 1,
    "add_version": False,
}
_PRECISION = {
    "fp32": {"torch_dtype": "float32", "fp16": False, "bf16": False},
    "bf16": {"torch_dtype": "bfloat16", "fp16": False, "bf16": True},
}
_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "uint8": "fp8"}  # in an args.json, as arguments
_WITH_DTYPE = {"main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"}


def read_arguments(content: dict[str, Any]) -> Any:
    """The arguments of the run itself, without its process groups and folders.

    Raises:
        UsageError: ms-swift does not take them.
    """
    arguments = _arguments_class()
    with (
        mock.patch.object(arguments, "_init_distributed", lambda _: None),
        mock.patch.object(arguments, "_init_output_dir", lambda _: None),
    ):
        return _parse({**changed_arguments(content), "dataset": "none", "check_model": False})


def configure(content: dict[str, Any], flags: list[Flag], folder: str) -> Any:
    """The arguments of the small run, with the flags of a cut."""
    dtype = "bf16" if Flag("--bf16") in flags else "fp32"
    names = {field.name for field in fields(_arguments_class())}
    model_names = {field.name for field in fields(import_package("mcore_bridge").ModelConfig)}
    kept = {name: value for name, value in changed_arguments(content).items() if not why_left_out(name, dtype)}
    absent = {field.name: field.absent for field in FIELDS.values()}
    values = {**absent, **field_values(flags)}
    values["untie_embeddings_and_output_weights"] = not values.pop("share_embeddings_and_output_weights")
    if isinstance(values.get("moe_layer_freq"), list):
        values["moe_layer_freq"] = str(values["moe_layer_freq"]).replace(" ", "")
    own = {**_TRAINER, **_PRECISION[dtype], "output_dir": folder}
    model = {name: value for name, value in values.items() if name in model_names - names and value is not None}
    extra = {**extra_fields(kept), **model, "padded_vocab_size": VOCABULARY}
    words = {**kept, **{name: value for name, value in values.items() if name in names}, **own}
    arguments = _parse({**words, "megatron_extra_kwargs": extra})
    for name in values.keys() - names - model_names:  # of Megatron's other configurations, which ms-swift fills so
        setattr(arguments, name, values[name])
    arguments.callbacks = ["default_flow"]
    return arguments


def changed_arguments(content: dict[str, Any]) -> dict[str, Any]:
    """The arguments in a file that ms-swift has neither by default nor computed, as a command line has them.

    That of RL is not among them: parity trains by the loss of SFT.
    """
    changed = {}
    for field in fields(_arguments_class()):
        name, value = field.name, content.get(field.name)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if name in _WITH_DTYPE:
            value = _DTYPES.get(str(value), value)
        elif name == "attention_backend" and (enum := re.fullmatch(r"<AttnBackend\.(\w+): \d+>", str(value))):
            value = enum[1]
        if value not in (None, default) and name not in _COMPUTED and name != "rlhf_type":
            changed[name] = value
    return changed


def why_left_out(name: str, dtype: str) -> str:
    """Why a small run of this dtype leaves the argument out; '' where it has it."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig

    configurations = (import_package("mcore_bridge").ModelConfig, OptimizerConfig, DistributedDataParallelConfig)
    if reason := reason_to_leave_out(name.replace("_", "-"), dtype):
        return reason
    is_kept = name in _KEPT or any(name in one.__dataclass_fields__ for one in configurations)
    return "" if is_kept else OWN_DATA


def _parse(values: dict[str, Any]) -> Any:
    """ms-swift's arguments with these values.

    Raises:
        UsageError: ms-swift does not take them.
    """
    words: list[str] = []
    for name, value in values.items():
        if value not in (None, [], {}):
            texts = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
            words += [f"--{name}", *(str(text).lower() if isinstance(text, bool) else str(text) for text in texts)]
    try:
        with mock.patch.object(argparse.ArgumentParser, "error", _refuse_word):
            return import_package("swift.utils").parse_args(_arguments_class(), words)[0]
    except (ValueError, AssertionError, OSError) as error:
        raise UsageError(f"ms-swift does not take its arguments: {' '.join(str(error).split())}") from error


def _refuse_word(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    raise ValueError(message)  # its own method prints it and exits


def read_hugging_face_config(arguments: Any) -> Any:
    """The Hugging Face configuration of the model, as ms-swift reads it.

    Raises:
        UsageError: it has none, or no tokenizer.
    """
    try:
        return arguments.get_model_processor(load_model=False, download_model=False)[1].model_info.config
    except (ValueError, OSError) as error:
        raise UsageError(f"ms-swift reads no model from {arguments.model}: {' '.join(str(error).split())}") from error


def make_model_config(arguments: Any) -> Any:
    """The configuration of the run's own model, without process groups.

    Raises:
        UsageError: mcore-bridge makes none of it.
    """
    make = import_package("swift.megatron.model.utils").get_mcore_model_config
    bridge = import_package("mcore_bridge.bridge").GPTBridge
    parallel_state = import_package("megatron.core.parallel_state")
    try:
        with (
            mock.patch.object(bridge, "__init__", lambda *_: None),
            mock.patch.object(parallel_state, "get_expert_model_parallel_world_size", lambda: 1),
        ):
            return make(arguments, read_hugging_face_config(arguments))
    except (ValueError, AssertionError, TypeError) as error:
        raise UsageError(f"mcore-bridge makes no configuration of its model: {' '.join(str(error).split())}") from error


def _arguments_class() -> Any:
    return import_package("swift.megatron.arguments").MegatronSftArguments


def import_package(name: str) -> Any:
    """Import a module that building the run needs.

    Raises:
        MissingPackageError: it does not import.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingPackageError(
            f"ms-swift and mcore-bridge build this run, and {name} does not import: {error}; install them as "
            f"docs/ms-swift.md says"
        ) from error
