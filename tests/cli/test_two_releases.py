"""A megatron.core that hides the one of another release, whose megatron.training is found."""

import atexit
import sys
from types import SimpleNamespace

import pytest
from megatron_mtp_patches.cli.run import run_script
from megatron_mtp_patches.megatrons import installed as installed_megatron

from tests.warm.processes import run_ranks

pytestmark = pytest.mark.forked("python")


@pytest.fixture
def find(tmp_path, monkeypatch):
    """find({folder: its packages}, release of the folders): make them, the first one first on the path."""

    def make(folders, releases):
        for folder, packages in reversed(folders.items()):
            for package in packages:
                (tmp_path / folder / "megatron" / package).mkdir(parents=True)
                (tmp_path / folder / "megatron" / package / "__init__.py").touch()
            monkeypatch.syspath_prepend(str(tmp_path / folder))

        def nearest_release(catalog, path=None):
            (folder,) = path or [str(tmp_path / next(iter(folders)))]
            return releases[folder.rpartition("/")[2]]

        known = SimpleNamespace(nearest_release=nearest_release)
        monkeypatch.setattr(installed_megatron, "known_sources", lambda: known)

    return make


MIXTURE = {"first": ["core"], "second": ["core", "training"]}


def test_the_two_releases_their_folders_and_the_way_out_are_named(find, tmp_path):
    find(MIXTURE, {"first": "0.19.2 or main", "second": "0.18.2"})
    described = installed_megatron.describe_megatron()
    assert described.startswith(
        f"megatron.core is that of 0.19.2 or main, in {tmp_path}/first/megatron/core, and megatron.training that of "
        f"0.18.2, in {tmp_path}/second/megatron/training (by their sources): take both from one release. "
    )


def test_a_script_that_ends_with_an_import_error_is_told(find, tmp_path, monkeypatch):
    monkeypatch.setattr(atexit, "register", lambda call, *args, **keywords: call(*args, **keywords))
    find(MIXTURE, {"first": "0.19.2", "second": "0.18.2"})
    monkeypatch.syspath_prepend("")  # where the script's own folder comes
    script = tmp_path / "script.py"
    script.write_text("from sys import no_such_name")

    (ended,) = run_ranks(1, lambda: run_script(str(script), [], None))
    assert ended.code == 1 and "megatron-mtp-patches: megatron.core is that of 0.19.2, in " in ended.output


@pytest.mark.parametrize(
    "folders",
    [{"first": ["core", "training"], "second": ["core"]}, {"first": ["core"], "second": ["training"]}, MIXTURE],
    ids=["one folder has both", "nothing is hidden", "one release"],
)
def test_what_is_no_mixture_is_none(find, folders):
    find(folders, {"first": "0.18.2", "second": "0.18.2" if folders is MIXTURE else "0.19.2"})
    assert "megatron.core" not in sys.modules
    assert installed_megatron.describe_mixture() == ""
