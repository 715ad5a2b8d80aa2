"""What install() refuses before it touches anything."""

import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
from megatron_mtp_patches import rehearsal

from .conftest import clean_environment


@pytest.fixture(autouse=True)
def not_installed_yet(monkeypatch):
    monkeypatch.setattr(rehearsal, "_done", False)
    for name in ("CUDA_VISIBLE_DEVICES", "TORCHDYNAMO_DISABLE"):
        monkeypatch.setenv(name, "as it was")


def fake_torch(monkeypatch, version=(2, 13), initialized=False):
    torch = ModuleType("torch")
    torch.__version__ = version
    torch.cuda = SimpleNamespace(is_initialized=lambda: initialized)
    monkeypatch.setitem(sys.modules, "torch", torch)


def test_too_late_for_megatron(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core", ModuleType("megatron.core"))
    with pytest.raises(RuntimeError, match="before anything imports Megatron"):
        rehearsal.install()
    assert not rehearsal.installed()


def test_too_late_for_cuda(monkeypatch):
    fake_torch(monkeypatch, initialized=True)
    with pytest.raises(RuntimeError, match="CUDA was initialised"):
        rehearsal.install()
    assert not rehearsal.installed()


def test_torch_too_old(monkeypatch):
    fake_torch(monkeypatch, version=(2, 10))
    with pytest.raises(RuntimeError, match=r"torch >= 2\.11"):
        rehearsal.install()
    assert not rehearsal.installed()


def test_importing_the_package_imports_no_torch():
    imports = "from megatron_mtp_patches import rehearsal; from megatron_mtp_patches.cli import run"
    code = f"import sys; {imports}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env=clean_environment())
