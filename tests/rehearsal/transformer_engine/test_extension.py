"""The module that stands for the extension: what it refuses, and that these tests call each of its kernels."""

import inspect
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch
from megatron_mtp_patches.megatrons.environment import IMPORTS_OF_TRANSFORMER_ENGINE
from megatron_mtp_patches.rehearsal import transformer_engine

from tests.rehearsal import spawned

te = pytest.importorskip("transformer_engine.pytorch")
tex = pytest.importorskip("transformer_engine_torch")
activations = pytest.importorskip("megatron_mtp_patches.rehearsal.transformer_engine.activations")
extension = pytest.importorskip("megatron_mtp_patches.rehearsal.transformer_engine.extension")
pytestmark = pytest.mark.forked("torch")
# Properties of the device, which compute nothing; and kernels that TransformerEngine's own modules call.
NOT_NAMED = {
    "get_cudnn_version": "attention",
    "get_cublasLt_version": "a linear layer",
    "get_num_cublas_streams": "grouped products",
    "get_stream_priority_range": "userbuffers",
    "ubuf_built_with_mpi": "userbuffers",
    "device_supports_multicast": "userbuffers",
    "quantize": "a refusal, below",
    "layernorm_bwd": "LayerNorm",
    "fused_rope_backward": "apply_rotary_pos_emb",
    "moe_unpermute_bwd": "moe_unpermute",
    "fused_attn_bwd": "attention",
}
OPTIMIZERS = {"adam", "adam_capturable", "adam_capturable_master", "adam_param_remainder", "sgd"}


def test_each_kernel_is_called_by_a_test():
    source = "".join(file.read_text() for file in Path(__file__).parent.glob("test_*.py"))
    generated = {*activations.PLAIN, *activations.GATED}
    names = {kernel.__name__ for kernel in extension._KERNELS} - NOT_NAMED.keys()
    names -= {f"multi_tensor_{name}" for name in OPTIMIZERS}  # FusedAdam's and FusedSGD's
    names -= {f"{prefix}{name}" for name in generated for prefix in ("", "d", "dbias_d")}
    names -= {name for name in names if name.startswith("scaled_") and "softmax" in name}
    assert [name for name in sorted(names) if f"tex.{name}" not in source and f"{name}(" not in source] == []


def test_a_kernel_without_a_stand_in_raises_when_it_is_called():
    refused = tex.fused_topk_with_score_function_fwd  # naming it does not raise
    with pytest.raises(NotImplementedError, match="transformer_engine_torch.fused_topk_with_score_function_fwd"):
        refused(1, key=2)
    with pytest.raises(NotImplementedError, match="CommOverlap: a rehearsal"):
        tex.CommOverlap()
    assert not hasattr(tex, "__path__")


def test_the_error_for_fp8_names_its_quantizer():
    with pytest.raises(NotImplementedError, match="Float8Quantizer: a rehearsal on the CPU quantizes nothing"):
        tex.quantize(torch.ones(2), type("Float8Quantizer", (), {})())
    module = te.Linear(16, 16)
    with (
        pytest.raises((AssertionError, RuntimeError, NotImplementedError), match="(?i)fp8|quantize"),
        te.fp8_autocast(),
    ):
        module(torch.ones(16, 16))


def test_kernels_build_no_autograd_graph():
    x = torch.randn(4, 4, requires_grad=True)
    assert tex.gelu(x, None).grad_fn is None
    assert not inspect.isbuiltin(tex.gelu)


@pytest.mark.real_process("a spawned process imports all that it needs")
def test_a_spawned_process_has_the_extension_and_no_patches():
    assert spawned.ask("transformer_engine.pytorch") == ([], ["torch", "transformer_engine_torch"], "cpu")


def test_the_advice_names_what_is_missing(monkeypatch):
    assert transformer_engine.available()
    original = transformer_engine.find_spec
    for module, name in IMPORTS_OF_TRANSFORMER_ENGINE.items():
        monkeypatch.setattr(
            transformer_engine, "find_spec", lambda asked, module=module: None if asked == module else original(asked)
        )
        assert not transformer_engine.available()
        assert transformer_engine.installation_advice() == f"install what its Python imports: pip install {name}"
    monkeypatch.setattr(transformer_engine, "find_spec", lambda asked: None)
    assert "pip install --no-deps transformer-engine" in transformer_engine.installation_advice()
    monkeypatch.setattr(transformer_engine, "find_spec", lambda asked: ModuleSpec(asked, None, origin="a file"))
    assert not transformer_engine.available(), "its extension is there"
    assert "transformer_engine_torch" in transformer_engine.installation_advice()
