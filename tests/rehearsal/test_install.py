"""install() refuses a wrong order before it changes anything; the command and pytest call it correctly."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
from megatron_mtp_patches import rehearsal
from megatron_mtp_patches.cli import run

from tests.warm.processes import LAUNCHER

pytestmark = pytest.mark.forked("python")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """The environment of a process without a launcher."""
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    for name in ("CUDA_VISIBLE_DEVICES", "TORCHDYNAMO_DISABLE"):
        monkeypatch.setenv(name, "as it was")


@pytest.fixture
def fake_torch(monkeypatch):
    """fake_torch(version=..., initialized=...): a torch of that version, with CUDA initialised or not."""

    def fake(version=(2, 13), initialized=False):
        torch = ModuleType("torch")
        torch.__version__ = version
        torch.cuda = SimpleNamespace(is_initialized=lambda: initialized)
        monkeypatch.setitem(sys.modules, "torch", torch)

    return fake


def test_install_after_an_import_of_megatron_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core", ModuleType("megatron.core"))
    with pytest.raises(RuntimeError, match="before anything imports Megatron"):
        rehearsal.install()
    assert not rehearsal.installed()


def test_install_after_cuda_was_initialised_is_refused(fake_torch):
    fake_torch(initialized=True)
    with pytest.raises(RuntimeError, match="CUDA was initialised"):
        rehearsal.install()
    assert not rehearsal.installed()


def test_install_with_a_torch_that_is_too_old_is_refused(fake_torch):
    fake_torch(version=(2, 10))
    with pytest.raises(RuntimeError, match=r"torch >= 2\.11"):
        rehearsal.install()
    assert not rehearsal.installed()


def test_importing_the_package_and_the_command_imports_no_torch():
    assert rehearsal.__name__ in sys.modules and run.__name__ in sys.modules
    assert "torch" not in sys.modules


def test_the_pytest_plugin_installs_it_without_megatrons_flags(monkeypatch):
    calls = []
    monkeypatch.setattr(rehearsal, "install", lambda **how: calls.append(how))
    importlib.import_module("megatron_mtp_patches.rehearsal.pytest_plugin")
    assert calls == [{"megatron_flags": False}]
