"""`doctor --batch` of launch scripts: which run they start, with which patches, and what is not known of it."""

import pytest
from megatron_mtp_patches.defects.catalog import known_defects
from megatron_mtp_patches.doctor.findings import RunSettings
from megatron_mtp_patches.doctor.flags import read

from .training_flags import SMALL

pytestmark = pytest.mark.forked("patched")

SCRIPT = f"""#!/bin/bash
GPUS=8
MODEL_ARGS=(
    {SMALL}  # a small one
    --tensor-model-parallel-size ${{TP:-2}}
)
torchrun --nproc-per-node $GPUS pretrain_gpt.py ${{MODEL_ARGS[@]}} --optimizer $OPTIMIZER $MORE_ARGS 2>&1 | tee log
"""


def test_a_launch_script_is_read_with_the_variables_that_it_sets(doctor_of_file, monkeypatch):
    monkeypatch.setenv("OPTIMIZER", "muon")
    told = doctor_of_file(SCRIPT).out
    assert "ML-5394" in told and "unknown to Megatron" not in told
    assert "not set in this file: $MORE_ARGS. Set such a variable in the environment" in told


@pytest.mark.parametrize(
    "options, problem",
    [
        ("--nproc-per-node 8", ""),
        ("--nproc_per_node=8 --nnodes=$((2 * (1 + 1)))", ""),
        ("--nproc-per-node ${GPUS:?how many}", ""),
        ("--nproc-per-node 3", "Megatron refuses these flags: "),
        ("--nproc-per-node gpu", "torchrun's options are not known as numbers (--nproc-per-node gpu): give --world"),
        ("--nnodes 2", "torchrun's --nproc-per-node is absent: give --world-size N"),
    ],
)
def test_torchrun_s_options_say_how_many_ranks_there_are(doctor_of_file, monkeypatch, options, problem):
    monkeypatch.setenv("GPUS", "4")
    script = f"torchrun {options} train.py {SMALL} --tensor-model-parallel-size 2"
    told = doctor_of_file(script).out
    assert problem in told and ("refuses these" in told or "torchrun's" in told) is bool(problem)
    sized = doctor_of_file(script, "--world-size", "8").out
    assert "torchrun's" not in sized and "refuses these" not in sized


@pytest.mark.parametrize("head, ranks", [("#SBATCH --ntasks=8\n", 8), ("#SBATCH --nodes=2\n", None), ("", None)])
def test_a_slurm_job_that_does_not_say_its_number_of_ranks_is_told(doctor_of_file, head, ranks):
    script = f"#!/bin/bash\n{head}srun python train.py {SMALL} --tensor-model-parallel-size 2\n"
    told = doctor_of_file(script).out
    assert f"; {ranks} ranks\n" in told if ranks else "; 2 ranks, the fewest that fit\n" in told
    assert ("the number of ranks that Slurm starts is not known: give --world-size N, or" in told) is (ranks is None)
    sized = doctor_of_file(script, "--world-size", "16").out
    assert "; 16 ranks\n" in sized and "that Slurm starts" not in sized


LOADS = "nothing here shows that this run has the patches: start "


def test_a_script_whose_run_has_no_patches_is_told(doctor_of_file, tmp_path):
    by_torchrun = f"torchrun --nproc-per-node 1 train.py {SMALL}"
    assert LOADS in doctor_of_file(by_torchrun).out
    assert LOADS in doctor_of_file(f"uv run --with megatron-mtp-patches python train.py {SMALL}").out
    for line in (
        f"torchrun --nproc-per-node 1 -m megatron_mtp_patches run train.py {SMALL}",
        f"bin/megatron-mtp-patches run train.py {SMALL}",
        SMALL,
    ):
        assert LOADS not in doctor_of_file(line).out
    for text, is_told in (
        ("import megatron_mtp_patches\n", False),
        ("def main():\n    from megatron_mtp_patches.functional import tag\n", False),
        ("# import megatron_mtp_patches\nNAME = 'megatron_mtp_patches'\n", True),
        ("from .megatron_mtp_patches import tag\n", True),
    ):
        (tmp_path / "train.py").write_text(text)
        assert (LOADS in doctor_of_file(by_torchrun).out) is is_told


def test_the_variable_is_believed_only_where_the_python_file_cannot_be_read(doctor_of_file, tmp_path):
    run = f"MEGATRON_MTP_PATCHES=all torchrun train.py {SMALL}"
    for text, is_believed in (("import torch\n", False), ("no Python\n", True)):
        (tmp_path / "train.py").write_text(text)
        told = doctor_of_file(run).out
        assert ("count as those of the run: they act only" in told) is is_believed
        assert ("MEGATRON_MTP_PATCHES loads no patch: train.py does not import megatron_mtp" in told) is not is_believed
        assert ("Runs that may lack the patches: 1." in told) is not is_believed


def test_no_defect_counts_as_removed_from_a_run_that_may_lack_the_patches(doctor_of_file):
    heads = f"train.py {SMALL} --mtp-num-layers 1 --pipeline-model-parallel-size 2\n"
    loaded = doctor_of_file(f"torchrun -m megatron_mtp_patches run {heads}")
    assert loaded.code == 0 and "removed by keep-gradients-of-tied-embeddings" in loaded.out
    assert "0 with a defect that is not removed, 0 with one" in loaded.out and "may lack" not in loaded.out
    bare = doctor_of_file(f"torchrun {heads}")
    assert bare.code == 1 and "NOT REMOVED: keep-gradients-of-tied-embeddings removes it from a run that" in bare.out
    assert "removed by" not in bare.out and "1 with a defect that is not removed, 1 with one of" in bare.out
    assert (
        "Runs that may lack the patches: 1." in bare.out and "set MEGATRON_MTP_PATCHES=all in this file\n" in bare.out
    )
    told = doctor_of_file(f"MEGATRON_MTP_PATCHES=all torchrun {heads}")
    assert (told.code, "may lack" in told.out, LOADS in told.out) == (0, False, False)
    assert "act only where train.py imports megatron_mtp_patches, or after `megatron-mtp-patches enable`\n" in told.out


