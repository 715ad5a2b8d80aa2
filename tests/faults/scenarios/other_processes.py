"""Workers that are forked and spawned, and configurations with added fields that travel to them."""

from __future__ import annotations

import copy
import dataclasses
import pickle

from dataset import Report
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig
from torch.utils.data import DataLoader

TRANSFORMER = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "separate_mtp_grad_clip": True}


def look() -> dict:
    configs = [TransformerConfig(**TRANSFORMER), OptimizerConfig(optimizer="adam", lr=0.1, min_clip_coefficient=0.5)]
    copies = {
        "pickle": pickle.loads(pickle.dumps(configs)),
        "deepcopy": copy.deepcopy(configs),
        "replace": [dataclasses.replace(config) for config in configs],
    }
    return {
        "copies": {
            way: [settings(config) == settings(copied) for config, copied in zip(configs, others, strict=True)]
            for way, others in copies.items()
        },
        "settings": [len(settings(config)) for config in configs],
        **{way: ask(configs, way) for way in ("fork", "spawn")},
    }


def settings(config) -> dict:
    """The fields of a plain type; initialisers and such are functions, which no copy equals."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {name: value for name, value in values.items() if isinstance(value, bool | int | float | str)}


def ask(configs: list, way: str) -> list[dict]:
    loader = DataLoader(Report(configs), batch_size=None, num_workers=1, multiprocessing_context=way, timeout=200)
    return list(loader)
