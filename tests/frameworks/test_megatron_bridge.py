"""Megatron-Bridge's own `pretrain` trains MTP heads with the patches, and shows what Megatron-LM's trainer shows."""

import re
from functools import partial

import pytest

from tests.end_to_end.conftest import run_command
from tests.warm.processes import run_ranks

from .bridge_runs import EXPERTS, HERE, pretrain, rank_lines, read_events, read_scalars, run_interpreter, words
from .flipped_bit import FLIPPED, flip_bit

pytestmark = [pytest.mark.forked("bridge"), pytest.mark.guards("log-metrics-in-megatron-bridge")]

WATCHED = ("optimizer.watch_invariants=1", "optimizer.watch_action=raise")
SETTINGS = (
    "model.mtp_detach_heads=True",
    "optimizer.mtp_clip_grad=0.05",
    "optimizer.grad_norm_skip_threshold=1.7",
    "optimizer.min_clip_coefficient=0.01",
    *WATCHED,
)
CHANGING = re.compile("elapsed time|so far|cumulative")  # in a resumed run
ACCEPTANCE = (
    "optimizer.grad_norm_skip_threshold=100.0",
    "model.mtp_loss_type=tv",
    "model.mtp_logits_chunk_size=16",
    "model.mtp_depth_weights='2'",
    "model.mtp_loss_scaling_schedule='0:0.3,80%:0'",
    "scheduler.lr_decay_style=linear",
    "scheduler.lr_decay_iters=8",
)
# What Megatron-LM's own training log ends with, with the same settings.
METRICS = [
    "mtp grad norm",
    "updates skipped for grad norm",
    "mtp updates skipped for grad norm",
    "watch findings",
    "mtp_1 acceptance %",
    "mtp_1 acceptance % so far",
]
TAGS = {"mtp-grad-norm", "updates-skipped-for-grad-norm", "mtp-updates-skipped-for-grad-norm", "watch-findings"}


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("bridge")


@pytest.fixture(scope="session")
def trained(folder):
    """Four steps on two ranks, of which the threshold skips some."""
    return pretrain(folder, 4, *SETTINGS, "logger.filter_warnings=False", ranks=2)


@pytest.fixture(scope="session")
def resumed(folder, trained):
    """Two more on one rank, from the checkpoint; the heads now train for acceptance, in chunks of rows, and once."""
    return pretrain(folder, 6, *SETTINGS, *ACCEPTANCE, "checkpoint.save_interval=1")


@pytest.fixture(scope="session")
def repeated(folder, resumed):
    """The last of them once more, from the checkpoint before it."""
    log = f"logger.tensorboard_dir={folder / 'repeated'}"
    start = ("checkpoint.ckpt_step=5", "checkpoint.save=null")
    return pretrain(folder, 6, *SETTINGS, *ACCEPTANCE, *start, log)


def test_the_log_line_shows_what_megatron_lm_s_shows(trained):
    lines, _ = trained
    assert list(lines) == [1, 2, 3, 4]
    assert all(list(metrics) == METRICS for _, metrics in lines.values())
    skips = [skipped for skipped, _ in lines.values()]
    assert True in skips and not skips[0]
    for iteration, (_, metrics) in lines.items():
        assert int(metrics["updates skipped for grad norm"]) == sum(skips[:iteration])
        assert float(metrics["mtp grad norm"]) > 0.0 and int(metrics["watch findings"]) == 0


def test_validation_measures_the_heads(trained):
    _, output = trained
    lines = re.findall(r"validation of the MTP heads at iteration 4 on (\w+) set \|(.*)", output)
    assert [place for place, _ in lines] == ["validation", "test"]
    assert all("mtp_1 loss value: " in line and "mtp acceptance length value: 1." in line for _, line in lines)


def test_tensorboard_has_each_number_once(folder, trained, resumed):
    events = read_events(folder / "tensorboard")
    logged = events.Tags()["scalars"]
    heads = {"mtp_1 loss", "mtp_1_acceptance_rate", "mtp_acceptance_length"}
    assert {*TAGS, *heads, *(f"{tag} validation" for tag in heads)} <= set(logged)
    lines = trained[0] | resumed[0]
    for tag, metric in (("mtp-grad-norm", "mtp grad norm"), ("mtp_1_acceptance_rate", "mtp_1 acceptance %")):
        scalars = events.Scalars(tag)
        assert [scalar.step for scalar in scalars] == list(lines)
        assert [f"{scalar.value:.3f}" for scalar in scalars] == [metrics[metric] for _, metrics in lines.values()]
    losses = re.findall(r" lm loss: (\S+) \|", resumed[1])  # of each step: Bridge's log does not have ML-6238
    assert [f"{scalar.value:.6E}" for scalar in events.Scalars("lm loss")[-2:]] == losses and losses[0] != losses[1]


