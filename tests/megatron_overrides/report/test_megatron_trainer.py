"""Our metrics appear in Megatron's log line, TensorBoard and W&B. Needs megatron.training: not in the 0.16.1 wheel."""

import argparse
import importlib
import inspect
from types import SimpleNamespace

import pytest
from megatron_mtp_patches.engine.call import Call

from megatron_overrides.report import metrics
from megatron_overrides.report.validation_metrics import evaluated_sets

pytestmark = pytest.mark.forked("patched")

training = pytest.importorskip("megatron.training.training", reason="the 0.16.1 wheel has no megatron.training")
ours = importlib.import_module("megatron_overrides.report.megatron_log")
global_vars = importlib.import_module("megatron.training.global_vars")


class Writer:
    def __init__(self):
        self.scalars = []

    def add_scalar(self, tag, value, iteration):
        self.scalars.append((tag, value, iteration))

    def log(self, scalars, iteration):
        self.scalars += [(tag, value, iteration) for tag, value in scalars.items()]


@pytest.fixture
def heads(monkeypatch):
    """There is one metric of a step."""
    monkeypatch.setattr(metrics, "step_metrics", lambda record: [metrics.Metric("heads", "heads-tag", 3)])


@pytest.fixture
def log(heads, monkeypatch):
    """log(iteration): (lines printed, TensorBoard, W&B) of a training_log with upstream's signature."""

    tensorboard, wandb, lines = Writer(), Writer(), []
    monkeypatch.setattr(global_vars, "get_args", lambda: SimpleNamespace(tensorboard_log_interval=2))
    monkeypatch.setattr(global_vars, "get_tensorboard_writer", lambda: tensorboard)
    monkeypatch.setattr(global_vars, "get_wandb_writer", lambda: wandb)

    def print_line(message):
        ours.append_to_log_line(Call(lambda message: lines.append(message), None, (message,), {}))

    def training_log(loss_dict, iteration):
        print_line(f" iteration {iteration} |")

    def run(iteration):
        ours.log_metrics(Call(training_log, None, ({},), {"iteration": iteration}))
        print_line("outside")
        return lines, tensorboard.scalars, wandb.scalars

    return run


def test_the_log_line_ends_with_our_metrics_and_other_lines_do_not(log):
    lines, _, _ = log(1)
    assert lines == [" iteration 1 | heads:   3 |", "outside"]


def test_the_line_may_be_given_by_its_name():
    lines = []
    ours.append_to_log_line(Call(lambda message: lines.append(message), None, (), {"message": "hello"}))
    assert lines == ["hello"]


def test_writers_get_them_at_their_interval(log):
    _, tensorboard, wandb = log(1)
    assert tensorboard == wandb == []
    _, tensorboard, wandb = log(2)
    assert tensorboard == wandb == [("heads-tag", 3, 2)]


def test_validation_has_the_tags_of_training(monkeypatch):
    tensorboard = Writer()
    monkeypatch.setattr(global_vars, "get_args", SimpleNamespace)
    monkeypatch.setattr(global_vars, "get_tensorboard_writer", lambda: tensorboard)
    monkeypatch.setattr(global_vars, "get_wandb_writer", lambda: None)
    measured = list(metrics.mtp_metrics(losses=[2.0], rates=[50.0], lengths=[1.5, 1.25]))

    def evaluate_and_print_results(prefix, iteration, write_to_tensorboard):
        evaluated_sets.get().append(measured)

    ours.report_heads(Call(evaluate_and_print_results, None, ("iteration 3", 3, True), {}))
    tags = ("mtp_1 loss", "mtp_1_acceptance_rate", "mtp_acceptance_length", "mtp_greedy_acceptance_length")
    assert [tag for tag, _, iteration in tensorboard.scalars if iteration == 3] == [f"{tag} validation" for tag in tags]
    assert [metric.tag for metric in measured] == list(tags)


class Reached(Exception):
    pass


