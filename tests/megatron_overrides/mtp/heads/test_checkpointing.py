"""Full recomputation of MTP layers in fp8 and with packed sequences gives the gradients of no recomputation.

The kernels are those of fp32: what is tested is which tensors are saved, over which group, and what is recomputed.
"""

import copy
import inspect
from contextlib import contextmanager

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import multi_token_prediction as mtp
from megatron_mtp_patches import rehearsal

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("recompute-quantized-mtp-heads")]

RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.fixture
def saved(monkeypatch):
    """The (distributed, tensor-parallel group, in fp8) of each call of TransformerEngine's checkpoint.

    Where TransformerEngine is not installed, torch's stands for it: that, too, gives keywords no gradient.
    """
    from megatron.core.extensions import transformer_engine

    calls, in_fp8 = [], []

    @contextmanager
    def fp8_context(config, *args, **kwargs):
        in_fp8.append(config.fp8_recipe)
        yield
        in_fp8.pop()

    checkpoint = transformer_engine.te_checkpoint if rehearsal.with_transformer_engine() else _checkpoint

    def record(function, distribute, tracker, group, *args, **kwargs):
        calls.append((distribute, group, bool(in_fp8)))
        return checkpoint(function, distribute, tracker, group, *args, **kwargs)

    monkeypatch.setattr(transformer_engine, "te_checkpoint", record)
    monkeypatch.setattr(mtp, "get_fp8_context", fp8_context)
    return calls


def _checkpoint(function, distribute, tracker, group, *args, **kwargs):
    return torch.utils.checkpoint.checkpoint(lambda *tensors: function(*tensors, **kwargs), *args, use_reentrant=True)


def quantize(model, group=None, **settings):
    """Let the MTP layers, and nothing inside them, take themselves for layers in fp8."""
    for layer in model.mtp.layers:
        layer.config = copy.copy(layer.config)
        for name, value in {"fp8": "hybrid", "fp8_recipe": "delayed", **settings}.items():
            setattr(layer.config, name, value)
        if group is not None:
            layer.tp_group = group
    return model


@pytest.mark.parametrize("precision", [{}, {"fp8_recipe": "mxfp8"}, {"fp8": None, "fp4": "e2m1"}])
@pytest.mark.parametrize("with_padding", [False, True])
def test_heads_get_the_gradients_of_no_recompute(make_model, batch, gradients, saved, precision, with_padding):
    if with_padding:
        batch["padding_mask"] = torch.rand(2, 12) > 0.8
    plain, again = make_model(), quantize(make_model(**RECOMPUTE), **precision)
    expected = gradients(plain, plain(**batch))
    got = gradients(again, again(**batch))
    assert set(got) == set(expected)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert [in_fp8 for _, _, in_fp8 in saved] == [not precision] * 2


@pytest.mark.parametrize("precision", [{}, {"fp8": None, "fp4": "e2m1"}])
def test_the_layers_own_group_is_taken_before_that_of_megatron(make_model, batch, saved, precision):
    group = torch.distributed.new_group([0])
    quantize(make_model(**RECOMPUTE), group, **precision)(**batch)
    assert [used_group for _, used_group, _ in saved] == [group] * 2


def test_a_layer_without_a_group_takes_that_of_megatron(make_model, batch, saved):
    from megatron.core import parallel_state

    model = quantize(make_model(**RECOMPUTE))
    for layer in model.mtp.layers:
        layer.tp_group = None
    model(**batch)
    assert [used_group for _, used_group, _ in saved] == [parallel_state.get_tensor_model_parallel_group()] * 2


def test_packed_sequences_are_recomputed(make_model, batch, gradients, monkeypatch):
    seen = []

    def gradients_of(**settings):
        model = make_model(**settings)
        for layer in model.mtp.layers:
            original = layer._proj_and_transformer_layer

            def unpack(*args, original=original, **kwargs):
                arguments = inspect.signature(original).bind(*args, **kwargs).arguments
                seen.append(arguments.pop("packed_seq_params"))  # attention in torch takes none
                return original(**arguments)

            monkeypatch.setattr(layer, "_proj_and_transformer_layer", unpack)
        for layer in model.decoder.layers:
            forward = layer.forward
            monkeypatch.setattr(layer, "forward", lambda *a, forward=forward, **k: forward(*a, **_without_packed(k)))
        bounds = torch.tensor([0, 5, 12], dtype=torch.int32)
        packed = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=12, max_seqlen_kv=12)
        one = {name: value[:1] for name, value in batch.items()}
        return gradients(model, model(**one, packed_seq_params=packed))

    expected, got = gradients_of(), gradients_of(**RECOMPUTE)
    assert set(got) == set(expected)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert len(seen) == 6 and all(packed.cu_seqlens_q.tolist() == [0, 5, 12] for packed in seen)


def _without_packed(kwargs):
    return {**kwargs, "packed_seq_params": None}


@pytest.mark.parametrize("method, layers", [("block", 1), ("uniform", 2)])
def test_other_methods_are_megatrons_own(make_model, batch, saved, method, layers):
    model = quantize(make_model(**{**RECOMPUTE, "recompute_method": method, "recompute_num_layers": layers}))
    if method == "block":
        with pytest.warns(UserWarning, match="not supported for MTP yet"):
            model(**batch)
    else:
        with pytest.raises(AssertionError, match="recompute_num_layers must be 1 for MTP recompute"):
            model(**batch)
    assert not saved