def test_training_goes_on_from_the_checkpoint(trained, resumed):
    assert list(resumed[0]) == [5, 6]
    assert "loaded checkpoint" in resumed[1]


def test_a_resume_with_other_rates_names_the_setting(folder, trained):
    settings = (*SETTINGS, "optimizer.mtp_lr=0.0625", "checkpoint.save=null")
    (ended,) = run_ranks(1, partial(run_command, "all", *words(folder, 6, settings)))
    assert ended.code == 1 and "only this run has a group with max_lr 0.0625" in ended.output, ended.output[-3000:]
    assert "--mtp-lr (OptimizerConfig.mtp_lr)" in ended.output


def test_heads_train_for_acceptance(resumed):
    lengths = ["mtp acceptance length", "mtp greedy acceptance length"]
    assert all(list(metrics) == [*METRICS, *lengths, "mtp loss scaling factor"] for _, metrics in resumed[0].values())
    assert all(1.0 < float(metrics[lengths[0]]) < 2.0 for _, metrics in resumed[0].values())


def test_a_resumed_run_logs_what_the_uninterrupted_one_logs(folder, resumed, repeated):
    """All but times, and the rate so far: validation has the loss after the update."""
    lines = [re.findall(r" iteration +6/.*", output)[0].split("|") for _, output in (resumed, repeated)]
    uninterrupted, after_resume = ([part for part in line if not CHANGING.search(part)] for line in lines)
    assert uninterrupted == after_resume and len(uninterrupted) > 14
    scalars = [read_scalars(folder / name, step=6) for name in ("tensorboard", "repeated")]
    uninterrupted, after_resume = ({tag: one[tag] for tag in one if not CHANGING.search(tag)} for one in scalars)
    assert uninterrupted == after_resume and {"learning-rate", "lm loss validation"} < set(uninterrupted)


def test_skipped_updates_are_counted_since_the_process_started(trained, resumed):
    name = "updates skipped for grad norm"
    assert int(trained[0][4][1][name]) > 0 and int(resumed[0][5][1][name]) == 0


@pytest.mark.guards("schedule-mtp-loss-weight-in-megatron-bridge")
def test_the_loss_has_the_weight_of_its_schedule(resumed):
    """80 % of six iterations: the last one has the weight 0."""
    weights = [metrics["mtp loss scaling factor"] for _, metrics in resumed[0].values()]
    norms = [float(metrics["mtp grad norm"]) for _, metrics in resumed[0].values()]
    assert weights == ["0.300", "0.000"] and norms[0] > 0.0 and norms[1] == 0.0


def test_the_saved_configuration_says_what_was_patched(folder, trained):
    import megatron_mtp_patches
    import yaml

    (file,) = folder.glob("checkpoints/iter_0000004/run_config.yaml")
    saved = yaml.safe_load(file.read_text())
    assert saved["model"]["mtp_detach_heads"] is True and saved["optimizer"]["mtp_clip_grad"] == 0.05
    assert saved["logger"]["megatron_mtp_patches"].startswith(f"{megatron_mtp_patches.__version__} skip-update-on-")


def test_parity_reads_the_saved_configuration(folder, trained):
    """It trains such a run in test_bridge_parity.py."""
    import yaml
    from megatron_mtp_patches.parity.cuts import list_cuts
    from megatron_mtp_patches.parity.frameworks.megatron_bridge import BridgeRun

    (file,) = folder.glob("checkpoints/iter_0000004/run_config.yaml")
    small = BridgeRun(yaml.safe_load(file.read_text())).shrink("fp32")
    assert [cut.name for cut in list_cuts(small, 2)] == ["DP2"]
    assert {"dataset", "checkpoint"} <= {flag.name for flags in small.left_out.values() for flag in flags}


READ = """
import sys
sys.path.insert(0, {stand_in!r})
from megatron.bridge.training.utils.checkpoint_utils import read_run_config
from megatron.bridge.utils.instantiate_utils import instantiate
saved = read_run_config({file!r})
print("read", *(type(instantiate(saved[name])).__name__ for name in ("model", "optimizer", "logger")))
"""


@pytest.mark.real_process("the patches are in this one")
def test_a_bridge_without_the_patches_reads_it(folder, trained, tmp_path):
    (file,) = folder.glob("checkpoints/iter_0000004/run_config.yaml")
    script = tmp_path / "read.py"
    script.write_text(READ.format(stand_in=str(HERE.parent / "stand_ins" / "nvrx"), file=str(file)))
    _, output = run_interpreter("none", "run", "--device", "cpu", str(script))
    assert "read GPTModelProvider OptimizerConfig LoggerConfig" in output, output[-3000:]
    assert re.search("Dropping unexpected config keys.*'clip_orthogonalizing_optimizers'", output)


