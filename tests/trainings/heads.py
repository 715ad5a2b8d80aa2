"""Train a GPT with MTP heads in this process.

Its main model is frozen, or put back after each step of detached heads, or it trains without its heads.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron_mtp_patches.defects.labs.lab import make_optimizer

VOCABULARY, LENGTH, BATCH, MICROBATCHES = 32, 16, 2, 2


class HeadTraining:
    """A model, or its chunks of a virtual pipeline, in DDP with an optimizer.

    Attributes:
        bare: the model chunks without their wrappers.
        losses: the losses of the heads in each step, as they are logged; empty on stages without them.
        norms: the gradient norm of each step.
    """

    def __init__(self, chunks: list[Any], **settings: Any) -> None:
        ddp = {name: settings.pop(name) for name in list(settings) if name in vars(DistributedDataParallelConfig())}
        settings = {"optimizer": "adam", "lr": 1e-2, "clip_grad": 0.0} | settings
        if ddp.get("use_distributed_optimizer"):
            settings["use_distributed_optimizer"] = True
        self.bare = chunks
        config = chunks[0].config
        ddp_config = DistributedDataParallelConfig(**ddp)
        wrapper = FullyShardedDataParallel if ddp_config.use_megatron_fsdp else DistributedDataParallel
        self.model = [wrapper(config, ddp_config, chunk.to(config.params_dtype)) for chunk in chunks]
        config.finalize_model_grads_func = finalize_model_grads
        self.optimizer = make_optimizer(*self.model, **settings)
        self.losses: list[list[float]] = []
        self.norms: list[float] = []

    def heads(self) -> dict[str, torch.Tensor]:
        """The parameters of the heads by name, and the biases of their routers."""
        heads = {name: tensor for name, tensor in self._state().items() if "mtp.layers." in name}
        return {name: tensor for name, tensor in heads.items() if not name.endswith("local_tokens_per_expert")}

    def main_model(self) -> dict[str, torch.Tensor]:
        """The parameters and buffers of the main model by name."""
        return {name: tensor for name, tensor in self._state().items() if "mtp.layers." not in name}

    def _state(self) -> dict[str, torch.Tensor]:
        for chunk in self.model:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)
        return {
            f"{place}.{name}": tensor
            for place, chunk in enumerate(self.model)
            for named in (chunk.named_parameters, chunk.named_buffers)
            for name, tensor in named()
        }

    def put_back(self, before: dict[str, torch.Tensor]) -> None:
        """Give the main model, and the optimizer's fp32 copies of it, the values that `main_model` had."""
        with torch.no_grad():
            for name, tensor in self.main_model().items():
                tensor.copy_(before[name])
                if getattr(tensor, "main_param", None) is not None:
                    tensor.main_param.copy_(before[name])

    def step(self, number: int) -> None:
        """Train on the batch of this number; data-parallel ranks have different ones."""
        MTPLossLoggingHelper.tracker = {}
        for chunk in self.model:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.run_schedule(number)
        updated, norm, _ = self.optimizer.step()
        assert updated
        self.norms.append(norm)
        tracker = MTPLossLoggingHelper.tracker
        if "loss_sums" in tracker or "values" in tracker:
            self.losses.append(tracker.get("loss_sums", tracker.get("values")).tolist())

    def run_schedule(self, number: int, forward_only: bool = False) -> None:
        """Compute the gradients of the batch of this number, or only its losses."""
        run_schedule(self.model, number, forward_only)


def kept_bytes(training: HeadTraining) -> int:
    """The bytes that a forward pass keeps for the backward pass, without parameters."""
    kept: dict[int, int] = {}
    own = {param.untyped_storage().data_ptr() for param in training.bare[0].parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.ones(1, LENGTH, dtype=torch.long)
    mask = torch.ones(1, 1, LENGTH, LENGTH).tril().logical_not()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = training.model[0](tokens, torch.arange(LENGTH).expand(1, -1), mask, labels=tokens)
    assert loss.requires_grad
    return sum(kept.values())


def run_schedule(model: list[Any], number: int, forward_only: bool = False) -> None:
    """Run a schedule of Megatron's on the batch of this number."""
    generator = torch.Generator().manual_seed(1000 * number + parallel_state.get_data_parallel_rank())
    shape = (MICROBATCHES, BATCH, LENGTH + 1)
    tokens = torch.randint(1, VOCABULARY, shape, generator=generator)
    get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=[iter(tokens) for _ in model] if len(model) > 1 else iter(tokens),
        model=model,
        num_microbatches=MICROBATCHES,
        seq_length=LENGTH,
        micro_batch_size=BATCH,
        forward_only=forward_only,
    )


def _forward_step(batches: Any, model: Any) -> Any:
    tokens = next(batches)
    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    mine = torch.arange(LENGTH)
    if size > 1:  # the rank-th chunk from the begin of the sequence, and the one from its end
        chunks = mine.chunk(2 * size)
        mine = torch.cat([chunks[rank], chunks[-1 - rank]])
    mask = torch.ones(1, 1, LENGTH, LENGTH).tril().logical_not()
    loss = model(tokens[:, mine], mine.expand(BATCH, -1), mask, labels=tokens[:, mine + 1])
    return loss, lambda loss: (loss.mean(), {})


def train_frozen(training: HeadTraining, steps: int) -> dict[str, torch.Tensor]:
    """Train; raise AssertionError if a bit of the main model has changed. Return the trained heads."""
    before = copy.deepcopy(training.main_model())
    heads = copy.deepcopy(training.heads())
    for number in range(steps):
        training.step(number)
    after = training.main_model()
    assert before.keys() == after.keys()
    changed = [name for name, tensor in after.items() if not torch.equal(tensor, before[name])]
    assert not changed, changed
    trained = training.heads()
    kept = [name for name, tensor in trained.items() if torch.equal(tensor, heads[name])]
    assert not kept, kept
    return trained


def train_detached(training: HeadTraining, steps: int) -> dict[str, torch.Tensor]:
    """Train with the main model put back after each step. Return the trained heads."""
    before = copy.deepcopy(training.main_model())
    for number in range(steps):
        training.step(number)
        training.put_back(before)
    return training.heads()


def train_disabled(training: HeadTraining, steps: int) -> dict[str, torch.Tensor]:
    """Train; raise AssertionError if a bit of the heads has changed. Return the trained main model."""
    heads, before = (copy.deepcopy(part) for part in (training.heads(), training.main_model()))
    for number in range(steps):
        training.step(number)
    changed = [name for name, tensor in training.heads().items() if not torch.equal(tensor, heads[name])]
    assert not changed and not training.losses, changed
    trained = training.main_model()
    kept = [name for name, tensor in trained.items() if torch.equal(tensor, before[name])]
    assert not [name for name in kept if not name.endswith("local_tokens_per_expert")], kept
    return trained
