"""A run of Megatron-Bridge, by its run_config.yaml: Bridge's own `pretrain` trains what its provider builds."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from megatron_overrides.model_places import Placement

from ...engine import UsageError
from ..flags import Flag, split
from ..left_out import CHANGES_NOTHING, NEEDS_GPU, OWN_DATA, OWN_LENGTH
from ..samples import plain_samples
from ..small import BATCH, LENGTH, VOCABULARY, SmallRun, small_values
from ..study import MissingPackageError
from .fields import (
    leave_out,
    plain_settings,
    read_flags,
    read_settings,
    refuse_other_models,
    refuse_unknown,
    set_absent,
    set_flags,
)

# Sections of which the small run has its own, or none.
_LEFT_OUT = {
    "dataset": OWN_DATA,
    "tokenizer": OWN_DATA,
    "checkpoint": OWN_DATA,
    "train": OWN_LENGTH,
    "scheduler": OWN_LENGTH,
    "comm_overlap": NEEDS_GPU,
    "inprocess_restart": CHANGES_NOTHING,
    "ft": CHANGES_NOTHING,
    "tensor_inspect": CHANGES_NOTHING,
}
_READ = ("model", "optimizer", "ddp", "dist")
# What a run has left in the configuration that it saved, and what fills weights.
_LEFT_BY_THE_RUN = {
    "finalize_model_grads_func",
    "grad_scale_func",
    "mtp_grad_scale_func",
    "no_sync_func",
    "grad_sync_func",
    "param_sync_func",
    "timers",
    "init_method",
    "output_layer_init_method",
    "embedding_init_method",
}


@dataclass(frozen=True)
class BridgeRun:
    """A run of Megatron-Bridge.

    Attributes:
        content: what is in its run_config.yaml.
    """

    content: dict[str, Any]
    trainer = "Megatron-Bridge's pretrain"
    not_covered = "data and packed sequences, and a forward step other than gpt_step's"
    carriers = ()

    def import_trainer(self) -> None:
        """Import Bridge, so that the ranks need not.

        Raises:
            MissingPackageError: it does not import.
        """
        for name in ("pretrain", "gpt_step", "config"):
            _import(f"training.{name}")

    def shrink(self, dtype: str) -> SmallRun:
        """Make the run small. `dtype` is "fp32" or "bf16".

        Raises:
            UsageError: its model is none that parity trains, or the installed Bridge has other settings.
        """
        if self.content.get("peft"):
            raise UsageError("the run trains adapters (`peft`), and parity compares whole models: take the section out")
        sections = self._instantiate()
        settings, kept = read_settings(sections), read_flags(sections, dtype)
        left_out: dict[str, list[Flag]] = {}
        for name, reason in _LEFT_OUT.items():
            if self.content.get(name):
                left_out.setdefault(reason, []).append(Flag(name))
        for title, section in zip(_READ, sections, strict=True):
            for reason, flag in leave_out(title, section, dtype):
                left_out.setdefault(reason, []).append(flag)
        changed = small_values(settings)
        if dtype == "bf16":
            changed.append(Flag("--bf16"))
        return SmallRun([*kept, *changed], left_out, changed, settings, dtype)

    def train(self, job: Any, record: Any, state: Placement) -> None:
        """Train as this rank, with the flags of the job, and leave its numbers in `record`."""
        from ..training import record_log, record_updates

        trainer, loop = _import("training.pretrain"), _import("training.train")
        record_log(loop, _import("training.utils.train_utils"), record)
        container = self._configure(job.flags)
        trainer.get_dataset_provider = lambda _: lambda numbers, _: (plain_samples(numbers[0], job.data), None, None)
        set_up = trainer.setup

        def set_up_and_record(*values: Any, **named: Any) -> Any:
            result = set_up(*values, **named)
            refuse_other_models(result.model)
            sections = [container.model, container.optimizer, container.ddp, container.dist, container.train]
            record.arguments = plain_settings(sections)
            record_updates(result.model, result.optimizer, record, state)
            return result

        trainer.setup = set_up_and_record
        trainer.pretrain(container, _import("training.gpt_step").forward_step)

    def _instantiate(self) -> list[Any]:
        """The objects of the sections that are read, with the settings of the run's mixed precision.

        Raises:
            UsageError: one cannot be made.
        """
        sections = [self._make(title) for title in _READ]
        if chosen := self.content.get("mixed_precision"):
            precision = _import("training.mixed_precision")
            if isinstance(chosen, str):
                mixed = precision.get_mixed_precision_config(chosen)
            else:
                mixed = _import("utils.instantiate_utils").instantiate(chosen)
            mixed.finalize()
            mixed.setup(*sections[:3])
        return sections

    def _make(self, title: str) -> Any:
        config, section = _import("training.config"), self.content.get(title) or {}
        section = {name: value for name, value in section.items() if name not in _LEFT_BY_THE_RUN}
        own = {
            "optimizer": config.OptimizerConfig,
            "ddp": config.DistributedDataParallelConfig,
            "dist": config.DistributedInitConfig,
        }
        try:
            if title in own and "_target_" not in section:
                section = {"_target_": f"{own[title].__module__}.{own[title].__qualname__}", **section}
            instance = _import("utils.instantiate_utils").instantiate(section)
        except Exception as error:
            raise UsageError(f"Bridge makes no object of `{title}`: {' '.join(str(error).split())}") from error
        if not hasattr(instance, "provide" if title == "model" else "__dataclass_fields__"):
            raise UsageError(f"`{title}` is no provider of Megatron-Bridge: it has no _target_ that is one")
        refuse_unknown(title, section, instance)
        return instance

    def _configure(self, words: tuple[str, ...]) -> Any:
        """The container of the small run, with the flags of a cut."""
        import torch

        config, flags, sections = _import("training.config"), split(words), self._instantiate()
        dtype = "bf16" if Flag("--bf16") in flags else "fp32"
        for title, section in zip(_READ, sections, strict=True):
            list(leave_out(title, section, dtype))
        set_absent(sections)
        set_flags(sections, flags)
        model, optimizer, ddp, dist = sections
        model.seq_length, model.vocab_size, model.make_vocab_size_divisible_by = LENGTH, VOCABULARY, 8
        model.params_dtype = model.pipeline_dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
        model.enable_autocast = False
        if pattern := getattr(model, "hybrid_layer_pattern", None):
            model.num_layers = len(pattern.partition("/")[0])
        if model.virtual_pipeline_model_parallel_size:  # whose two stages would mix up messages in one batch
            model.overlap_p2p_comm, model.batch_p2p_comm = True, False
        decay = {"start_weight_decay": optimizer.weight_decay, "end_weight_decay": optimizer.weight_decay}
        return config.ConfigContainer(
            model=model,
            optimizer=optimizer,
            ddp=ddp,
            dist=dist,
            train=config.TrainingConfig(train_iters=2, global_batch_size=BATCH, micro_batch_size=1),
            validation=config.ValidationConfig(eval_interval=1000, eval_iters=0),
            scheduler=config.SchedulerConfig(
                lr_decay_style="constant", lr_warmup_iters=0, lr_decay_iters=1000, **decay
            ),
            dataset=config.GPTDatasetConfig(
                blend=None,
                blend_per_split=None,
                split="100,0,0",
                seq_length=LENGTH,
                eod_mask_loss=False,
                reset_attention_mask=False,
                reset_position_ids=False,
                dataloader_type="single",
                num_workers=0,
                persistent_workers=False,
                random_seed=1,
            ),
            logger=config.LoggerConfig(log_interval=1),
            tokenizer=config.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCABULARY - 1),
            checkpoint=config.CheckpointConfig(save=None, load=None),
            rng=config.RNGConfig(seed=1),
        )


def _import(name: str) -> Any:
    try:
        return importlib.import_module(f"megatron.bridge.{name}")
    except ImportError as error:
        raise MissingPackageError(
            f"Megatron-Bridge builds this run, and does not import: {error}; install it as docs/megatron-bridge.md says"
        ) from error
