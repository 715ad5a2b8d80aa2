"""Heads for a checkpoint that has none: initialized, trained over a frozen main model, saved whole and resumed."""

import re
from pathlib import Path

import pytest
import torch

from .conftest import HAS_TRAINER

pytestmark = [
    pytest.mark.forked("megatron"),
    pytest.mark.guards("initialize-mtp-heads", "freeze-base-model-for-mtp"),
    pytest.mark.skipif(
        not HAS_TRAINER,
        reason="the 0.16.1 wheel has no megatron.training; tests/multirank/mtp/test_new_heads.py tests its functions",
    ),
]
PP2 = ["--pipeline-model-parallel-size", "2"]
UNTIED = ["--untie-embeddings-and-output-weights"]
TORCH, TORCH_DIST = (["--ckpt-format", name] for name in ("torch", "torch_dist"))
LAYOUTS = {
    "1 rank, torch": (1, TORCH),
    "PP2, untied, torch_dist": (2, [*TORCH_DIST, *PP2, *UNTIED]),
    "PP2, tied, bf16, torch_dist": (2, [*TORCH_DIST, "--bf16", *PP2]),
}
ITERATIONS = ["--train-iters", "4", "--save-interval", "2"]
FROZEN = "--freeze-base-model-for-mtp"
NEW_HEADS = [FROZEN, "--mtp-init", "last-layer", *ITERATIONS]


@pytest.fixture(scope="module")
def make_base(train, tmp_path_factory):
    """make_base(flags, ranks): the checkpoint of a model without heads, made once for each."""
    checkpoints = {}

    def make(flags=TORCH, ranks=1, heads=()):
        key = (*flags, ranks, *heads)
        if key not in checkpoints:
            checkpoints[key] = tmp_path_factory.mktemp("base")
            train(*flags, *ITERATIONS, "--save", str(checkpoints[key]), ranks=ranks, heads=heads)
        return checkpoints[key]

    return make


@pytest.mark.parametrize("layout", LAYOUTS)
def test_heads_are_added_trained_saved_and_resumed(train, make_base, tmp_path, layout):
    ranks, flags = LAYOUTS[layout]
    base = make_base(flags, ranks)
    command = [*flags, *NEW_HEADS, "--pretrained-checkpoint", str(base), "--load", str(tmp_path)]
    command += ["--save", str(tmp_path)]
    straight, output = train(*command, ranks=ranks)
    assert sorted(straight) == [1, 2, 3, 4] and "they were initialized (last-layer)" in output
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    resumed, output = train(*command, ranks=ranks)
    assert sorted(resumed) == [3, 4] and "they were initialized" not in output
    # Megatron logs the first iteration of a process without resetting its sums
    assert resumed[3][:3] == straight[3][:3] and resumed[4][2] == straight[4][2]
    if "torch" in flags:
        assert_main_model_is(base, tmp_path)


def test_heads_go_on_with_the_state_of_a_distributed_optimizer_on_one_stage(train, tmp_path):
    """The other stage has no state, in the layout that Megatron saves by default."""
    flags = [*PP2, "--use-distributed-optimizer", "--bf16", "--ckpt-format", "torch_dist", FROZEN, *ITERATIONS]
    straight, _ = train(*flags, "--save", str(tmp_path), ranks=2)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    resumed, _ = train(*flags, "--load", str(tmp_path), ranks=2)
    assert resumed[3][:3] == straight[3][:3] and resumed[4][2] == straight[4][2]


def assert_main_model_is(base, trained):
    """Each tensor in the files of `base` is the same, to the bit, in those of `trained`."""
    files = sorted(file.relative_to(base) for file in base.glob("iter_0000004/*/model_optim_rng.pt"))
    for file in files:
        old, new = (torch.load(Path(folder, file), weights_only=False)["model"] for folder in (base, trained))
        if "output_layer.weight" not in new:  # of tied embeddings on the last stage
            new["output_layer.weight"] = new["embedding.word_embeddings.weight"]
        tensors = {name: tensor for name, tensor in old.items() if torch.is_tensor(tensor)}
        assert tensors and all(torch.equal(new[name], tensor) for name, tensor in tensors.items())
    assert files


