"""A run of ms-swift, by its args.json or YAML file: ms-swift's own trainer trains what mcore-bridge builds."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import tempfile
from dataclasses import MISSING, dataclass, fields
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

from megatron_overrides.model_places import Placement

from ...engine import UsageError
from ..flags import Flag, split
from ..left_out import OWN_DATA, reason_to_leave_out
from ..samples import plain_samples
from ..small import BATCH, LENGTH, VOCABULARY, SmallRun, small_values
from ..study import MissingPackageError
from .fields import (
    FIELDS,
    field_values,
    plain_settings,
    read_flags,
    read_settings,
    refuse_other_models,
    refuse_unknown,
)

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

_replaced_by_mcore_bridge: dict[Any, Any] = {}  # {a class: the forward that mcore-bridge gives it when imported}


@dataclass(frozen=True)
class SwiftRun:
    """A full-parameter training of ms-swift.

    Attributes:
        content: the arguments that are in its file.
    """

    content: dict[str, Any]
    trainer = "ms-swift's MegatronTrainer with its loss of SFT"
    not_covered = "losses of `megatron rlhf`, templates, and several sequences in a micro-batch"
    carriers = ("train-heads-in-mcore-bridge",)

    def import_trainer(self) -> None:
        """Import ms-swift and mcore-bridge, so that the ranks need not.

        Raises:
            MissingPackageError: one does not import.
        """
        heads = _import("megatron.core.transformer.multi_token_prediction").MultiTokenPredictionBlock
        forward = heads.forward
        for name in ("arguments", "model", "trainers"):
            _import(f"swift.megatron.{name}")
        if heads.forward is not forward:  # mcore-bridge has replaced it, and patches must come before
            _replaced_by_mcore_bridge[heads] = heads.forward
            heads.forward = forward

    def shrink(self, dtype: str) -> SmallRun:
        """Make the run small. `dtype` is "fp32" or "bf16".

        Raises:
            UsageError: its model is none that parity trains, or ms-swift does not take its arguments.
        """
        arguments = self._read_arguments()
        refuse_unknown("", self.content, arguments)
        _refuse(arguments)
        config = _make_model_config(arguments)
        shares_embeddings = SimpleNamespace(
            share_embeddings_and_output_weights=not config.untie_embeddings_and_output_weights
        )
        sections = [shares_embeddings, config, arguments]
        left_out: dict[str, list[Flag]] = {}
        for name, value in _changed(self.content).items():
            if reason := _reason_to_leave_out(name, dtype):
                left_out.setdefault(reason, []).append(Flag(name, (str(value),)))
        settings = read_settings(sections)
        changed = small_values(settings)
        if dtype == "bf16":
            changed.append(Flag("--bf16"))
        return SmallRun([*read_flags(sections, dtype), *changed], left_out, changed, settings, dtype)

    def train(self, job: Any, record: Any, state: Placement) -> None:
        """Train as this rank, with the flags of the job, and leave its numbers in `record`."""
        from megatron.core import parallel_state

        from ..training import record_updates

        for heads, forward in _replaced_by_mcore_bridge.items():
            heads.forward = forward
        trainers = _import("swift.megatron.trainers")
        _import("mcore_bridge.bridge").GPTBridge.load_weights = lambda *_, **__: None
        with tempfile.TemporaryDirectory() as folder:
            arguments = self._configure(split(job.flags), folder)
            template = SimpleNamespace(
                config=_read_hugging_face_config(arguments),
                padding_free=arguments.padding_free,
                data_collator=_make_batch,
            )
            trainer = trainers.MegatronTrainer(arguments, template)
            refuse_other_models(trainer.unwrapped_models)
            ddp = getattr(trainer.wrapped_models[0], "ddp_config", SimpleNamespace())
            record.arguments = plain_settings([trainer.config, trainer.optimizer.config, ddp, arguments])
            record_updates(trainer.wrapped_models, trainer.optimizer, record, state)
            log = trainer.on_log

            def log_and_record(logs: dict[str, Any], prefix: str = "") -> None:
                log(logs, prefix)
                numbers = {name: [value] for name, value in logs.items() if "loss" in name and isinstance(value, float)}
                record.losses.append(numbers)
                record.norms.append(float(logs["grad_norm"]))
                record.lines.append({})

            rank, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
            samples = plain_samples(STEPS * BATCH, job.data)
            numbers = [step * BATCH + one for step in range(STEPS) for one in range(rank, BATCH, replicas)]
            trainer.on_log = log_and_record
            trainer.save_checkpoint = lambda: None
            trainer._prepare_data_iterator = lambda *_: (
                (_make_batch(samples[number], arguments.padding_free) for number in numbers),
                None,
            )
            trainer.train(None, None)

    def _read_arguments(self) -> Any:
        """The arguments of the run itself, without its process groups and folders.

        Raises:
            UsageError: ms-swift does not take them.
        """
        arguments = _import("swift.megatron.arguments").MegatronSftArguments
        with (
            mock.patch.object(arguments, "_init_distributed", lambda _: None),
            mock.patch.object(arguments, "_init_output_dir", lambda _: None),
        ):
            return _parse({**_changed(self.content), "dataset": "none", "check_model": False})

    def _configure(self, flags: list[Flag], folder: str) -> Any:
        """The arguments of the small run, with the flags of a cut."""
        dtype = "bf16" if Flag("--bf16") in flags else "fp32"
        names = {field.name for field in fields(_import("swift.megatron.arguments").MegatronSftArguments)}
        model_names = {field.name for field in fields(_import("mcore_bridge").ModelConfig)}
        kept = {name: value for name, value in _changed(self.content).items() if not _reason_to_leave_out(name, dtype)}
        absent = {field.name: field.absent for field in FIELDS.values()}
        values = {**absent, **field_values(flags)}
        values["untie_embeddings_and_output_weights"] = not values.pop("share_embeddings_and_output_weights")
        if isinstance(values.get("moe_layer_freq"), list):
            values["moe_layer_freq"] = str(values["moe_layer_freq"]).replace(" ", "")
        own = {**_TRAINER, **_PRECISION[dtype], "output_dir": folder}
        model = {name: value for name, value in values.items() if name in model_names - names and value is not None}
        extra = {**_parse_json(kept.pop("megatron_extra_kwargs", None)), **model, "padded_vocab_size": VOCABULARY}
        words = {**kept, **{name: value for name, value in values.items() if name in names}, **own}
        arguments = _parse({**words, "megatron_extra_kwargs": extra})
        for name in values.keys() - names - model_names:  # of Megatron's other configurations, which ms-swift fills so
            setattr(arguments, name, values[name])
        arguments.callbacks = ["default_flow"]
        return arguments


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingPackageError(
            f"ms-swift and mcore-bridge build this run, and {name} does not import: {error}; install them as "
            f"docs/ms-swift.md says"
        ) from error


def _changed(content: dict[str, Any]) -> dict[str, Any]:
    """The arguments in a file that ms-swift has neither by default nor computed, as a command line has them.

    That of RL is not among them: parity trains by the loss of SFT.
    """
    changed = {}
    for field in fields(_import("swift.megatron.arguments").MegatronSftArguments):
        name, value = field.name, content.get(field.name)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if name in _WITH_DTYPE:
            value = _DTYPES.get(str(value), value)
        elif name == "attention_backend" and (enum := re.fullmatch(r"<AttnBackend\.(\w+): \d+>", str(value))):
            value = enum[1]
        if value not in (None, default) and name not in _COMPUTED and name != "rlhf_type":
            changed[name] = value
    return changed


def _reason_to_leave_out(name: str, dtype: str) -> str:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig

    configurations = (_import("mcore_bridge").ModelConfig, OptimizerConfig, DistributedDataParallelConfig)
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
            return _import("swift.utils").parse_args(_import("swift.megatron.arguments").MegatronSftArguments, words)[0]
    except (ValueError, AssertionError, OSError) as error:
        raise UsageError(f"ms-swift does not take its arguments: {' '.join(str(error).split())}") from error


def _refuse_word(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    raise ValueError(message)  # its own method prints it and exits


def _parse_json(value: Any) -> dict[str, Any]:
    return json.loads(value) if isinstance(value, str) else dict(value or {})


def _refuse(arguments: Any) -> None:
    """Refuse what parity does not train.

    Raises:
        UsageError: the run trains something else than all weights of a causal language model of mcore-bridge.
    """
    if arguments.tuner_type != "full":
        raise UsageError("the run trains adapters, and parity compares whole models: set tuner_type to full")
    if arguments.task_type != "causal_lm" or arguments.is_multimodal:
        raise UsageError("parity trains language models alone: set task_type to causal_lm, and no multimodal model")
    if arguments.bridge_backend != "mcore-bridge":
        raise UsageError("parity trains what mcore-bridge builds: set bridge_backend to mcore-bridge")
    if arguments.freeze_parameters or arguments.freeze_parameters_regex or arguments.freeze_parameters_ratio:
        raise UsageError("parity trains all weights: take freeze_parameters, its _regex and its _ratio out")


def _read_hugging_face_config(arguments: Any) -> Any:
    """The Hugging Face configuration of the model, as ms-swift reads it.

    Raises:
        UsageError: it has none, or no tokenizer.
    """
    try:
        return arguments.get_model_processor(load_model=False, download_model=False)[1].model_info.config
    except (ValueError, OSError) as error:
        raise UsageError(f"ms-swift reads no model from {arguments.model}: {' '.join(str(error).split())}") from error


def _make_model_config(arguments: Any) -> Any:
    """The configuration of the run's own model, without process groups."""
    make = _import("swift.megatron.model.utils").get_mcore_model_config
    bridge, parallel_state = _import("mcore_bridge.bridge").GPTBridge, _import("megatron.core.parallel_state")
    try:
        with (
            mock.patch.object(bridge, "__init__", lambda *_: None),
            mock.patch.object(parallel_state, "get_expert_model_parallel_world_size", lambda: 1),
        ):
            return make(arguments, _read_hugging_face_config(arguments))
    except (ValueError, AssertionError, TypeError) as error:
        raise UsageError(f"mcore-bridge makes no configuration of its model: {' '.join(str(error).split())}") from error


def _make_batch(sample: dict[str, Any], is_packed: bool) -> dict[str, Any]:
    """A micro-batch of one sequence, as ms-swift's collator makes it: each label stands at its own token."""
    import torch

    labels = torch.where(sample["loss_mask"] > 0, sample["labels"], -100).roll(1)
    labels[0] = -100  # no token predicts the first one
    tensors = {"input_ids": sample["tokens"], "labels": labels, "position_ids": sample["position_ids"]}
    batch: dict[str, Any] = {name: tensor[None] for name, tensor in tensors.items()}
    if not is_packed:
        batch["attention_mask"] = torch.ones(1, 1, LENGTH, LENGTH).tril() < 0.5
    return {**batch, "seq_lens": [LENGTH]}
