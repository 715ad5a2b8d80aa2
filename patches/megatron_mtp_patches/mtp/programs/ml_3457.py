"""One step of a GPT with an MTP head and full activation recomputation."""

from ...defects.labs.lab import compute_gradients, make_config, make_ddp, make_gpt, start

EXPECTED = "gradients"


def reproduce():
    start()
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    config = make_config(mtp_num_layers=1, **recompute)
    compute_gradients(make_ddp(config, make_gpt(config)))
    return EXPECTED, "gradients"
