"""A run of ms-swift, by its arguments: ms-swift's own trainer trains what mcore-bridge builds."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from megatron_overrides.model_places import Placement

from ...engine import UsageError
from ..flags import Flag, split
from ..samples import plain_samples
from ..small import BATCH, LENGTH, SmallRun, small_values
from .fields import plain_settings, read_flags, read_settings, refuse_other_models, refuse_unknown
from .ms_swift_arguments import (
    STEPS,
    changed_arguments,
    configure,
    import_package,
    make_model_config,
    read_arguments,
    read_hugging_face_config,
    why_left_out,
)


@dataclass(frozen=True)
class SwiftRun:
    """A full-parameter training of ms-swift.

    Attributes:
        content: its arguments, by name.
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
        _forward_of_mcore_bridge()

    def shrink(self, dtype: str) -> SmallRun:
        """Make the run small. `dtype` is "fp32" or "bf16".

        Raises:
            UsageError: its model is none that parity trains, or ms-swift does not take its arguments.
        """
        arguments = read_arguments(self.content)
        refuse_unknown("", self.content, arguments)
        _refuse(arguments)
        config = make_model_config(arguments)
        shares_embeddings = SimpleNamespace(
            share_embeddings_and_output_weights=not config.untie_embeddings_and_output_weights
        )
        sections = [shares_embeddings, config, arguments]
        left_out: dict[str, list[Flag]] = {}
        for name, value in changed_arguments(self.content).items():
            if reason := why_left_out(name, dtype):
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

        if forward := _forward_of_mcore_bridge():
            _find_heads().forward = forward
        trainers = import_package("swift.megatron.trainers")
        import_package("mcore_bridge.bridge").GPTBridge.load_weights = lambda *_, **__: None
        with tempfile.TemporaryDirectory() as folder:
            arguments = configure(self.content, split(job.flags), folder)
            template = SimpleNamespace(
                config=read_hugging_face_config(arguments),
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


def _find_heads() -> Any:
    return import_package("megatron.core.transformer.multi_token_prediction").MultiTokenPredictionBlock


@functools.cache
def _forward_of_mcore_bridge() -> Any:
    """Import ms-swift and mcore-bridge. Return the forward that mcore-bridge gives Megatron's block of heads, if any.

    The block keeps its own until the run begins, so that patches come before mcore-bridge, as they do in a run.
    """
    heads = _find_heads()
    forward = heads.forward
    for name in ("arguments", "model", "trainers"):
        import_package(f"swift.megatron.{name}")
    replacement, heads.forward = heads.forward, forward
    return None if replacement is forward else replacement


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
