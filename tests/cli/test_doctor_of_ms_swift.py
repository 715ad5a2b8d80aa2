"""`doctor --batch` of ms-swift: its files, and launch scripts that start it."""

import json

import pytest
from megatron_mtp_patches.doctor.configuration import Configuration
from megatron_mtp_patches.doctor.run_files import read_runs

from .training_flags import SMALL

pytestmark = [pytest.mark.forked("patched"), pytest.mark.usefixtures("trainer")]


@pytest.mark.parametrize(
    "text, is_run",
    [
        ("model: x\nmtp_num_layers: 1\nmtp_detach_heads: true\ndataset: sft.jsonl\n", True),  # of `megatron sft`
        ("mcore_model: x\nmicro_batch_size: 2\n", True),
        ("model: x\ndataset: sft.jsonl\nmtp_loss_scaling_factor: 0.3\n", True),
        ("model: x\ngrad_norm_skip_threshold: 100\n", True),
        ("model: x\nper_device_train_batch_size: 2\nlearning_rate: 1e-4\ndataset: sft.jsonl\n", False),  # `swift sft`
        ("base_model: x\nmicro_batch_size: 2\n", False),  # of a trainer without Megatron
    ],
)
def test_a_file_of_ms_swift_may_lack_what_has_a_default(doctor_of_file, text, is_run):
    told = doctor_of_file(text, name="run.yaml").out
    assert ("Runs: 1; " in told) is is_run
    assert (
        "a setting of MTP heads or of the patches, as an args.json or a YAML file of ms-swift" in told
    ) is not is_run


def test_its_defects_are_those_of_its_arguments(doctor_of_file):
    """Of which a YAML file may lack those with a default, such as `clip_grad`."""
    arguments = {"model": "x", "torch_dtype": "bfloat16", "tensor_model_parallel_size": 2, "optimizer": "muon"}
    for more in ({}, {"clip_grad": 1.0}):
        assert "ML-5394, " in doctor_of_file(json.dumps(arguments | more), name="args.json").out
    assert "ML-5394, " not in doctor_of_file(json.dumps(arguments | {"clip_grad": 0.0}), name="args.json").out


@pytest.mark.parametrize(
    "arguments, hint",
    [
        ({"mtp_clip_grads": 0.1}, "mtp_clip_grads: did you mean mtp_clip_grad?\n"),
        (
            {"optimizer_config": {"mtp_clip_grad": 0.1}},
            "optimizer_config.mtp_clip_grad is not read there: it belongs in ",
        ),
        (
            {"disable_mtp_loss": True},
            "disable_mtp_loss does not act in ms-swift, whose trainer and models do not read it",
        ),
        (
            {"mtp_detach_heads": True},
            "mtp_detach_heads: no effect, because mtp_num_layers is not set, so the model has",
        ),
        ({"mtp_detach_heads": True, "megatron_extra_kwargs": '{"mtp_num_layers": 1}'}, ""),
        ({"muon_split_glu": True}, "splits what Muon orthogonalizes, but the optimizer is adam: "),
        ({"muon_split_glu": "true", "optimizer": "muon"}, ""),
        ({"grad_norm_skip_threshold": "-1e2"}, "(OptimizerConfig.grad_norm_skip_threshold)"),
    ],
)
def test_what_ms_swift_would_not_read_or_the_run_refuse_ends_with_2(doctor_of_file, monkeypatch, arguments, hint):
    monkeypatch.setenv("MEGATRON_MTP_PATCHES", "all")
    done = doctor_of_file(json.dumps({"model": "x", "micro_batch_size": 1, **arguments}), name="args.json")
    assert done.code == (2 if hint else 0) and hint in done.out, done.out


