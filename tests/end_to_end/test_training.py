"""Megatron's own trainer from the wheel (on 0.16.1 a small loop of this repository) with the patches, on CPU ranks."""

import re

import pytest

from .conftest import HAS_TRAINER

pytestmark = pytest.mark.forked("megatron")
needs_trainer = pytest.mark.skipif(
    not HAS_TRAINER,
    reason="the 0.16.1 wheel has no megatron.training; test_layouts.py trains with its checkout's",
)
ALONE = pytest.param((1, []), id="1 rank")
LAYOUTS = [
    ALONE,
    pytest.param((2, ["--use-distributed-optimizer", "--bf16"]), id="DP2", marks=needs_trainer),
    pytest.param((2, ["--pipeline-model-parallel-size", "2"]), id="PP2", marks=needs_trainer),
]
SAVED_AT = 6
AUXILIARY = re.compile(r"load_balancing_loss: (\S+) \|")


@pytest.fixture(scope="module")
def straight(request, train, tmp_path_factory):
    """One uninterrupted run of a layout, with no norm over the threshold: (ranks, flags, log lines, checkpoint)."""
    ranks, flags = request.param
    checkpoint = tmp_path_factory.mktemp("checkpoint")
    lines, output = train(*flags, "--grad-norm-skip-threshold", "1000", "--save", str(checkpoint), ranks=ranks)
    assert len(lines) == 12
    assert float(lines[12][1]) < float(lines[1][1])
    assert "update skipped" not in output
    return ranks, flags, lines, checkpoint


@pytest.mark.parametrize("straight", [ALONE], indirect=True)
def test_training_is_what_it_is_without_the_patch(straight, train):
    _, flags, lines, _ = straight
    plain, _ = train(*flags, patches="-skip-update-on-large-grad-norm")
    assert {i: values[:3] for i, values in plain.items()} == {i: values[:3] for i, values in lines.items()}


@pytest.mark.parametrize("straight", LAYOUTS[:2], indirect=True)
def test_a_step_over_the_threshold_leaves_no_trace(straight, train):
    """The threshold is just under the largest norm: earlier steps are the same, the learning rate does not change."""
    ranks, flags, free, _ = straight
    norms = {iteration: float(values[2]) for iteration, values in free.items()}
    largest = max(norms, key=norms.get)
    second = max(norm for iteration, norm in norms.items() if iteration != largest)
    limited, output = train(*flags, "--grad-norm-skip-threshold", str((norms[largest] + second) / 2), ranks=ranks)
    assert [limited[i][:3] for i in range(1, largest)] == [free[i][:3] for i in range(1, largest)]
    assert limited[largest][2] == free[largest][2]
    skipped = len(re.findall("update skipped: grad norm", output))
    assert skipped >= 1  # the steps after it see other parameters, so another one may be over the threshold
    assert len({values[0] for values in limited.values()}) == len({values[0] for values in free.values()}) - skipped


@needs_trainer
def test_a_loss_of_a_head_that_is_nan_stays_in_the_log_line(train, tmp_path):
    """The first update of the heads is so large that their next loss is NaN; the frozen main model stays finite."""
    flags = ["--lr", "1e38", "--min-lr", "1e38", "--train-iters", "2", "--save", str(tmp_path)]
    lines, _ = train("--freeze-base-model-for-mtp", "--no-check-for-nan-in-loss-and-grad", *flags)
    assert float(lines[1][1]) > 0.0 and "mtp_1 loss" not in lines[1][3]  # Megatron has printed it, before `grad norm`
    assert "| mtp_1 loss: nan |" in lines[2][3]


