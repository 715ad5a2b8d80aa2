"""What verl's PPO trainer does between its workers, in the test's process."""

import numpy as np
import torch
from verl.trainer.ppo.core_algos import compute_gae_advantage_return, compute_grpo_outcome_advantage
from verl.utils import tensordict_utils
from verl.workers.utils.padding import no_padding_2_padding


def log_probs(worker, batch):
    """The log probabilities of the responses, [4, longest response], as verl's trainer asks for them."""
    data = batch.clone()
    tensordict_utils.assign_non_tensor(data, compute_loss=False)
    return no_padding_2_padding(worker.infer_batch(data)["log_probs"], batch).float()


def gae(rewards, mask):
    """verl's advantages of PPO, with random values in place of a critic's."""
    values = torch.randn(mask.shape, generator=torch.Generator().manual_seed(1))
    return compute_gae_advantage_return(rewards, values, mask, gamma=1.0, lam=0.95)[0]


def grpo(rewards, mask):
    """verl's advantages of GRPO, with two responses to each of two prompts."""
    return compute_grpo_outcome_advantage(rewards, mask, index=np.array(["a", "a", "b", "b"]))[0]


def update(worker, batch, estimate=grpo):
    """Add to the batch what verl's trainer adds before an update; return verl's metrics of the update."""
    mask = batch["response_mask"]
    rewards = torch.zeros(mask.shape)
    rewards[torch.arange(4), mask.sum(1) - 1] = torch.tensor([1.0, 0.0, 0.0, 1.0])
    batch["advantages"] = estimate(rewards, mask.float())
    batch["old_log_probs"] = batch["ref_log_prob"] = log_probs(worker, batch)
    return tensordict_utils.get(worker.train_mini_batch(batch), "metrics")


def model_of(worker):
    """Megatron's model, below the wrappers of data parallelism and bf16."""
    return worker.engine.module[0].module.module


def parameters(worker):
    """Copies of the parameters by name."""
    return {name: param.detach().clone() for name, param in model_of(worker).named_parameters()}


def changed(worker, before):
    """The parts of the model of which a parameter has changed: "decoder", "embedding", "mtp", "output_layer"."""
    after = parameters(worker)
    return {name.partition(".")[0] for name in before if not torch.equal(after[name], before[name])}


def gradients(worker, batch):
    """The gradients of an update by name; nothing is updated."""
    kept = {}

    def keep():
        kept.update({name: param.main_grad.clone() for name, param in model_of(worker).named_parameters()})

    worker.engine.optimizer_step = keep
    update(worker, batch)
    return kept