def test_megatron_s_own_training_log_prints_that_line(heads, monkeypatch, capsys):
    def print_at_once():
        training.print_rank_last(" iteration 1 |")
        raise Reached

    monkeypatch.setattr(training, "get_args", print_at_once)  # what training_log begins with
    with pytest.raises(Reached):
        training.training_log(*[None for _ in inspect.signature(training.training_log).parameters])
    assert capsys.readouterr().out == " iteration 1 | heads:   3 |\n"


@pytest.fixture
def run_arguments():
    """Megatron's arguments of a small GPT with two heads."""
    arguments = importlib.import_module("megatron.training.arguments")
    flags = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 16 --mtp-num-layers 2".split()
    args = arguments.add_megatron_arguments(argparse.ArgumentParser()).parse_args(flags)
    args.padded_vocab_size, args.group_query_attention, args.swiglu = 64, False, False
    args.kv_channels, args.ffn_hidden_size = 4, 32
    return args


@pytest.mark.guards("train-mtp-heads-for-acceptance")
@pytest.mark.parametrize("loss_type", ["cross_entropy", "kl", "tv", "lk", "e2e_tv"])
def test_flops_count_the_main_model_s_logits_where_a_loss_needs_them(run_arguments, loss_type):
    expected = training.num_floating_point_operations(run_arguments, 3)
    run_arguments.mtp_loss_type = loss_type
    more = training.num_floating_point_operations(run_arguments, 3) - expected
    assert more == (0 if loss_type == "cross_entropy" else 2 * 3 * 16 * 8 * 64)


@pytest.mark.guards("freeze-base-model-for-mtp")
def test_flops_count_no_backward_pass_of_a_frozen_main_model(run_arguments):
    """The forward pass of two layers and an output layer, the heads, and no gradient of the weight for their logits."""
    tokens, logits = 3 * 16, 2 * 3 * 16 * 8 * 64
    whole = training.num_floating_point_operations(run_arguments, 3)
    run_arguments.mtp_num_layers = None
    main_model = training.num_floating_point_operations(run_arguments, 3)
    layers = 2 * (2 * tokens * (4 * 8 * 8 + 2 * 8 * 32) + 2 * tokens * 16 * 8)  # causal attention counts half
    assert main_model == 3 * (layers + logits)
    run_arguments.mtp_num_layers, run_arguments.freeze_base_model_for_mtp = 2, True
    frozen = training.num_floating_point_operations(run_arguments, 3)
    assert frozen == layers + logits + (whole - main_model) - 2 * logits


def test_flops_of_a_frozen_hybrid_model(run_arguments):
    if not hasattr(run_arguments, "hybrid_layer_pattern"):
        pytest.skip("0.16 counts no heads of hybrid models")
    args = run_arguments
    args.is_hybrid_model = True
    counted = {}
    for pattern, heads in (("*-/*-/*-", 2), ("*-", None)):
        args.hybrid_layer_pattern, args.mtp_num_layers = pattern, heads
        counted[heads] = training.num_floating_point_operations(args, 3)
    args.hybrid_layer_pattern, args.mtp_num_layers, args.freeze_base_model_for_mtp = "*-/*-/*-", 2, True
    frozen = training.num_floating_point_operations(args, 3)
    logits = 2 * 3 * 16 * 8 * 64
    assert frozen == counted[None] / 3 + (counted[2] - counted[None]) - 2 * logits


@pytest.mark.guards("disable-mtp-loss")
def test_flops_count_no_disabled_heads(run_arguments):
    run_arguments.mtp_num_layers = None
    main_model = training.num_floating_point_operations(run_arguments, 3)
    run_arguments.mtp_num_layers, run_arguments.disable_mtp_loss = 2, True
    for loss_type in ("cross_entropy", "tv"):
        run_arguments.mtp_loss_type = loss_type
        assert training.num_floating_point_operations(run_arguments, 3) == main_model
