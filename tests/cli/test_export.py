"""`export --diff` prints what `patch -p1` applies, and says for which Megatron there is no diff."""

import re
import shutil
import subprocess
from pathlib import Path

import megatron.core
import pytest
from megatron_mtp_patches.defects.catalog import known_defects
from megatron_mtp_patches.defects.probe import has_defect
from megatron_mtp_patches.defects.rewriting import rewrite

pytestmark = pytest.mark.forked("patched")


@pytest.fixture
def defects():
    """Those of the installed Megatron that have a diff, the most severe first."""
    return [one for one in known_defects() if one.diff and has_defect(one)]


@pytest.fixture
def tree(tmp_path):
    """The sources of the installed Megatron, as in a checkout."""
    sources = Path(megatron.core.__path__[0]).parent
    no_source = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(sources, tmp_path / "megatron", ignore=no_source)
    return tmp_path


def apply(text, tree):
    subprocess.run(["patch", "-p1", "--fuzz=0", "-d", tree], input=text, text=True, check=True, capture_output=True)


def test_all_diffs_apply_to_a_tree_which_has_none_of_the_defects_then(command, defects, tree):
    done = command("export", "--diff", "--against", str(tree))
    assert done.code == 0 and done.err.startswith(f"{len(defects)} diffs: patch -p1 -d {tree} < FILE\n")
    assert re.findall(r"^Description: .*\((.*), severity", done.out, re.MULTILINE) == [one.id for one in defects]
    apply(done.out, tree)
    assert not [one.id for one in defects if has_defect(one, [str(tree)])]
    again = command("export", "--diff", "--against", str(tree))
    assert (again.out, again.err) == ("", "no diffs: this Megatron has no other defect that has one\n")


def test_each_diff_applies_alone(command, defects, tree):
    for defect in defects:
        done = command("export", "--diff", defect.id)
        assert done.out.count("\n+++ ") == 1 and f"reproduce {defect.id}\n" in done.out
        assert not re.search(r"^ +#.*\n\+", done.out, re.MULTILINE)  # no comment is parted from its statement
        (file,) = re.findall(r"^\+\+\+ b/(.*)", done.out, re.MULTILINE)
        before = (tree / file).read_bytes()
        apply(done.out, tree)
        assert (tree / file).read_bytes() == rewrite(before, defect.diff) != before
        (tree / file).write_bytes(before)


def test_a_header_says_when_the_diff_can_go(command, defects, release):
    out = command("export", "--diff", "ML-5077").out
    assert "Origin: megatron_mtp_patches " in out and "explain save-own-state-of-each-param`" in out
    assert "\nRemove-When: megatron-core has what upstream has (fixed " in out
    assert "no known Megatron has" in command("export", "--diff", "ML-7513").out
    fixed = "ML-4070" if release.startswith("0.18") else "ML-5642" if release < "0.18" else ""
    assert not fixed or "Remove-When: megatron-core is 0.19.0 or newer" in command("export", "--diff", fixed).out


def test_a_function_with_another_source_is_refused(command, tree):
    file = tree / "megatron/core/pipeline_parallel/schedules.py"
    file.write_text(file.read_text().replace("output_tensor /= num_microbatches", "output_tensor /= 1", 1))
    done = command("export", "--diff", "ML-7513", "--against", str(tree))
    assert done.code == 2 and done.out == ""
    assert "schedules:forward_step_calc_loss does not have the source of a known release" in done.err
    assert "export all diffs at once, for the source without any" in done.err
    rest = command("export", "--diff", "--against", str(tree))
    assert rest.code == 0 and "no diff for ML-7513" in rest.err and "(ML-5071," in rest.out


def test_a_class_that_this_megatron_lacks_is_said(command, tree):
    file = tree / "megatron/core/distributed/fsdp/mcore_fsdp_adapter.py"
    file.write_text(file.read_text().replace("class FullyShardedDataParallel(", "class Other("))
    done = command("export", "--diff", "fsdp-tied-embeddings", "--against", str(tree))
    assert done.code == 2 and "here, where there is no megatron.core.distributed.fsdp.mcore_fsdp_adapter:" in done.err
    assert "way out: patch keep-gradients-of-tied-embeddings" in done.err


def test_lines_end_as_in_the_file(command, tree):
    file = tree / "megatron/core/pipeline_parallel/schedules.py"
    file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
    file = tree / "megatron/core/transformer/moe/router.py"
    file.write_bytes(b"# -*- coding: latin-1 -*- \xe9\n" + file.read_bytes())
    out = command("export", "--diff", "ML-7513", "--against", str(tree)).out
    assert all(line.endswith("\r") for line in out.split("\n") if re.match(r"\+[^+]", line))
    assert "router.py is not in UTF-8" in command("export", "--diff", "ML-7213", "--against", str(tree)).err


def test_other_ids_are_refused(command, release):
    absent = "ML-7481" if release < "0.19" else "ML-4047"
    for name, answer in {
        "ML-0": "'ML-0' is no id of a known defect",
        "ML-5916": "no diff for ML-5916, whose repair is no small one; way out: patch count-experts-in-grad-norm",
        "count-loss-tokens-over-cp": "is a patch: give the ids of defects that it removes: ML-7513",
        absent: f"this Megatron does not have {absent}",
    }.items():
        done = command("export", "--diff", name)
        assert done.code == 2 and answer in done.err, done.err
