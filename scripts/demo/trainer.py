"""A small GPT with MTP heads and its training by Megatron's own trainer; `runs.py` trains in forks of one process."""

from __future__ import annotations

import inspect
import os
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from scripts.common.megatron_trainer import spare_helper_build
from scripts.common.process import free_port, rank_variables
from scripts.demo import dataset
from scripts.tiny_gpt import build_gpt


def loss_function(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss summed over the tokens, their number, and what the training log averages."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(losses.view(-1).float() * mask)
    n_tokens = mask.sum().to(torch.int)
    return loss, n_tokens, {"lm loss": torch.stack([loss.detach(), n_tokens.to(loss.dtype)])}


def forward_step(data_iterator: Any, model: torch.nn.Module) -> tuple[Tensor, Any]:
    batch = next(data_iterator)
    tokens, labels, loss_mask, position_ids = (
        batch[key].cuda(non_blocking=True) for key in ("tokens", "labels", "loss_mask", "position_ids")
    )
    losses = model(tokens, position_ids, None, labels=labels, loss_mask=loss_mask)
    return losses, partial(loss_function, loss_mask)


def be_one_process() -> None:
    """Set the variables that torchrun would set for a single process, unless it has set them."""
    for name, value in rank_variables(0, 1, free_port()).items():
        os.environ.setdefault(name, value)


def train() -> GPTModel:
    """Train as the flags in sys.argv say; return the model."""
    from megatron.core.enums import ModelType
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training import arguments, get_args, get_tensorboard_writer, pretrain

    def provide_model(pre_process: bool = True, post_process: bool = True, **rest: Any) -> Any:
        args = get_args()
        config = rest.pop("config", None) or arguments.core_transformer_config_from_args(args)
        placement = {"pre_process": pre_process, "post_process": post_process, **rest}
        placement["transformer_engine"] = args.transformer_impl == "transformer_engine"
        placement["tied"] = not args.untie_embeddings_and_output_weights
        models.append(build_gpt(config, args.padded_vocab_size, args.seq_length, **placement))
        return models[-1]

    def provide_datasets(sizes: list[int | None], vp_stage: int | None = None) -> Any:
        args = get_args()
        return dataset.build(args, build_tokenizer(args), sizes)

    provide_datasets.is_distributed = True  # type: ignore[attr-defined]  # also on ranks that share a batch

    models: list[GPTModel] = []
    be_one_process()
    spare_helper_build()
    providers = {
        "train_valid_test_dataset_provider": provide_datasets,
        "model_provider": provide_model,
        "model_type": ModelType.encoder_or_decoder,
        "forward_step_func": forward_step,
    }
    if "cfg_container" in inspect.signature(pretrain).parameters:
        # 0.18 and later: arguments are parsed outside and arrive as a container of configs.
        from megatron.training.argument_utils import pretrain_cfg_container_from_args

        args = arguments.parse_and_validate_args(extra_args_provider=dataset.add_arguments)
        pretrain(pretrain_cfg_container_from_args(args), **providers)
    else:
        pretrain(**providers, extra_args_provider=dataset.add_arguments)
    # Megatron does not wait for what the validation at the end has written. Only one rank has a writer.
    writer = get_tensorboard_writer()
    if writer is not None:
        writer.close()
    return models[-1]


def main() -> None:
    train()
    torch.distributed.destroy_process_group()  # which Megatron leaves to the end of the process
