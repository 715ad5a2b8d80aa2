"""What `reproduce ID --standalone FILE` writes runs without this package, and sees what its program sees.

In a rehearsal the ranks of a file are those of GPUs, as far as it has them: there the files of what needs no GPU run,
and one of them without a rehearsal; with --everywhere all files, and all of those that need none.
"""

import ast
import builtins
import os
import subprocess
import symtable
import sys
import sysconfig
from collections import Counter
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from queue import SimpleQueue

import pytest
from megatron_mtp_patches.cli import main
from megatron_mtp_patches.defects.catalog import known_defects, releases_with
from megatron_mtp_patches.megatrons.installed import find_releases
from megatron_mtp_patches.reproductions import needs, runner
from megatron_mtp_patches.reproductions.standalone import needs_gpus

from .test_programs import runs_on

pytestmark = pytest.mark.forked("megatron")
REPRODUCED = [one for one in known_defects() if runner.find_program(one.id)]


def pytest_generate_tests(metafunc):
    """`seen_here` is a defect that this environment can show, `seen_on_a_cpu` one whose program needs no GPU."""
    (release,) = find_releases()
    everywhere = metafunc.config.getoption("everywhere")
    shown = [one for one in REPRODUCED if release in releases_with(one) and runs_on(one, release, everywhere)]
    shown = [one for one in shown if not needs.find_missing(runner.find_program(one.id))]
    on_a_cpu = [one for one in shown if not needs_gpus(runner.find_program(one.id))]
    here, without_rehearsal = (shown, on_a_cpu) if everywhere else (on_a_cpu, on_a_cpu[:1])
    for name, defects in (("seen_here", here), ("seen_on_a_cpu", without_rehearsal)):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, defects, ids=lambda defect: defect.id)


def defect_called(identifier):
    return next(one for one in REPRODUCED if one.id == identifier)


@pytest.fixture
def write(tmp_path):
    """write(defect): the file that the command writes."""

    def write(defect):
        file = tmp_path / f"{defect.id.lower().replace('-', '_')}.py"
        assert main(["reproduce", defect.id, "--standalone", str(file)]) == 0
        return file

    return write


@pytest.mark.parametrize("defect", REPRODUCED, ids=lambda defect: defect.id)
def test_a_file_has_all_that_it_uses_and_imports_nothing_of_ours(write, defect):
    text = write(defect).read_text(encoding="utf-8")
    table, tree = symtable.symtable(text, defect.id, "exec"), ast.parse(text)
    assert set(global_names(table)) <= {*table.get_identifiers(), *dir(builtins)}
    defined = [one.name for one in tree.body if isinstance(one, (ast.FunctionDef, ast.ClassDef))]
    assert max(Counter(defined).values()) == 1
    for node in ast.walk(tree):
        assert not isinstance(node, ast.ImportFrom) or node.level == 0
        assert not isinstance(node, (ast.Import, ast.ImportFrom)) or "mtp_patches" not in ast.unparse(node)


def global_names(table):
    """The names that the functions of a file look for at its top, or among the builtins."""
    for inner in table.get_children():
        yield from (symbol.get_name() for symbol in inner.get_symbols() if symbol.is_global())
        yield from global_names(inner)


def test_a_file_sees_what_its_program_sees(write, seen_here):
    file = write(seen_here)
    spec = spec_from_file_location(file.stem, file)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    program = runner.find_program(seen_here.id)
    outcome = runner.run(program)
    otherwise = getattr(program, "EXPECTED", "no error")
    outcomes = runner.run_on_ranks(getattr(program, "RANKS", 1), partial(be_rank, module), runner.LIMIT, otherwise)
    assert outcome in outcomes and not outcome.is_right


def be_rank(module):
    outcomes = SimpleQueue()
    module.be_rank(int(os.environ["RANK"]), module.reproduce, True, outcomes)
    is_right, expected, seen = outcomes.get()
    return runner.Outcome(expected, seen, is_right)


@pytest.mark.real_process("an interpreter that has neither a rehearsal nor this package")
def test_a_file_shows_its_defect_on_a_cpu(write, seen_on_a_cpu, tmp_path):
    done = run_without_this_package(write(seen_on_a_cpu), tmp_path)
    outcome = runner.run(runner.find_program(seen_on_a_cpu.id))
    expected, seen = done.stdout.splitlines()[-2:]
    assert (expected, seen) == (f"expected  {outcome.expected}", f"seen      {outcome.seen}"), done.stderr
    assert done.returncode == 1


@pytest.mark.real_process("an interpreter that has neither a rehearsal nor this package")
def test_an_error_is_what_a_file_sees(write, tmp_path):
    (tmp_path / "emerging_optimizers.py").write_text("raise ImportError('left out')")
    done = run_without_this_package(write(defect_called("EO-238")), tmp_path)
    assert done.stdout.splitlines() == ["expected  no error", "seen      ImportError: left out"]
    assert done.returncode == 1 and "Traceback" in done.stderr


@pytest.mark.real_process("an interpreter that has neither a rehearsal nor this package")
def test_a_file_that_needs_gpus_says_so(write, tmp_path):
    done = run_without_this_package(write(defect_called("ML-4116b")), tmp_path)
    assert (done.returncode, done.stdout) == (125, "")
    assert done.stderr.endswith("This needs a GPU for each of its ranks, 2 in all. There are 0.\n")


@pytest.mark.real_process("an interpreter that has neither a rehearsal nor this package")
def test_a_file_that_fuses_weight_gradients_says_that_it_needs_apex(write, tmp_path):
    file = write(defect_called("mtp-tied-embeddings"))
    assert "It also needs transformer-engine and Apex." in file.read_text(encoding="utf-8")
    done = run_without_this_package(file, tmp_path)
    assert (done.returncode, done.stdout) == (125, "")
    assert done.stderr.endswith("with its CUDA extensions: No module named 'fused_weight_gradient_mlp_cuda'.\n")
    (tmp_path / "fused_weight_gradient_mlp_cuda.py").touch()
    assert "This needs a GPU for each of its ranks" in run_without_this_package(file, tmp_path).stderr


def run_without_this_package(file, folder):
    """Run it in a Python that skips the links to editable packages, and in which there is no TransformerEngine."""
    (folder / "transformer_engine.py").write_text("raise ModuleNotFoundError(name=__name__)")
    path = os.pathsep.join([str(folder), sysconfig.get_path("purelib")])
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    assert subprocess.run([sys.executable, "-S", "-c", "import megatron_mtp_patches"], env=environment).returncode
    words = [sys.executable, "-S", str(file)]
    return subprocess.run(words, env=environment, cwd=folder, capture_output=True, text=True)