def test_a_file_names_the_variables_of_its_run(doctor_of_file, monkeypatch):
    text = "model: x\nmtp_num_layers: 1\nmtp_loss_type: tv\nENV: {MEGATRON_MTP_PATCHES: %s, NPROC_PER_NODE: 8}\n"
    told = doctor_of_file(text % "all", name="run.yaml")
    assert told.code == 0 and "run.yaml: known defects: 1; 8 ranks\n" in told.out
    assert "they act only after `megatron-mtp-patches enable`\n" in told.out
    told = doctor_of_file(text % "repairs", name="run.yaml")
    assert told.code == 2 and "mtp_loss_type does not act without add-settings-to-ms-swift, " in told.out


COMMANDS = {
    "the program": ("NPROC_PER_NODE=4 NNODES=2 megatron sft --model x $ARGS", 8, True),
    "the program in a string": ('srun --ntasks 2 bash -c "megatron pt --model x $ARGS"', 2, True),
    "its script": ("torchrun --nproc-per-node 8 swift/cli/_megatron/sft.py --model x $ARGS", 8, True),
    "a script that takes its commands": ("torchrun --nproc-per-node=2 my/command.py sft --model x $ARGS", 2, True),
    "a file": ("NPROC_PER_NODE=2 /opt/bin/megatron rlhf run.yaml $ARGS", 2, True),
    "a script of Megatron-LM": (f"torchrun --nproc-per-node 2 train.py sft {SMALL}", 2, False),
}


@pytest.mark.parametrize("line, ranks, is_of_ms_swift", COMMANDS.values(), ids=COMMANDS)
def test_a_command_of_ms_swift_is_read_as_its_arguments(doctor_of_file, tmp_path, line, ranks, is_of_ms_swift):
    (tmp_path / "run.yaml").write_text("model: y\nmtp_num_layers: 2\nENV: {NPROC_PER_NODE: 4}\n")
    arguments = "--mtp-num-layers 1 --lr 1e-3 --mtp_detach_heads --mtp_clip_grads=0.1 --target_modules a b $MORE"
    done = doctor_of_file(f'#!/bin/bash\nMEGATRON_MTP_PATCHES=all\nARGS="{arguments}"\n{line}\n')
    assert f"; {ranks} ranks\n" in done.out
    assert ("mtp_clip_grads: did you mean mtp_clip_grad?" in done.out) is is_of_ms_swift
    assert ("not set in this file: $MORE. " in done.out) is is_of_ms_swift
    ((_, run),) = read_runs(tmp_path / "run.sh")
    assert isinstance(run, Configuration) is is_of_ms_swift
    if is_of_ms_swift:
        values = {"mtp_num_layers": 1, "lr": 1e-3, "mtp_detach_heads": True, "target_modules": ["a", "b"]}
        assert values.items() <= run.content.items() and done.code == 2


def test_a_command_may_lack_the_patches_and_its_file(doctor_of_file, tmp_path):
    lacking = "nothing in this file shows that its run has the patches"
    assert lacking in doctor_of_file("megatron sft --model x --lr 1 --train_iters 2\n").out
    own = "python -m megatron_mtp_patches run command.py sft --model x --train_iters 2\n"
    assert lacking not in doctor_of_file(own).out
    (tmp_path / "command.py").write_text("import swift\n")
    told = doctor_of_file("MEGATRON_MTP_PATCHES=all python command.py sft --model x --train_iters 2\n").out
    assert "MEGATRON_MTP_PATCHES loads no patch: command.py does not" in told and "may lack the patches: 1." in told
    assert "Runs: 0; " in doctor_of_file("python convert.py pt run.yaml\n").out
    assert "unknown to Megatron" in doctor_of_file(f"python train.py pt absent.yaml {SMALL} --new 1\n").out
    done = doctor_of_file("megatron sft run.yaml\n")
    assert done.code == 2 and "run.yaml, which has arguments of ms-swift: it cannot be read: No such file" in done.out


def test_flags_of_ms_swift_are_sent_to_a_launch_script(doctor):
    done = doctor("--model x --micro_batch_size 2 --tensor_model_parallel_size 2")
    assert done.code == 2 and "did you mean" not in done.err
    assert "these are arguments of ms-swift: write its command into a file and give this to --batch\n" in done.err