def test_a_file_that_the_script_sources_is_named(doctor_of_file):
    lines = "source ./cluster.env\n. ~/venv/bin/activate\nif test $X; then . $HERE/b.env; fi\nsource ./cluster.env\n"
    told = doctor_of_file(f"{lines}train.py {SMALL}\n").out
    assert "\nnot read: ./cluster.env, $HERE/b.env. Set what it sets in the environment of this command" in told
    assert "not read" not in doctor_of_file(f"train.py {SMALL} --exit-signal-handler\n").out


@pytest.mark.parametrize("before", ["export MEGATRON_MTP_PATCHES={}\n", "MEGATRON_MTP_PATCHES={} "])
def test_the_patches_are_those_that_the_script_chooses(doctor_of_file, before):
    def ask(choice):
        return doctor_of_file(f"{before.format(choice)}python train.py {SMALL} --optimizer muon")

    removed = "removed by exempt-muon-from-clipping"
    assert removed in ask("all").out
    without = ask("-exempt-muon-from-clipping")
    assert removed not in without.out and "1 with a defect that is not removed" in without.out
    wrong = ask("exempt-muons")
    assert wrong.code == 2 and "unknown patch 'exempt-muons'" in wrong.out
    assert removed in ask("all").out, "and the next run has what it chooses"


def test_a_misspelt_flag_of_a_script_ends_with_2(doctor_of_file):
    done = doctor_of_file(f"python train.py {SMALL} --mtp-detach-head")
    assert done.code == 2 and "did you mean --mtp-detach-heads?" in done.out


def test_what_a_script_sets_under_a_condition_is_named(doctor_of_file):
    told = doctor_of_file(f"ARGS='{SMALL}'\nif test $X; then\n  ARGS+=' --optimizer muon'\nfi\ntrain.py $ARGS\n").out
    assert "ML-5394" in told
    assert "conditions are not evaluated: the last value that the file gives counts for ARGS\n" in told


@pytest.mark.parametrize("words", [f"{SMALL} $@", '"$@"', "${@:2}", "$1"])
def test_a_script_that_hands_its_arguments_on_is_told_to_have_them_written_into_it(doctor_of_file, words):
    told = doctor_of_file(f"#!/bin/bash\ntorchrun --nproc-per-node 8 pretrain_gpt.py {words}\n").out
    assert "with which the script is called. Write these flags into the file\n" in told
    assert "not set in this file" not in told and "unknown to Megatron" not in told
    assert "torchrun's" not in told


def test_a_script_that_starts_no_training_is_no_run(doctor_of_file):
    done = doctor_of_file(f"#!/bin/bash\nMODEL_ARGS='{SMALL}'\npython prepare.py\n")
    assert done.code == 2 and "no command of this script has a Python file and flags" in done.out
    assert "Runs: 0; " in done.out and "Files without a run: 1." in done.out


@pytest.mark.parametrize("text", ["# $NAME is not set\n", "#!/bin/bash\nexport A=1\n", "What we train next.\n"])
def test_a_file_without_a_command_is_no_run(doctor_of_file, text):
    done = doctor_of_file(text)
    assert done.code == 2 and "run.sh: no run in this file: it has neither a command that" in done.out
    assert "Runs: 0; " in done.out


def test_the_variable_that_hides_the_flags_is_named_where_megatron_refuses(doctor_of_file):
    done = doctor_of_file("torchrun pretrain_gpt.py $MODEL_ARGS --bf16")
    assert done.code == 2 and "Megatron refuses these flags: " in done.out
    assert "not set in this file: $MODEL_ARGS" in done.out
    assert "known defects: " not in done.out and done.out.splitlines()[-1].startswith(
        "Runs: 1; 0 with a defect that is not removed, 0 with one of severity 3 or more, 0 with settings that do not "
        "act or are refused, 1 that cannot be checked."
    )


@pytest.mark.parametrize("name, is_affected", [("pretrain_vlm.py", True), ("train.py", False)])
def test_a_defect_of_one_script_is_not_found_in_another(doctor_of_file, tmp_path, monkeypatch, name, is_affected):
    (tmp_path / "pretrain_vlm.py").write_text("model = LLaVAModel(config)\n")
    monkeypatch.syspath_prepend(tmp_path)
    told = doctor_of_file(f"torchrun --nproc-per-node 1 {name} {SMALL} --freeze-LM --rotary-base 500000").out
    assert ("ML-6586" in told) is is_affected


@pytest.mark.parametrize("flags, is_affected", [("", True), ("--export-default-te-spec", False)])
def test_flags_of_modelopt_are_read_though_scripts_add_them(trainer, flags, is_affected):
    words = f"{SMALL} --hybrid-override-pattern M* --norm-epsilon 1e-6 --export-kd-teacher-load teacher {flags}"
    settings = RunSettings(read(words.split(), None).sources, None)
    (defect,) = (one for one in known_defects() if one.id == "ML-5750")
    assert defect.affects(settings) is is_affected
