"""`doctor --batch` of ms-swift: its files, and launch scripts that start it."""

import json

import pytest
from megatron_mtp_patches.doctor.configuration import Configuration, find_problems
from megatron_mtp_patches.doctor.run_files import read_runs
from megatron_mtp_patches.engine import UsageError

from .training_flags import SMALL

pytestmark = [pytest.mark.forked("patched"), pytest.mark.usefixtures("trainer")]


@pytest.fixture
def read(tmp_path):
    """read(text, name="run.sh"): the run of such a file."""

    def run(text, name="run.sh"):
        file = tmp_path / name
        file.write_text(text)
        ((_, one),) = read_runs(file)
        return one

    return run


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
def test_a_file_of_ms_swift_may_lack_what_has_a_default(read, text, is_run):
    if is_run:
        assert isinstance(read(text, "run.yaml"), Configuration)
    else:
        with pytest.raises(UsageError, match="or a setting of MTP heads or of the patches, as an args.json or a YAML"):
            read(text, "run.yaml")


@pytest.mark.parametrize(
    "arguments, problem",
    [
        ({"mtp_clip_grads": 0.1}, "mtp_clip_grads: did you mean mtp_clip_grad?"),
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
def test_what_ms_swift_would_not_read_or_the_run_refuse_is_named(read, arguments, problem):
    run = read(json.dumps({"model": "x", "micro_batch_size": 1, **arguments}), "args.json")
    problems = find_problems(run)
    assert (problem in "".join(problems)) and bool(problems) is bool(problem)


def test_a_file_names_the_variables_of_its_run_and_its_defects_are_those_of_its_arguments(doctor_of_file):
    text = "model: x\nmtp_num_layers: 1\nmtp_loss_type: tv\noptimizer: muon\n"
    told = doctor_of_file(text + "ENV: {MEGATRON_MTP_PATCHES: repairs, NPROC_PER_NODE: 8}\n", name="run.yaml")
    assert told.code == 2 and "mtp_loss_type does not act without add-settings-to-ms-swift, " in told.out
    assert "; 8 ranks\n" in told.out and "they act only after `megatron-mtp-patches enable`\n" in told.out
    assert "* ML-5394, " in told.out  # by the default of `clip_grad`


COMMANDS = {
    "the program": ("NPROC_PER_NODE=4 NNODES=2 megatron sft --model x $ARGS", 8),
    "the program in a string": ('srun --ntasks 2 bash -c "megatron pt --model x $ARGS"', 2),
    "its script": ("torchrun --nproc-per-node 8 swift/cli/_megatron/sft.py --model x $ARGS", 8),
    "a script that takes its commands": ("torchrun --nproc-per-node=2 my/command.py sft --model x $ARGS", 2),
    "a file": ("NPROC_PER_NODE=2 /opt/bin/megatron rlhf run.yaml $ARGS", 2),
}


@pytest.mark.parametrize("line, ranks", COMMANDS.values(), ids=COMMANDS)
def test_a_command_of_ms_swift_is_read_as_its_arguments(read, tmp_path, line, ranks):
    (tmp_path / "run.yaml").write_text("model: y\nmtp_num_layers: 2\nENV: {NPROC_PER_NODE: 4}\n")
    arguments = "--mtp-num-layers 1 --lr 1e-3 --mtp_detach_heads --mtp_lr=0.1 --target_modules a b $MORE"
    run = read(f'#!/bin/bash\nMEGATRON_MTP_PATCHES=all\nARGS="{arguments}"\n{line}\n')
    values = {"mtp_num_layers": 1, "lr": 1e-3, "mtp_detach_heads": True, "mtp_lr": 0.1, "target_modules": ["a", "b"]}
    assert values.items() <= run.content.items() and "ENV" not in run.content
    assert (run.sources[0].world_size, run.patches) == (ranks, "all")
    assert any(note.startswith("not set in this file: $MORE. ") for note in run.notes)


@pytest.mark.parametrize(
    "line", [f"python train.py sft {SMALL}", f"python train.py pt absent.yaml {SMALL}", "python a.py --model x"]
)
def test_other_commands_are_not_of_ms_swift(read, line):
    assert not isinstance(read(line), Configuration)


def test_a_command_may_lack_the_patches_and_its_file(read, tmp_path):
    assert not read("megatron sft --model x --lr 1 --train_iters 2\n").shows_patches
    assert read("MEGATRON_MTP_PATCHES=all megatron sft --model x\n").shows_patches
    assert read("python -m megatron_mtp_patches run command.py sft --model x --train_iters 2\n").shows_patches
    (tmp_path / "command.py").write_text("import swift\n")
    run = read("MEGATRON_MTP_PATCHES=all python command.py sft --model x --train_iters 2\n")
    assert not run.shows_patches and "MEGATRON_MTP_PATCHES loads no patch: command.py does not" in "".join(run.notes)
    with pytest.raises(UsageError, match="no command of this script has a Python file and flags, or is `megatron"):
        read("#!/bin/bash\npython convert.py pt run.yaml\n")
    with pytest.raises(UsageError, match="run.yaml, which has arguments of ms-swift: it cannot be read: No such file"):
        read("megatron sft run.yaml\n")


def test_flags_of_ms_swift_are_sent_to_a_launch_script(doctor):
    done = doctor("--model x --micro_batch_size 2 --tensor_model_parallel_size 2")
    assert done.code == 2 and "did you mean" not in done.err
    assert "these are arguments of ms-swift: write its command into a file and give this to --batch\n" in done.err
