"""An MTP layer gets its padding mask in both forwards of full recomputation."""

import pytest
import torch

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("derive-mtp-labels")]


def test_the_mask_reaches_the_layer_both_times(make_model, batch, gradients, monkeypatch):
    model = make_model(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    layer, seen = model.mtp.layers[0], []
    inner = layer._proj_and_transformer_layer
    if "padding_mask" not in inner.__code__.co_varnames:
        pytest.skip("before 0.18 an MTP layer takes no padding mask")

    def watch(*args, **kwargs):
        seen.append(kwargs["padding_mask"])
        return inner(*args, **kwargs)

    monkeypatch.setattr(layer, "_proj_and_transformer_layer", watch)
    mask = torch.zeros(2, 12, dtype=torch.bool)
    mask[:, 0] = True
    gradients(model, model(**batch, padding_mask=mask))
    rolled = torch.zeros(2, 12, dtype=torch.bool)
    assert len(seen) == 2 and all(torch.equal(one, rolled) for one in seen)
