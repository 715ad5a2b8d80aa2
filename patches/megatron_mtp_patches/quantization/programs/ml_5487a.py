"""The step after a save of a GPT whose parameters are gathered through the buffer of its gradients: their norm, where
the loss is 0. Weights in bf16 stand for those in MXFP8.
"""

from ...defects.labs.lab import norm, tokens
from ...defects.labs.mxfp8_lab import gather_for_save, take_first_step


def reproduce():
    model, optimizer = take_first_step(gathers_late=True)
    gather_for_save(model, optimizer)
    model.zero_grad_buffer()
    optimizer.chained_optimizers[0]._copy_main_params_to_param_buffer()  # as Megatron's trainer does in each step
    ids, positions = tokens()
    (0.0 * model(ids, positions, None, labels=ids).sum()).backward()
    model.finish_grad_sync()
    return 0.0, norm(*(param.main_grad for param in model.parameters()))
