"""The number of tokens by which the cumulative acceptance rate in the log divides, after a step with 2**24 tokens of
which the MTP head predicted none, and 5000 steps with one token that it predicted.
"""


def reproduce():
    import torch
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    rates = {}

    class Writer:
        def add_scalar(self, name, value, iteration):
            rates[name] = float(value) / 100

    for correct, total in [(0, 2**24), *[(1, 1)] * 5000]:
        counts = torch.tensor(correct), torch.tensor(total)
        MTPLossLoggingHelper.save_metrics_to_tracker(torch.tensor(1.0), *counts, layer_number=0, num_layers=1)
        MTPLossLoggingHelper.track_mtp_metrics(1.0, 1, Writer())
    return 2**24 + 5000, round(5000 / rates["mtp_1_cumulative_acceptance_rate"])
