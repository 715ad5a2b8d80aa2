"""Packed samples in parts on two context-parallel ranks give the gradients that whole samples on each rank give."""

import pytest
from megatron.core import parallel_state

from .ppo import model_of

pytestmark = [pytest.mark.forked("verl"), pytest.mark.ranks(2)]


def gradients(worker, batch):
    """The gradients of an update by name, summed over the ranks; nothing is updated."""
    sums = {}

    def keep():
        sums.update({name: param.main_grad.clone() for name, param in model_of(worker).named_parameters()})

    worker.engine.optimizer_step = keep
    batch["advantages"] = batch["old_log_probs"] = batch["ref_log_prob"] = batch["response_mask"].float()
    worker.train_mini_batch(batch)
    return sums


@pytest.mark.parametrize("kind", ["cross_entropy", "tv"])
def test_heads_and_main_model_have_the_gradients_of_whole_samples(make_worker, make_batch, kind):
    settings, alone = {"mtp_detach_heads": True, "mtp_loss_type": kind}, {"use_distributed_optimizer": False}
    parallel_state.destroy_model_parallel()  # that of another test
    whole = gradients(make_worker(settings, **alone), make_batch(mini_batch_size=8))  # four on each rank, the same ones
    parallel_state.destroy_model_parallel()
    parts = gradients(make_worker(settings, context_parallel_size=2, **alone), make_batch())
    reached = [name for name in whole if whole[name].any()]
    assert {name.partition(".")[0] for name in reached} == {"decoder", "embedding", "mtp", "output_layer"}
    for name in reached:
        assert (parts[name] - whole[name]).norm() < 0.1 * whole[name].norm(), name  # bf16; an expert has few tokens
