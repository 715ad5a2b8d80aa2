"""An edit that is left out is noticed by a test, or a reason says why none can."""

from __future__ import annotations

import json
import re
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from .dropped_edits import SURVIVORS, read_survivors, sort_by_distance

pytestmark = pytest.mark.real_process("a separate pytest leaves out edits")
ROOT = Path(__file__).resolve().parents[2]
CONFIG = "megatron.core.optimizer.optimizer_config:OptimizerConfig"
TESTS = """
    from pathlib import Path

    def fields():
        from megatron_mtp_patches.catalog import CATALOG

        edits = (edit for patch in CATALOG for edit in patch.edits if edit.target.startswith("megatron.core."))
        return {getattr(edit, "field", "") for edit in edits}

    def test_clipping():
        assert "mtp_clip_grad" in fields()

    def test_acceptance():
        assert "mtp_acceptance_interval" in fields()

    def test_that_fails_from_now_on():
        broken = Path(__file__).with_name("broken")
        if "min_clip_coefficient" not in fields():
            broken.touch()
        assert not broken.exists()
"""
SURVIVOR = """
[[survivors]]
edits = ["{edit}"]
releases = ["{release}"]
reason = "because"
"""


def write_survivors(folder: Path, *edits: str) -> Path:
    file = folder / SURVIVORS
    file.parent.mkdir()
    release = metadata.version("megatron-core")
    file.write_text("".join(SURVIVOR.format(edit=edit, release=release) for edit in edits))
    return file


@pytest.fixture(scope="module")
def dropped(run_tests, tmp_path_factory):
    """{field: how the run that leaves it out has ended}, of five fields."""
    folder = tmp_path_factory.mktemp("project")
    interval = "megatron.core.transformer.transformer_config:TransformerConfig mtp_acceptance_interval"
    write_survivors(folder, f"{CONFIG} clip_orthogonalizing_optimizers", interval)
    chosen = ["mtp_clip_grad", "mtp_grad_norm_skip_threshold", "clip_orthogonalizing_optimizers"]
    chosen += ["min_clip_coefficient", "mtp_acceptance_interval"]
    options = ["--drop-edits", "-k", " or ".join(chosen), "-o", f"pythonpath={ROOT / 'patches'}"]
    run = run_tests(TESTS, *options, folder=folder)
    edits_of_megatron_core = {name: outcome for name, outcome in run.outcomes.items() if "megatron.core." in name}
    endings = {name.split()[-1]: (outcome, run.details[name]) for name, outcome in edits_of_megatron_core.items()}
    assert endings.keys() == set(chosen), run.output
    return endings


@pytest.mark.parametrize(
    "field, outcome, text",
    [
        ("mtp_clip_grad", "passed", ""),
        ("mtp_grad_norm_skip_threshold", "failed", "no test notices"),
        ("clip_orthogonalizing_optimizers", "skipped", "because"),
        ("mtp_acceptance_interval", "failed", "test_acceptance notices: take it out of ci/dropped_edits.toml"),
        ("min_clip_coefficient", "failed", "fail with every edit as well: test_it.py::test_that_fails_from_now_on"),
    ],
)
def test_an_edit_is_noticed_or_has_a_reason(dropped, field, outcome, text):
    end, details = dropped[field]
    assert end == outcome and text in details


@pytest.fixture
def collect(run_tests):
    """collect(k): the edits that -k chooses, and what pytest has printed."""

    def run(k):
        options = ["--drop-edits", "--collect-only", "-o", f"pythonpath={ROOT / 'patches'}"]
        output = run_tests(TESTS, *options, "-k", k).output
        return [line for line in output.splitlines() if line.startswith(("megatron.", "emerging_optimizers."))], output

    return run


def test_an_edit_of_a_native_patch_is_not_left_out_though_another_patch_edits_its_function(collect):
    names, _ = collect("setup_embeddings_and_output_layer")
    assert {name.split(":")[-1] for name in names} == {"drop_unused_output_weight", "add_look_ups_of_mtp_stage"}


def test_k_finds_flags_and_fields_and_what_it_finds_is_counted(collect):
    names, output = collect("floor_clip_coefficient or mtp_init")
    assert {"min_clip_coefficient", "--mtp-init"} <= {edit.split()[-1] for edit in names}
    count = re.search(r"(-?\d+)/(\d+) tests collected \((\d+) deselected\)", output)
    chosen, of, left_out = map(int, count.groups())
    assert chosen == of - left_out == len(names)
    names, output = collect("no_such_name")
    assert not names and "'no_such_name': no edit that changes something in" in output


def test_a_reason_is_for_an_edit_that_is_declared_and_for_one_release(tmp_path):
    file = write_survivors(tmp_path, f"{CONFIG} mtp_clip_grad")
    assert read_survivors(file, metadata.version("megatron-core")) == {f"{CONFIG} mtp_clip_grad": "because"}
    assert read_survivors(file, "0.0.1") == {}
    file.write_text(SURVIVOR.format(edit=f"{CONFIG} no_such_field", release="0.0.1"))
    with pytest.raises(pytest.UsageError, match="no patch declares: .*OptimizerConfig no_such_field"):
        read_survivors(file, "0.0.1")
    read_survivors(ROOT / SURVIVORS, "any release")


def test_the_file_that_mirrors_the_override_comes_first(tmp_path):
    files = ["tests/end_to_end/test_it.py", "tests/lib/core/test_far.py", "tests/lib/core/opt/test_near.py"]
    files += ["tests/ranks/test_names_it.py", "tests/lib/core/opt/test_clip.py"]
    for file in map(tmp_path.joinpath, files):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("clip_by_norm" if "names_it" in file.name else "")
    forked = [SimpleNamespace(path=tmp_path / file) for file in files]
    ordered = sort_by_distance("megatron.opt:Optimizer.step lib.core.opt.clip:clip_by_norm", forked, tmp_path)
    names = ["test_clip", "test_names_it", "test_near", "test_far", "test_it"]
    assert [file.path.stem for file in ordered] == names


def test_every_test_that_notices_an_edit_is_there():
    """A renamed one would end the suites of the releases that run it by name."""
    rows = json.loads((ROOT / "ci" / "noticed_edits.json").read_text(encoding="utf-8"))
    tests = {test.partition("[")[0].partition("::") for noticing in rows.values() for test in noticing if "::" in test}
    missing = [(file, name) for file, _, name in tests if f"def {name}(" not in (ROOT / file).read_text("utf-8")]
    assert tests and not missing, missing