@pytest.mark.parametrize("layout", [ALONE, LAYOUTS[-1]])
def test_heads_are_detached_clipped_and_counted(train, tmp_path, layout):
    """Their limit applies only to them: the numbers of the main model are the same for every limit."""
    ranks, flags = layout
    flags = [*flags, "--mtp-detach-heads", "--mtp-acceptance-interval", "2"]
    watch = ["--watch-invariants", "4", "--tensorboard-dir", str(tmp_path)]
    tight, output = train(*flags, "--mtp-clip-grad", "0.01", *watch, ranks=ranks)
    loose, _ = train(*flags, "--mtp-clip-grad", "1e6", ranks=ranks)
    assert {i: values[:3] for i, values in tight.items()} == {i: values[:3] for i, values in loose.items()}
    norms = [float(norm) for norm in re.findall(r"mtp grad norm: (\S+) \|", output)]
    assert len(norms) == 12 and min(norms) > 0.01
    if HAS_TRAINER:
        assert read_scalars(tmp_path, "mtp-grad-norm") == pytest.approx(norms, abs=5e-4)
        assert read_scalars(tmp_path, "watch-findings") == [0.0] * output.count("| watch findings:   0 |") == [0.0] * 12
    assert len(set(re.findall(r"mtp_1 acceptance %: +(\S+) \|", output))) > 1
    losses = {name: [values[3] for values in lines.values()] for name, lines in (("tight", tight), ("loose", loose))}
    assert losses["tight"] != losses["loose"]


def read_scalars(folder, tag):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return [event.value for event in EventAccumulator(str(folder)).Reload().Scalars(tag)]


@needs_trainer
def test_verification_finds_detached_heads_alone(train):
    flags = ["--mtp-detach-heads", "--pipeline-model-parallel-size", "2"]
    _, output = train(*flags, ranks=2, command="verify-mtp")
    assert re.search(r"verify-mtp: the MTP loss has reached \d+ parameters of the heads and nothing else", output)
    shares = re.findall(r"verify-mtp: the loss mask counts ([\d,]+) of ([\d,]+) positions \(100.0 %\)", output)
    assert [counted == total != "0" for counted, total in shares] == [True]


@needs_trainer
def test_verification_compares_the_bits_of_a_frozen_main_model(train):
    flags = ["--use-distributed-optimizer", "--bf16", "--freeze-base-model-for-mtp"]
    warm_up = ["--lr-warmup-iters", "2"]  # the first update has a learning rate of 0 and changes nothing
    _, output = train(*flags, *warm_up, ranks=2, command="verify-mtp")
    assert re.search(r"verify-mtp: the MTP loss has reached \d+ parameters of the heads and nothing else", output)
    assert re.search(r"has left \d+ tensors of the main model as they were, to the bit", output)


def test_verification_names_what_else_the_mtp_loss_reaches(train):
    _, output = train(command="verify-mtp", code=1)
    assert re.search(r"parameters of the heads and \d+ others:\n    decoder.final_layernorm.bias\n", output)


@needs_trainer
@pytest.mark.parametrize("straight", LAYOUTS, indirect=True)
def test_a_run_resumes_where_it_was(straight, train):
    ranks, flags, lines, checkpoint = straight
    (checkpoint / "latest_checkpointed_iteration.txt").write_text(str(SAVED_AT))
    load = ("--load", str(checkpoint), "--dist-ckpt-strictness", "log_all")
    resumed, output = train(*flags, "--grad-norm-skip-threshold", "2000", *load, ranks=ranks)
    assert "updates skipped for grad norm:   0 |" in output
    assert sorted(resumed) == list(range(SAVED_AT + 1, 13))
    assert "other patches or settings: --grad-norm-skip-threshold was 1000.0 and is 2000.0" in output
    assert {i: resumed[i][2] for i in resumed} == {i: lines[i][2] for i in resumed}
    assert {i: resumed[i][:2] for i in resumed} == {i: lines[i][:2] for i in resumed}


@needs_trainer
def test_the_logged_auxiliary_loss_of_a_repeated_head_is_a_mean(train):
    """Without the patch, two layers and one head with an auxiliary loss of 1 each are divided by 2 + 3."""
    flags = ["--num-experts", "4", "--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "0.01"]
    flags += ["--mtp-num-layers", "3", "--mtp-use-repeated-layer", "--disable-bias-linear"]
    means = {}
    for patches in ("all", "-average-aux-loss-over-moe-layers"):
        _, output = train(*flags, patches=patches)
        means[patches] = [float(mean) for mean in AUXILIARY.findall(output)]
    _, output = train(*flags, "--freeze-base-model-for-mtp")
    frozen = [float(mean) for mean in AUXILIARY.findall(output)]
    assert len(frozen) == 12 and min(frozen) > 0.95  # of the one head alone
    right, plain = means.values()
    assert len(right) == 12 and min(right) > 0.95
    assert plain == pytest.approx([mean * 3 / 5 for mean in right], rel=1e-5)
