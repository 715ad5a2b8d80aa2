"""The loss of an MTP head in the log of two steps with --fp16, of which the loss scaler skips the first. The learning
rate is 0, so the loss is the same in both.
"""

from ...defects.labs.lab import compute_gradients, make_config, make_ddp, make_gpt, make_optimizer, start, tokens
from ...defects.labs.trainer_lab import TrainingLog

NEEDS = ("megatron.training",)


def reproduce():
    import torch

    start()
    config = make_config(mtp_num_layers=1, fp16=True, params_dtype=torch.float16)
    model = make_ddp(config, make_gpt(config).half(), grad_reduce_in_fp32=True)
    logits = []
    model.module.output_layer.register_forward_hook(lambda layer, args, output: logits.append(output[0].double()))
    optimizer = make_optimizer(model, fp16=True, lr=0.0, loss_scale=1.0)
    log = TrainingLog("--num-layers 2 --fp16 --mtp-num-layers 1", interval=2)
    for iteration in (1, 2):
        compute_gradients(model)
        if iteration == 1:
            next(model.parameters()).main_grad.view(-1)[0] = torch.inf
        logged = log.add_step(iteration, is_taken=optimizer.step()[0])
    ids, _ = tokens()
    head_logits, _, _, _ = logits  # then that of the main model, and the second step
    loss = torch.nn.functional.cross_entropy(head_logits[:-1, 0], ids[0].roll(-2)[:-1])
    return float(loss), logged["mtp_1 loss"]
