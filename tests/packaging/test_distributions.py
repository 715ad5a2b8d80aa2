"""The wheel and the sdist are whole."""

from __future__ import annotations

import configparser
import email
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import megatron_mtp_patches
import pytest

pytestmark = [pytest.mark.forked("python"), pytest.mark.real_process("runs in an environment with the wheel alone")]
ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "megatron_mtp_patches": ROOT / "patches" / "megatron_mtp_patches",
    "megatron_overrides": ROOT / "megatron_overrides",
}
CODE = {
    f"{name}/{file.relative_to(folder).as_posix()}"
    for name, folder in PACKAGES.items()
    for file in folder.rglob("*.py")
}
DATA = {f"megatron_mtp_patches/{name}" for name in ("defects.json", "fingerprints.json", "megatrons.json", "py.typed")}
DATA.add("megatron_overrides/py.typed")


@pytest.fixture
def metadata(installed):
    (file,) = installed.glob("*.dist-info/METADATA")
    return email.message_from_string(file.read_text(encoding="utf-8"))


@pytest.fixture
def sdist_files(sdist):
    with tarfile.open(sdist) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def test_the_wheel_has_every_module_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if ".dist-info/" not in name} == CODE | DATA
    assert all(any(name.endswith(file) for name in names) for file in ("LICENSE", "NOTICE"))
    assert wheel.name.endswith("-py3-none-any.whl")


def test_the_sdist_has_every_module_and_what_a_build_needs(sdist_files):
    modules = {f"patches/{name}" if name.startswith("megatron_mtp") else name for name in CODE | DATA}
    assert modules | {"setup.cfg", "pyproject.toml", "LICENSE"} <= sdist_files


def test_the_sdist_has_the_pages_that_its_readme_leads_to(sdist_files):
    links = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / "README.md").read_text(encoding="utf-8"))
    pages = {link for link in links if link.endswith((".md", ".png"))}
    assert pages and pages <= sdist_files


def test_metadata(metadata):
    assert metadata["Name"] == "megatron-mtp-patches"
    assert metadata["Version"] == megatron_mtp_patches.__version__
    assert metadata["Requires-Python"] == ">=3.10"
    assert (metadata["License-Expression"] or metadata["License"]) == "Apache-2.0"
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    needed = {line.partition(">")[0] for line in metadata.get_all("Requires-Dist") if "extra ==" not in line}
    assert needed == {"rich", "wrapt"}, "neither torch nor Megatron: the user's own are patched"


def test_the_text_for_an_index_has_no_link_into_the_repository(metadata):
    text = metadata.get_payload()
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert text.startswith("# megatron_mtp_patches") and "## Guarantees" in text
    assert "![" not in text and "The picture" not in text
    assert re.findall(r"\]\((?!https?://)", text) == []


def test_with_the_address_of_the_project_the_text_leads_there():
    """As the release workflow builds it."""
    env = {**os.environ, "PROJECT_URL": "https://host.test/team/patches/"}
    code = "import runpy, setuptools; setuptools.setup = lambda **texts: print(*texts.values()); "
    code += "runpy.run_path('setup.py')"
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True)
    assert "'Issues': 'https://host.test/team/patches/issues'" in done.stdout
    assert "(https://host.test/team/patches/blob/HEAD/docs/doctor.md)" in done.stdout
    assert re.findall(r"\]\((?!https?://|#)", done.stdout) == []


def test_the_command_is_installed_and_runs_from_the_wheel(installed, tmp_path):
    (file,) = installed.glob("*.dist-info/entry_points.txt")
    scripts = configparser.ConfigParser()
    scripts.read(file)
    assert dict(scripts["console_scripts"]) == {"megatron-mtp-patches": "megatron_mtp_patches.cli:main"}
    code = "import megatron_mtp_patches as p, megatron_overrides as o; print(p.__file__, o.__file__); "
    code += "from megatron_mtp_patches.cli import main; exit(main(['drift']))"
    env = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(path.startswith(str(installed)) for path in done.stdout.splitlines()[0].split())
    assert "unknown targets: 0" in done.stdout


def test_in_a_clone_an_installed_package_does_not_take_the_code_of_the_clone(installed, tmp_path):
    env = {**os.environ, "PYTHONPATH": str(installed)}
    (tmp_path / "megatron_overrides").symlink_to(ROOT / "megatron_overrides")
    (tmp_path / "job.py").write_text("import megatron_overrides.call; print(megatron_overrides.call.__file__)")

    def run(*words):
        return subprocess.run([sys.executable, *words], env=env, cwd=tmp_path, capture_output=True, text=True)

    assert run("-m", "megatron_mtp_patches", "run", "job.py").stdout.startswith(str(installed))
    code = "import megatron_overrides, megatron_mtp_patches"
    assert f"and megatron_mtp_patches from {installed}: these are two copies" in run("-c", code).stderr
