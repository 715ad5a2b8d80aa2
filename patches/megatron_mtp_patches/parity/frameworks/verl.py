"""A run of verl, by its composed configuration: verl's own worker and engine train it, by verl's loss of SFT."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from types import SimpleNamespace
from typing import Any

from megatron_overrides.model_places import Placement

from ...engine import UsageError
from ..flags import Flag, split
from ..left_out import NEEDS_GPU, OWN_DATA, reason_to_leave_out
from ..samples import plain_samples
from ..small import BATCH, VOCABULARY, SmallRun, small_values
from ..study import MissingPackageError
from .fields import FIELDS, field_values, plain_settings, read_flags, read_settings, refuse_other_models

STEPS = 2
_CLASSES = ("McoreEngineConfig", "McoreOptimizerConfig", "HFModelConfig")
_MODEL, _DDP, _OPTIMIZER = "override_transformer_config", "override_ddp_config", "override_optimizer_config"
# What the engine of a small run has, with the reason for which it leaves out other values.
_ENGINE = {
    "param_offload": (False, NEEDS_GPU),
    "optimizer_offload": (False, NEEDS_GPU),
    "grad_offload": (False, NEEDS_GPU),
    "dynamic_context_parallel": (False, OWN_DATA),
    "pad_to_length": (False, OWN_DATA),
    "use_dist_checkpointing": (False, OWN_DATA),
    "dist_checkpointing_path": (None, OWN_DATA),
}


_VOCABULARY = {"vocab_size": VOCABULARY, "make_vocab_size_divisible_by": 8}


@dataclass(frozen=True)
class VerlRun:
    """The training of an actor, or of the SFT trainer.

    Attributes:
        content: the whole configuration, and under `role` the one that this run is: actor, critic or sft.
    """

    content: dict[str, Any]
    trainer = "verl's TrainingWorker with its loss of SFT"
    not_covered = "losses of RL, rollouts, the critic and the reference model"
    carriers = ()

    def import_trainer(self) -> None:
        """Import verl and Megatron-Bridge, so that the ranks need not.

        Raises:
            MissingPackageError: one does not import.
        """
        for name in ("verl.workers.engine_workers", "verl.workers.engine.megatron.transformer_impl"):
            _import(name)
        _import("megatron.bridge")

    def shrink(self, dtype: str) -> SmallRun:
        """Make the run small. `dtype` is "fp32" or "bf16".

        Raises:
            UsageError: its model is none that parity trains, or the configuration is incomplete.
        """
        engine, optimizer, model = self._read()
        self._refuse(engine, model)
        sections = self._sections(engine, optimizer, model)
        left_out: dict[str, list[Flag]] = {}
        for reason, flag in self._leave_out(engine, optimizer, dtype):
            left_out.setdefault(reason, []).append(flag)
        changed = small_values(read_settings(sections))
        if dtype == "bf16":
            changed.append(Flag("--bf16"))
        return SmallRun([*read_flags(sections, dtype), *changed], left_out, changed, read_settings(sections), dtype)

    def train(self, job: Any, record: Any, state: Placement) -> None:
        """Train as this rank, with the flags of the job, and leave its numbers in `record`."""
        import torch

        from ..training import record_updates

        worker = self._make_worker(split(job.flags))
        engine = worker.engine
        refuse_other_models(engine.module)
        ddp = getattr(engine.module[0], "ddp_config", SimpleNamespace())
        record.arguments = plain_settings([engine.tf_config, engine.optimizer.config, ddp])
        record_updates(engine.module, engine.optimizer, record, state)
        update = engine.optimizer_step

        def update_and_record() -> Any:
            norm = update()
            record.norms.append(float(norm))
            return norm

        engine.optimizer_step = update_and_record
        rank, replicas = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
        samples = plain_samples(STEPS * BATCH, job.data)
        for step in range(STEPS):
            mine = [samples[step * BATCH + number] for number in range(rank, BATCH, replicas)]
            output = worker.train_batch(_make_batch(mine))
            metrics = {} if output is None else output.get("metrics")
            metrics = getattr(metrics, "data", metrics)
            record.losses.append(
                {name: [value] for name, value in metrics.items() if "loss" in name and isinstance(value, float)}
            )
            record.lines.append({})
        torch.distributed.barrier()

    def _read(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """The sections of the engine, the optimizer and the model, with their references resolved.

        Raises:
            UsageError: one is missing, or refers to nothing.
        """
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        role = self.content["role"]
        if role == "critic":
            raise UsageError(f"parity does not train the {role} of verl")
        whole = OmegaConf.create({name: value for name, value in self.content.items() if name != "role"})
        try:
            if role == "sft":
                parts = (whole.engine, whole.optim, whole.model)
            else:
                actor = whole.actor_rollout_ref.actor
                parts = (actor.megatron, actor.optim, whole.actor_rollout_ref.model)
            engine, optimizer, model = (OmegaConf.to_container(part, resolve=True) for part in parts)
        except (OmegaConfBaseException, ValueError) as error:
            raise UsageError(f"the configuration is not whole: {' '.join(str(error).split())}") from error
        return engine, optimizer, model

    def _refuse(self, engine: dict[str, Any], model: dict[str, Any]) -> None:
        adapters = model.get("lora_rank") or (model.get("lora") or {}).get("rank")
        if adapters:
            raise UsageError("the run trains adapters (`lora`), and parity compares whole models: set their rank to 0")
        if engine.get("vanilla_mbridge"):
            raise UsageError("parity trains what Megatron-Bridge builds: set megatron.vanilla_mbridge to false")
        if (engine.get("qat") or {}).get("enable"):
            raise UsageError("parity does not train quantized weights: set megatron.qat.enable to false")

    def _sections(self, engine: dict[str, Any], optimizer: dict[str, Any], model: dict[str, Any]) -> list[Any]:
        """The settings of the run as objects, those that win first; last the provider of its model."""
        from megatron.core.transformer.enums import AttnBackend

        model_settings = engine.get(_MODEL) or {}
        backend = AttnBackend[model_settings.get("attention_backend") or "flash"]  # verl's own default
        others = (model_settings, engine.get(_DDP) or {}, optimizer.get(_OPTIMIZER) or {}, engine, optimizer)
        sections = [SimpleNamespace(**section) for section in ({"attention_backend": backend}, *others)]
        return [*sections, self._make_provider(str(model.get("path")))]

    def _make_provider(self, path: str) -> Any:
        try:
            return (
                _import("megatron.bridge").AutoBridge.from_hf_pretrained(path).to_megatron_provider(load_weights=False)
            )
        except Exception as error:
            why = " ".join(str(error).split())
            raise UsageError(f"Megatron-Bridge reads no model from model.path, {path}: {why}") from error

    def _leave_out(self, engine: dict[str, Any], optimizer: dict[str, Any], dtype: str) -> Iterator[tuple[str, Flag]]:
        """Take out what a small run leaves out. Yield the reason and the setting of each."""
        for name, (value, reason) in _ENGINE.items():
            current = engine.pop(name, None)
            if current and current != value:
                yield reason, Flag(name, (str(current),))
        if ((engine.pop("router_replay", None) or {}).get("mode") or "disabled") != "disabled":
            yield OWN_DATA, Flag("router_replay")
        for section in (engine.get(_MODEL) or {}, engine.get(_DDP) or {}, optimizer.get(_OPTIMIZER) or {}):
            for name in list(section):
                if reason := reason_to_leave_out(name.replace("_", "-"), dtype):
                    value = section.pop(name)
                    if value:
                        yield reason, Flag(name, (str(value),))

    def _make_worker(self, flags: list[Flag]) -> Any:
        """verl's worker with the engine of the small run, with the flags of a cut."""
        config, workers = _import("verl.workers.config"), _import("verl.workers.engine_workers")
        make = _import("verl.utils.config").omega_conf_to_dataclass
        engine, optimizer, model = (
            make({"_target_": f"verl.workers.config.{name}", **section})
            for name, section in zip(_CLASSES, self._configure(flags), strict=True)
        )
        if Flag("--bf16") not in flags:
            object.__setattr__(engine, "dtype", "float32")  # which verl's engine knows and its check refuses
        model.tokenizer = SimpleNamespace(pad_token_id=0)
        _import("verl.workers.engine.megatron.transformer_impl").load_mcore_dist_weights = lambda *_, **__: None
        worker = workers.TrainingWorker(
            config.TrainingWorkerConfig(
                model_type="language_model",
                model_config=model,
                engine_config=engine,
                optimizer_config=optimizer,
                checkpoint_config=config.McoreCheckpointConfig(),
            )
        )
        worker.reset()
        worker.set_loss_fn(partial(_import("verl.workers.utils.losses").sft_loss, None))
        return worker

    def _configure(self, flags: list[Flag]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """The sections of the engine, the optimizer and the model of the small run, with the flags of a cut."""
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig

        config = _import("verl.workers.config")
        engine, optimizer, model = self._read()
        list(self._leave_out(engine, optimizer, "bf16" if Flag("--bf16") in flags else "fp32"))
        provider = self._make_provider(str(model["path"]))
        model_overrides, ddp_overrides, optimizer_overrides = (
            dict(section.get(name) or {})
            for section, name in ((engine, _MODEL), (engine, _DDP), (optimizer, _OPTIMIZER))
        )
        # Where a field is set: in the first of these whose names have it.
        places = (
            (_names(config.McoreEngineConfig), engine),
            (_names(config.McoreOptimizerConfig), optimizer),
            (_names(type(provider)), model_overrides),
            (_names(OptimizerConfig), optimizer_overrides),
            (_names(DistributedDataParallelConfig), ddp_overrides),
        )
        absent = {field.name: field.absent for field in FIELDS.values()}
        for name, value in {**absent, **field_values(flags), **_VOCABULARY}.items():
            for section in (model_overrides, ddp_overrides, optimizer_overrides):
                section.pop(name, None)
            section = next((section for names, section in places if name in names), {})
            section[name] = value
            if section is model_overrides and name in _names(DistributedDataParallelConfig):
                ddp_overrides[name] = value
        engine |= {
            _MODEL: model_overrides,
            _DDP: ddp_overrides,
            "use_dynamic_bsz": False,
            "micro_batch_size_per_gpu": 1,
        }
        engine |= {"dtype": "bfloat16", "use_dist_checkpointing": True}  # from which nothing is loaded
        optimizer |= {_OPTIMIZER: optimizer_overrides, "lr_decay_style": "constant", "lr_warmup_steps": 0}
        optimizer |= {"lr_warmup_steps_ratio": 0.0, "total_training_steps": 1000}
        model |= {"load_tokenizer": False, "use_fused_kernels": False}
        return engine, optimizer, model


def _names(configuration: type) -> set[str]:
    return {field.name for field in fields(configuration)}


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingPackageError(
            f"verl and Megatron-Bridge build this run, and {name} does not import: {error}; install them as "
            f"docs/verl.md says"
        ) from error


def _make_batch(samples: list[dict[str, Any]]) -> Any:
    """The batch of a data-parallel rank, as verl's trainer of SFT makes it: without padding."""
    import torch
    from verl.utils import tensordict_utils
    from verl.utils.dataset.dataset_utils import DatasetPadMode

    def nest(name: str) -> torch.Tensor:
        return torch.nested.as_nested_tensor([sample[name] for sample in samples], layout=torch.jagged)

    for sample in samples:
        sample["loss_mask"][0] = 0  # no token predicts the first one
    tensors = {"input_ids": nest("tokens"), "position_ids": nest("position_ids"), "loss_mask": nest("loss_mask")}
    others = {"temperature": 1.0, "pad_mode": DatasetPadMode.NO_PADDING, "global_batch_size": BATCH}
    return tensordict_utils.get_tensordict(tensors, others)