@pytest.mark.real_process("verify-mtp has patches of its own, which Bridge must not come before")
def test_heads_train_alone_and_the_main_model_keeps_its_bits(tmp_path):
    words = [str(HERE / "bridge_pretrain.py"), str(tmp_path), "3", "model.freeze_base_model_for_mtp=True"]
    code, output = run_interpreter("all", "verify-mtp", "--device", "cpu", *words)
    assert code == 0, output[-3000:]
    assert re.search(r"has left \d+ tensors of the main model as they were, to the bit", output)


def set_idle(patches, folder, *paths):
    """Give a run in this process these settings in each way. It prints why they are refused: WAYS times."""
    run_command(patches, "run", "--device", "cpu", str(HERE / "bridge_idle_settings.py"), str(folder), *paths)


WAYS = 4
# {a setting that does not act: what is said of it}
PROBLEMS = {
    "model.mtp_detatch_heads": "model.mtp_detatch_heads: did you mean model.mtp_detach_heads?",
    "optimizer.mtp_clip_grd": "optimizer.mtp_clip_grd: did you mean optimizer.mtp_clip_grad?",
    "model.mtp_clip_grad": "model.mtp_clip_grad is not read there: it belongs in optimizer",
    "mtp_detach_heads": "mtp_detach_heads is not read there: it belongs in model",
    "train.mtp_loss_type": "train.mtp_loss_type is not read there: it belongs in model",
    "ddp.mtp_loss_tpye": "ddp.mtp_loss_tpye: did you mean model.mtp_loss_type?",
    "logger.mtp_lr": "logger.mtp_lr is not read there: it belongs in optimizer",
}


def test_settings_that_do_not_act_are_refused_together(tmp_path):
    (ended,) = run_ranks(1, partial(set_idle, "all", tmp_path, *PROBLEMS))
    assert ended.code == 1 and "iteration " not in ended.output
    lines = ended.output.replace("ValueError: ", "").splitlines()
    assert {line: lines.count(line) for line in PROBLEMS.values()} == dict.fromkeys(PROBLEMS.values(), WAYS)


def test_the_log_says_which_settings_a_run_has(trained):
    _, output = trained
    line = "settings of the patches: grad_norm_skip_threshold=1.7, min_clip_coefficient=0.01, mtp_clip_grad=0.05, "
    assert output.count(f"{line}mtp_detach_heads=True") == 1


def test_a_loss_of_nan_stays_in_the_log_line(tmp_path):
    """Megatron-Bridge prints the losses that are not smaller than 0. The first update is as large as bf16 can hold.

    The auxiliary loss is the mean over the heads: the frozen layers have none.
    """
    steps, output = pretrain(tmp_path, 2, "model.freeze_base_model_for_mtp=True", "optimizer.lr=1e38", *EXPERTS)
    losses = [metrics.get("mtp_1 loss") for _, metrics in steps.values()]
    assert losses == [None, "nan"]  # LOG_LINE begins behind the losses that Bridge prints
    assert float(re.search(r" load_balancing_loss: (\S+) \|", output)[1]) == pytest.approx(1.0)


def test_a_watch_names_a_bit_that_flips_on_a_rank(tmp_path, trained):
    """In the second step of two microbatches, with Muon; `trained` and `resumed` are watched, and have no finding."""

    def train(*words):
        flip_bit(passes=2)
        run_command("all", *words)

    assert trained[1].count("watch: compares") == 2  # before there are moments, and then
    layout = ("model.tensor_model_parallel_size=2", "optimizer.optimizer=muon")
    short = ("checkpoint.save=null", "checkpoint.load=null")
    ended = run_ranks(2, partial(train, *words(tmp_path, 2, (*WATCHED, *layout, *short))))
    assert f"WatchError: watch, step 2: copies differ: weight {FLIPPED} 0:64" in "".join(rank.output for rank in ended)


@pytest.mark.guards("pass-loss-mask-in-megatron-bridge")
def test_the_loss_mask_reaches_the_heads():
    """As the part of each context-parallel rank, packed or not; the heads get the gradient of Megatron-LM's trainer."""
    words = ["run", "--device", "cpu", str(HERE / "bridge_masks.py")]
    ended = run_ranks(2, partial(run_command, "all", *words))
    output = "".join(rank.output for rank in ended)
    assert {rank.code for rank in ended} == {0}, output[-6000:]
    lines = rank_lines(output)
    assert lines["whole"] == lines["packed"] == ["right", "right"]
    assert lines["gradient as of Megatron-LM's trainer"] == lines["blind to masked labels"] == ["True", "True"]
