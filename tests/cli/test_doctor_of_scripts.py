"""`doctor --batch` of launch scripts: which run they start, with which patches, and what is not known of it."""

from __future__ import annotations

import pytest

from .training_flags import SMALL

pytestmark = [pytest.mark.forked("patched"), pytest.mark.usefixtures("trainer")]

SCRIPT = f"""#!/bin/bash
GPUS=8
MODEL_ARGS=(
    {SMALL}  # a small one
    --tensor-model-parallel-size ${{TP:-2}}
)
torchrun --nproc-per-node $GPUS pretrain_gpt.py ${{MODEL_ARGS[@]}} --optimizer $OPTIMIZER $MORE_ARGS 2>&1 | tee log
"""


def test_a_launch_script_is_read_with_the_variables_that_it_sets(command, tmp_path, monkeypatch):
    monkeypatch.setenv("OPTIMIZER", "muon")
    (tmp_path / "run.sh").write_text(SCRIPT)
    told = command("doctor", "--batch", str(tmp_path / "run.sh")).out
    assert "ML-5394" in told and "unknown to Megatron" not in told
    assert "not set in this file: $MORE_ARGS. Set such a variable in the environment" in told


@pytest.mark.parametrize(
    "options, problem",
    [
        ("--nproc-per-node 8", ""),
        ("--nproc_per_node=8 --nnodes=$((2 * (1 + 1)))", ""),
        ("--nproc-per-node ${GPUS:?how many}", ""),
        ("--nproc-per-node 3", "Megatron refuses these flags: "),
        ("--nproc-per-node gpu", "torchrun's options are not known as numbers: give --world-size N"),
    ],
)
def test_torchrun_s_options_say_how_many_ranks_there_are(command, tmp_path, monkeypatch, options, problem):
    monkeypatch.setenv("GPUS", "4")
    (tmp_path / "run.sh").write_text(f"torchrun {options} train.py {SMALL} --tensor-model-parallel-size 2")
    told = command("doctor", "--batch", str(tmp_path / "run.sh")).out
    assert problem in told and ("refuses these" in told or "torchrun's" in told) is bool(problem)
    assert "torchrun's" not in command("doctor", "--world-size", "8", "--batch", str(tmp_path / "run.sh")).out


@pytest.mark.parametrize(
    "text, value",
    [
        ("$((8*16))", "128"),
        ("$((GPUS * $NODES - 1))", "15"),
        ("$(( (GPUS+3) / 2 % 4 ))", "1"),
        ("${GPUS:?}", "8"),
        ("$((GPUS ** 2))", "$((GPUS ** 2))"),
        ("$((UNSET + 1))", "$((UNSET + 1))"),
        ("$((8 / 0))", "$((8 / 0))"),
    ],
)
def test_arithmetic_of_a_script_is_done(text, value):
    from megatron_mtp_patches.checks.launch_script import read_commands

    (only,) = read_commands(f"GPUS=8; NODES=2\npython train.py --global-batch-size {text}\n", {})
    assert only.flags == ["--global-batch-size", value]


LOADS = "nothing here shows that this run has the patches: start "


def test_a_script_whose_run_has_no_patches_is_told(command, tmp_path):
    script = tmp_path / "run.sh"

    def is_told(line):
        script.write_text(line)
        return LOADS in command("doctor", "--batch", str(script)).out

    assert is_told(f"torchrun --nproc-per-node 1 train.py {SMALL}")
    assert not is_told(f"torchrun --nproc-per-node 1 -m megatron_mtp_patches run train.py {SMALL}")
    assert not is_told(f"megatron-mtp-patches run train.py {SMALL}")
    assert not is_told(SMALL)
    (tmp_path / "train.py").write_text("import megatron_mtp_patches\n")
    assert not is_told(f"torchrun --nproc-per-node 1 train.py {SMALL}")


@pytest.mark.parametrize("before", ["export MEGATRON_MTP_PATCHES={}\n", "MEGATRON_MTP_PATCHES={} "])
def test_the_patches_are_those_that_the_script_chooses(command, tmp_path, before):
    def ask(choice):
        (tmp_path / "run.sh").write_text(f"{before.format(choice)}python train.py {SMALL} --optimizer muon")
        return command("doctor", "--batch", str(tmp_path / "run.sh"))

    removed = "removed by exempt-muon-from-clipping"
    assert removed in ask("all").out
    without = ask("-exempt-muon-from-clipping")
    assert removed not in without.out and "1 with a defect that is not removed" in without.out
    wrong = ask("exempt-muons")
    assert wrong.code == 2 and "unknown patch 'exempt-muons'" in wrong.out
    assert removed in ask("all").out, "and the next run has what it chooses"


def test_a_misspelt_flag_of_a_script_ends_with_2(command, tmp_path):
    (tmp_path / "run.sh").write_text(f"python train.py {SMALL} --mtp-detach-head")
    done = command("doctor", "--batch", str(tmp_path / "run.sh"))
    assert done.code == 2 and "did you mean --mtp-detach-heads?" in done.out


def test_what_a_script_sets_under_a_condition_is_named(command, tmp_path):
    (tmp_path / "run.sh").write_text(
        f"ARGS='{SMALL}'\nif test $X; then\n  ARGS+=' --optimizer muon'\nfi\ntrain.py $ARGS\n"
    )
    told = command("doctor", "--batch", str(tmp_path / "run.sh")).out
    assert "ML-5394" in told
    assert "conditions are not evaluated: the last value that the file gives counts for ARGS\n" in told


@pytest.mark.parametrize("words", [f"{SMALL} $@", '"$@"', "${@:2}", "$1"])
def test_a_script_that_hands_its_arguments_on_is_told_to_have_them_written_into_it(command, tmp_path, words):
    (tmp_path / "run.sh").write_text(f"#!/bin/bash\ntorchrun --nproc-per-node 8 pretrain_gpt.py {words}\n")
    told = command("doctor", "--batch", str(tmp_path / "run.sh")).out
    assert "with which the script is called. Write these flags into the file\n" in told
    assert "not set in this file" not in told and "unknown to Megatron" not in told
    assert "torchrun's" not in told


def test_a_script_that_starts_no_training_is_no_run(command, tmp_path):
    (tmp_path / "run.sh").write_text(f"#!/bin/bash\nMODEL_ARGS='{SMALL}'\npython prepare.py\n")
    done = command("doctor", "--batch", str(tmp_path / "run.sh"))
    assert done.code == 2 and "no command of this script has a Python file and flags" in done.out
    assert "Runs: 0; " in done.out and "Files without a run: 1." in done.out


def test_the_variable_that_hides_the_flags_is_named_where_megatron_refuses(command, tmp_path):
    (tmp_path / "run.sh").write_text("torchrun pretrain_gpt.py $MODEL_ARGS --bf16")
    done = command("doctor", "--batch", str(tmp_path / "run.sh"))
    assert done.code == 2 and "Megatron refuses these flags: " in done.out
    assert "not set in this file: $MODEL_ARGS" in done.out


@pytest.mark.parametrize("ranks, problem", [("3", "are split over 2 ranks"), ("0", "give a number of ranks")])
def test_a_number_of_ranks_that_cannot_be_is_refused_of_files_too(command, tmp_path, ranks, problem):
    (tmp_path / "run").write_text(f"{SMALL} --tensor-model-parallel-size 2")
    done = command("doctor", "--world-size", ranks, "--batch", str(tmp_path / "run"))
    assert done.code == 2 and (problem in done.out + done.err or "Megatron refuses" in done.out)
