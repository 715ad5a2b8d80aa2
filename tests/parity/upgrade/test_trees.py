"""The Megatrons that a user can name, and the processes that import them."""

import os
import sys
import zipfile
from pathlib import Path

import pytest
from megatron_mtp_patches.engine import PatchError, UsageError
from megatron_mtp_patches.parity.upgrade.trees import open_tree

pytestmark = pytest.mark.forked("python")
HERE = "tests.parity.upgrade.test_trees"


def find_megatron(_: object) -> bytes:
    """The folder of the Megatron that this process finds."""
    from megatron_mtp_patches.engine.source import find_file

    return str(find_file("megatron.core")).encode()


def refuse(reason: str) -> bytes:
    raise UsageError(reason)


def fail(_: object) -> bytes:
    raise OSError("no space left")


@pytest.fixture
def megatron(tmp_path):
    """A folder with a megatron.core that has nothing in it."""
    core = tmp_path / "checkout" / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").touch()
    return tmp_path / "checkout"


def test_a_folder_comes_first_on_the_path(megatron, monkeypatch, tmp_path):
    other = tmp_path / "other" / "megatron" / "core"
    other.mkdir(parents=True)
    (other / "__init__.py").touch()
    monkeypatch.chdir(tmp_path / "other")  # a checkout, as the working directory often is
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, ["", str(tmp_path / "other"), *sys.path])))
    with open_tree(str(megatron)) as tree:
        assert tree.call(f"{HERE}:find_megatron", None).decode() == str(megatron / "megatron/core/__init__.py")


def test_a_wheel_is_unpacked_and_removed(megatron, tmp_path):
    wheel = tmp_path / "megatron_core-0.99.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(megatron / "megatron/core/__init__.py", "megatron/core/__init__.py")
    with open_tree(str(wheel)) as tree:
        (folder,) = tree.folders
        assert Path(folder, "megatron/core/__init__.py").is_file()
    assert not Path(folder).exists()


def test_a_python_has_its_own_and_not_the_checkout_on_pythonpath(megatron, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(megatron), *sys.path])))
    with open_tree(sys.executable) as tree:
        assert (tree.python, tree.folders) == (sys.executable, ())
        assert str(megatron) not in tree.call(f"{HERE}:find_megatron", None).decode()


@pytest.mark.parametrize("name", ["", "nowhere", "main", "0.19.2.whl"])
def test_what_is_no_megatron_is_refused(name):
    with pytest.raises(UsageError, match="name a checkout"), open_tree(name):
        pass


def test_a_folder_or_a_wheel_without_megatron_is_refused(tmp_path):
    wheel = tmp_path / "other-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other.py", "")
    for name in (tmp_path, wheel):
        with pytest.raises(UsageError, match="there is no megatron/core"), open_tree(str(name)):
            pass


def test_a_release_that_pip_cannot_download_is_refused(monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(UsageError, match="name a folder or a wheel instead"), open_tree("0.99.0"):
        pass


def test_what_goes_wrong_in_the_process_is_said_with_the_name_of_the_megatron(megatron, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    with open_tree(str(megatron)) as tree:
        with pytest.raises(UsageError, match=r"checkout: add --micro-batch-size"):
            tree.call(f"{HERE}:refuse", "add --micro-batch-size")
        with pytest.raises(PatchError, match=r"checkout does not run in .*: OSError: no space left"):
            tree.call(f"{HERE}:fail", None)
