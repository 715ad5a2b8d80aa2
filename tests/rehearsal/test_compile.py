"""Nothing is compiled: neither by torch.compile nor by nvcc."""

import pytest
import torch

pytestmark = pytest.mark.forked("torch")


def test_torch_compile_returns_the_function_itself():
    def double(x):
        return 2 * x

    assert torch.compile(double) is double
    assert torch.compile(mode="max-autotune")(double) is double
    assert torch._dynamo.config.disable


def test_megatron_builds_no_kernels_with_nvcc(tmp_path, monkeypatch):
    """0.16.1's checkout builds them when it starts."""
    folder = tmp_path / "megatron" / "legacy"
    folder.mkdir(parents=True)
    (folder / "fused_kernels.py").write_text("def load(args):\n    raise FileNotFoundError('nvcc')\n")
    monkeypatch.syspath_prepend(tmp_path)
    from megatron.legacy import fused_kernels

    fused_kernels.load(None)
