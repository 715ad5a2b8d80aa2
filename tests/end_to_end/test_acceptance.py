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
    flags += ["--use-distributed-optimizer", "--untie-embeddings-and-output-weights"]
    late, _ = train(*flags, ranks=2)
    early, _ = train(*flags, "--overlap-grad-reduce", ranks=2)
    assert len(late) == 12 and early == late


def test_verification_finds_that_detached_heads_alone_are_trained_for_acceptance(train):
    flags = ["--mtp-num-layers", "2", "--mtp-loss-type", "e2e_tv"]
    _, output = train(*flags, "--mtp-detach-heads", command="verify-mtp")
    assert re.search(r"verify-mtp: the MTP loss has reached \d+ parameters of the heads and nothing else", output)
    _, output = train(*flags, command="verify-mtp", code=1)
    assert re.search(r"parameters of the heads and \d+ others:", output)


def test_the_logarithm_of_the_acceptance_and_weighed_positions_train_the_heads(train):
    def losses(*flags):
        _, output = train("--mtp-num-layers", "2", "--mtp-detach-heads", *flags)
        logged = re.findall(r" mtp_1 loss: (\S+) \|.* mtp_2 loss: (\S+) \|", output)
        assert len(logged) == 12
        return [tuple(map(float, pair)) for pair in logged]

    first, *_, last = losses("--mtp-loss-type", "lk")
    assert last < first and last[1] < first[1]
    plain, weighed = losses(), losses("--mtp-position-weights", "dpace", "--mtp-dpace-alpha", "0.2")
    assert weighed[0] == plain[0] and weighed[-1] != plain[-1]  # the log has no weights, the heads are trained by them
    assert weighed[-1] < weighed[0] and weighed[-1][1] < weighed[0][1]


def test_heads_are_trained_for_acceptance_by_muon(train):
    pytest.importorskip("emerging_optimizers")
    flags = ["--optimizer", "muon", "--mtp-num-layers", "2", "--mtp-detach-heads", "--disable-bias-linear"]
    lines, _ = train(*flags, "--mtp-loss-type", "tv", "--normalization", "RMSNorm")
    lengths = [float(match[0]) for match in LENGTH.findall("".join(rest for *_, rest in lines.values()))]
    assert len(lengths) == 12 and lengths[-1] > lengths[0]
