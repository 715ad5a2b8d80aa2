"""A sequence of 16 tokens on two context-parallel ranks, of which 7 count on the first and 1 on the second: the weight
of each rank's tokens in the gradient, after the mean over both ranks.
"""

from ...defects.labs.lab import gather, make_config, start

RANKS, TOKENS = 2, (7, 1)
WITHOUT_CUDA = True


def reproduce():
    import torch
    from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss

    start(context_parallel_size=2)
    rank = torch.distributed.get_rank()
    loss_of_a_token = torch.ones((), requires_grad=True)

    def sum_of_losses(output):
        return output.clone(), torch.tensor(TOKENS[rank], dtype=torch.int), {}

    config = make_config(context_parallel_size=2)
    sizes = {"cp_group_size": 2, "is_last_stage": True}
    loss, _ = forward_step_calc_loss(
        None, loss_of_a_token * TOKENS[rank], sum_of_losses, config, None, False, 1, [], **sizes
    )
    loss.backward()
    return [tokens / sum(TOKENS) for tokens in TOKENS], [weight / 2 for weight in gather(float(loss_of_a_token.grad))]
