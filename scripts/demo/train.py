"""Train the demo's model with Megatron's own trainer (0.16.1, whose wheel has none: with a small loop).

Takes Megatron's command line and --corrupt-iterations. `runs.py` starts it through `megatron-mtp-patches`.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import socket
from typing import Any

import torch


def one_process() -> None:
    """The variables torchrun would set, for a single process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    one = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in one.items():
        os.environ.setdefault(name, str(value))


def spare_helper_build() -> None:
    """Megatron's start runs `make`, but a wheel has no Makefile: it ships the dataset helpers compiled."""
    from megatron.core.datasets import utils

    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
        utils.compile_helpers = lambda: None


def train_with_megatron() -> None:
    import task
    from megatron.core.enums import ModelType
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training import arguments, get_args, get_tensorboard_writer, pretrain

    def provide_model(pre_process: bool = True, post_process: bool = True, **rest: Any) -> Any:
        args = get_args()
        config = rest.pop("config", None) or arguments.core_transformer_config_from_args(args)
        placement = {"pre_process": pre_process, "post_process": post_process, **rest}
        placement["transformer_engine"] = args.transformer_impl == "transformer_engine"
        return task.build_model(config, args.padded_vocab_size, args.seq_length, **placement)

    def provide_datasets(sizes: list[int], vp_stage: int | None = None) -> Any:
        args = get_args()
        return task.build_datasets(args, build_tokenizer(args), sizes)

    provide_datasets.is_distributed = True  # type: ignore[attr-defined]  # also on ranks that share a batch

    providers = {
        "train_valid_test_dataset_provider": provide_datasets,
        "model_provider": provide_model,
        "model_type": ModelType.encoder_or_decoder,
        "forward_step_func": task.forward_step,
    }
    if "cfg_container" in inspect.signature(pretrain).parameters:
        # 0.18 and later: arguments are parsed outside and arrive as a container of configs.
        from megatron.training.argument_utils import pretrain_cfg_container_from_args

        args = arguments.parse_and_validate_args(extra_args_provider=task.add_arguments)
        pretrain(pretrain_cfg_container_from_args(args), **providers)
    else:
        pretrain(**providers, extra_args_provider=task.add_arguments)
    # Megatron does not wait for what the validation at the end has written. Only one rank has a writer.
    writer = get_tensorboard_writer()
    if writer is not None:
        writer.close()


if __name__ == "__main__":
    one_process()
    spare_helper_build()
    if importlib.util.find_spec("megatron.training") is not None:
        train_with_megatron()
    else:
        from core_loop import train_with_core

        train_with_core()
    torch.distributed.destroy_process_group()  # which Megatron leaves to the end of the process
