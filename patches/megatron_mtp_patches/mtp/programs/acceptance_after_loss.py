"""The acceptance rate of an MTP head in the log, with the fused cross entropy of TransformerEngine."""

from ...defects.labs.lab import compute_gradients, make_config, make_ddp, make_gpt, start, tokens

NEEDS = ("transformer-engine",)


def reproduce():
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    start()
    config = make_config(mtp_num_layers=1, cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te")
    model = make_ddp(config, make_gpt(config))
    predicted, logged = [], {}
    model.module.output_layer.register_forward_hook(lambda layer, args, output: predicted.append(output[0].argmax(-1)))
    compute_gradients(model)

    class Writer:
        def add_scalar(self, name, value, iteration):
            logged[name] = float(value)

    MTPLossLoggingHelper.track_mtp_metrics(1.0, 1, Writer())
    ids, _ = tokens()
    head_tokens, _ = predicted  # then those of the main model
    accepted = head_tokens[:-1, 0] == ids[0].roll(-2)[:-1]
    return 100 * float(accepted.double().mean()), logged["mtp_1_acceptance_rate"]
