"""An MTP layer gets its padding mask in both forwards of full recomputation."""

import pytest
import torch

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("derive-mtp-labels")]


@pytest.mark.parametrize("with_padding", [False, True])
def test_full_recompute_gives_the_gradients_of_no_recompute(make_model, batch, gradients, with_padding):
    padding = {"padding_mask": torch.rand(2, 12) > 0.8} if with_padding else {}
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    plain, again = make_model(), make_model(**recompute)
    expected = gradients(plain, plain(**batch, **padding))
    got = gradients(again, again(**batch, **padding))
    assert set(got) == set(expected)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


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
