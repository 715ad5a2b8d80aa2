"""A step with a gradient norm of 100 and --grad-norm-skip-threshold 50, on two tensor-parallel ranks of which the first
owns no parameters: both should skip it.
"""

from ...defects.labs.lab import gather, start

RANKS = 2


def reproduce():
    import torch
    from megatron.core import parallel_state
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer

    start(tensor_model_parallel_size=2)
    params = [torch.nn.Parameter(torch.ones(4, 4))] if torch.distributed.get_rank() == 1 else []
    for param in params:
        param.main_grad = torch.full_like(param, 25.0)
        param.tensor_model_parallel = True
    config = OptimizerConfig(optimizer="sgd", lr=0.1, grad_norm_skip_threshold=50.0)
    optimizer = FP32Optimizer(torch.optim.SGD([{"params": params}], lr=0.1), config, lambda *args: None)
    optimizer.grad_stats_parallel_group = parallel_state.get_model_parallel_group()
    updated, _, _ = ChainedOptimizer([optimizer]).step()
    return ["skipped", "skipped"], gather("taken" if updated else "skipped")
