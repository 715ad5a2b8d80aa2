"""A data set whose items say what the worker that fetches them sees. It needs no patches itself."""

from __future__ import annotations

import dataclasses
import sys

from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch.utils.data import Dataset


class Report(Dataset):
    """Item 0: as the worker finds itself; item 1: after it has imported the patches."""

    def __init__(self, configs: list) -> None:
        self.configs = configs

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict:
        if index:
            import megatron_mtp_patches  # noqa: F401
        try:
            self.refused = ""
            type(self.configs[1])(optimizer="adam", lr=0.1, min_clip_coefficient=0.5)
        except TypeError as error:
            self.refused = str(error)
        return {
            "imported": "megatron_mtp_patches" in sys.modules,
            "step": ChainedOptimizer.step.__module__.partition(".")[0],
            "values": [self.configs[0].separate_mtp_grad_clip, self.configs[1].min_clip_coefficient],
            "fields": [
                name in {field.name for field in dataclasses.fields(config)}
                for name, config in zip(("separate_mtp_grad_clip", "min_clip_coefficient"), self.configs, strict=True)
            ],
            "refused": self.refused,
        }
