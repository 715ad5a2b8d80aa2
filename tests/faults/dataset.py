"""A data set whose items say what the worker that fetches them sees. It needs no patches itself."""

from __future__ import annotations

import dataclasses
import sys

from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch.utils.data import Dataset


class Report(Dataset):
    """Item 0: as the worker finds itself; item 1: after it has imported the patches."""

    def __init__(self, transformer_config, optimizer_config) -> None:
        self.configs = transformer_config, optimizer_config

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict:
        if index:
            import megatron_mtp_patches  # noqa: F401
        transformer_config, optimizer_config = self.configs
        try:
            refused = ""
            type(optimizer_config)(optimizer="adam", lr=0.1, min_clip_coefficient=0.5)
        except TypeError as error:
            refused = str(error)
        return {
            "imported": "megatron_mtp_patches" in sys.modules,
            "step": ChainedOptimizer.step.__module__.partition(".")[0],
            "values": [transformer_config.separate_mtp_grad_clip, optimizer_config.min_clip_coefficient],
            "fields": [
                "separate_mtp_grad_clip" in {field.name for field in dataclasses.fields(transformer_config)},
                "min_clip_coefficient" in {field.name for field in dataclasses.fields(optimizer_config)},
            ],
            "refused": refused,
        }