def test_an_unpatched_megatron_loads_what_was_saved(train, make_base, tmp_path):
    train(*TORCH, *NEW_HEADS, "--load", str(make_base()), "--save", str(tmp_path))
    load = [*TORCH, "--load", str(tmp_path), "--no-load-optim", "--no-load-rng", "--train-iters", "5"]
    seen = []
    for patches in ("all", "none"):
        for more in ([], ["--use-checkpoint-args"]):
            lines, output = train(*load, *more, patches=patches)
            ((_, loss, norm, _),) = lines.values()
            seen.append((loss, norm, re.findall(r"mtp_1 loss: (\S+)", output)))
    assert seen == [seen[0]] * 4


def test_the_command_line_says_how_many_heads_there_are(train, make_base, tmp_path):
    load = ["--load", str(make_base()), "--save", str(tmp_path), "--use-checkpoint-args"]
    _, output = train(*TORCH, *NEW_HEADS, *load, "--mtp-num-layers", "2")
    assert re.search(r"mtp_2 loss: \d", output)


def test_a_checkpoint_with_some_of_the_heads_is_refused(train, make_base):
    base = make_base(heads=("--mtp-num-layers", "1"))
    load = [*TORCH, *NEW_HEADS, "--load", str(base), "--mtp-num-layers", "2"]
    _, output = train(*load, code=1)
    assert "initializes all 2 MTP heads, but the checkpoint has only the MTP heads [0]" in output
    _, output = train(*load, "--use-checkpoint-args", code=1)
    assert "initializes all 2 MTP heads, but the checkpoint has 1 MTP heads" in output


def test_the_optimizer_state_of_other_parameters_is_refused(train, make_base, tmp_path):
    """From all parameters to those of the heads, and back; --finetune and --no-load-optim leave the state out."""
    load_whole = [*TORCH, "--load", str(make_base(heads=("--mtp-num-layers", "1"))), FROZEN]
    _, output = train(*load_whole, code=1)
    assert "is of a run without --freeze-base-model-for-mtp, so it has the optimizer state of the whole" in output
    train(*load_whole, "--finetune", "--train-iters", "1", "--save", str(tmp_path))
    load_heads = [*TORCH, "--load", str(tmp_path), "--train-iters", "2", "--override-opt_param-scheduler"]
    _, output = train(*load_heads, code=1)
    assert "is of a run with --freeze-base-model-for-mtp, so it has the optimizer state of the MTP heads" in output
    lines, _ = train(*load_heads, "--no-load-optim")
    assert list(lines) == [2]


def test_a_checkpoint_without_a_part_of_the_main_model_is_refused(train, make_base, tmp_path):
    base = make_base()
    state = torch.load(base / "iter_0000004" / "mp_rank_00" / "model_optim_rng.pt", weights_only=False)
    del state["model"]["decoder.layers.1.mlp.linear_fc1.weight"]
    folder = tmp_path / "iter_0000004" / "mp_rank_00"
    folder.mkdir(parents=True)
    torch.save(state, folder / "model_optim_rng.pt")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    _, output = train(*TORCH, *NEW_HEADS, "--load", str(tmp_path), code=1)
    assert "lacks decoder.layers.1.mlp.linear_fc1.weight" in output


def test_without_mtp_init_the_error_of_missing_heads_names_it(train, make_base):
    """In the format torch Megatron loads the rest, and the heads start at random."""
    load = ["--pretrained-checkpoint", str(make_base(TORCH_DIST)), "--finetune"]
    _, output = train(*TORCH_DIST, *ITERATIONS, *load, code=1)
    assert "If the checkpoint has no MTP heads, --mtp-init initializes them." in output


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--mtp-init", "last-layer"], "add --load or --pretrained-checkpoint"),
        (["--mtp-init", "zero", "--load", "x"], "must be one of random, last-layer, not 'zero'"),
        (["--mtp-init", "random", "--load", "x"], "there is no checkpoint in x"),
    ],
)
def test_what_cannot_start_is_refused(train, flags, message):
    _, output = train(*flags, code=1)
    assert message in output
