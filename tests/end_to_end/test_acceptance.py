"""Heads trained for acceptance through Megatron's own trainer: what the log, the validation and the FLOPs show."""

import re

import pytest

from .test_training import needs_trainer

pytestmark = [
    pytest.mark.forked("megatron"),
    pytest.mark.guards("mtp-acceptance-length", "train-mtp-heads-for-acceptance"),
    needs_trainer,
]

EVALUATE = ["--eval-interval", "6", "--eval-iters", "2", "--mtp-num-layers", "2"]
LENGTH = re.compile(r" mtp acceptance length: (\S+) \| mtp greedy acceptance length: (\S+) \|")
VALIDATION = re.compile(
    r" validation of the MTP heads at (.*?) \| mtp_1 loss value: (\S+) \| mtp_2 loss value: (\S+) \| mtp_1 acceptance %"
    r" value: \S+ \| mtp_2 acceptance % value: \S+ \| mtp acceptance length value: (\S+) \|"
    r" mtp greedy acceptance length value: (\S+) \|"
)
LAYOUTS = [
    pytest.param((2, ["--use-distributed-optimizer", "--bf16"]), id="DP2"),
    pytest.param((2, ["--pipeline-model-parallel-size", "2", "--untie-embeddings-and-output-weights"]), id="PP2"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_log_and_the_validation_show_the_accepted_length(train, layout):
    ranks, flags = layout
    lines, output = train(*flags, *EVALUATE, "--mtp-loss-type", "e2e_tv", "--mtp-detach-heads", ranks=ranks)
    lengths = [tuple(map(float, match)) for match in LENGTH.findall("".join(rest for *_, rest in lines.values()))]
    assert len(lengths) == len(lines) == 12
    assert all(1 < one <= 3 and 1 <= two <= 3 for one, two in lengths)
    assert lengths[-1][0] > lengths[0][0]
    first, *_ = VALIDATION.findall(output)
    where, loss_1, loss_2, length, _ = first
    assert where == "iteration 6"
    # The mean accepted length is what the losses of both depths leave of it.
    assert float(length) == pytest.approx(3 - float(loss_1) - float(loss_2), abs=2e-4)


def test_training_is_the_same_with_and_without_validation_of_the_heads(train):
    with_heads, output = train(*EVALUATE)
    without, silent = train(*EVALUATE, "--no-mtp-eval")
    assert VALIDATION.search(output) and not VALIDATION.search(silent)
    assert with_heads == without
    actual, expected = (re.findall(r"validation loss at .*?lm loss value: (\S+)", each) for each in (output, silent))
    assert actual == expected and len(actual) >= 2


def test_attached_heads_train_alike_with_gradients_reduced_early(train):
    """The output layer gets gradients from the main model and from each chunk; DDP must wait for all of them."""
    flags = ["--mtp-num-layers", "2", "--mtp-loss-type", "kl", "--mtp-logits-chunk-size", "16"]
    flags += ["--use-distributed-optimizer", "--untie-embeddings-and-output-weights", "--train-iters", "4"]
    late, _ = train(*flags, ranks=2)
    early, _ = train(*flags, "--overlap-grad-reduce", ranks=2)
    assert len(late) == 4 and early == late
