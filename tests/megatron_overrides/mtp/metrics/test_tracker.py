"""The log has losses, and acceptance rates per step and so far; the method names of every release work."""

import pytest
import torch
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper as Helper

from megatron_overrides.report.metrics import training_metrics

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("mtp-acceptance-rate")]


class Writer:
    def __init__(self):
        self.scalars = {}

    def add_scalar(self, name, value, iteration):
        self.scalars[name] = float(value)

    def log(self, scalars, iteration):
        self.scalars |= {name: float(value) for name, value in scalars.items()}


@pytest.fixture
def step():
    """step((loss, correct, total) of each head): the scalars of the writers, and the sums for the log line."""
    sums = {"advanced iterations": 0}  # a training log counts its steps beside them

    def run(*heads):
        for depth, (loss, *counts) in enumerate(heads):
            counts = [None if count is None else torch.tensor(count) for count in counts]
            Helper.save_metrics_to_tracker(torch.tensor(loss), *counts, depth, len(heads))
        tensorboard, wandb = Writer(), Writer()
        Helper.track_mtp_metrics(0.5, 1, tensorboard, wandb, sums)
        assert tensorboard.scalars == wandb.scalars
        return tensorboard.scalars, {name: float(value) for name, value in sums.items() if name.startswith("mtp")}

    return run


def test_rates_of_the_step_and_so_far(step):
    assert step((4.0, 3, 4), (6.0, 0, 0))[0] == {
        "mtp_1 loss": 2.0,
        "mtp_2 loss": 3.0,
        "mtp_1_acceptance_rate": 75.0,
        "mtp_2_acceptance_rate": 0.0,
        "mtp_1_cumulative_acceptance_rate": 75.0,
        "mtp_2_cumulative_acceptance_rate": 0.0,
    }
    scalars, sums = step((2.0, 0, 4), (2.0, 1, 2))
    assert scalars["mtp_1_acceptance_rate"] == 0.0 and scalars["mtp_1_cumulative_acceptance_rate"] == 37.5
    assert scalars["mtp_2_acceptance_rate"] == scalars["mtp_2_cumulative_acceptance_rate"] == 50.0
    assert sums == {"mtp_1 loss": 3.0, "mtp_2 loss": 4.0}


def test_a_framework_with_an_empty_dictionary_gets_the_rates_too():
    """verl and ms-swift pass no writer, and report what is in the dictionary."""
    for correct, rate in ((3, 75.0), (1, 25.0)):
        Helper.save_metrics_to_tracker(torch.tensor(4.0), torch.tensor(correct), torch.tensor(4), 0, 1)
        reported = {}
        Helper.track_mtp_metrics(0.5, 1, None, None, reported)
        assert float(reported.pop("mtp_1_cumulative_acceptance_rate")) == (75.0 if correct == 3 else 50.0)
        assert {name: value.item() for name, value in reported.items()} == {
            "mtp_1 loss": 2.0,
            "mtp_1_acceptance_rate": rate,
        }


def test_an_evaluation_that_counts_nothing_reports_no_rate():
    Helper.save_metrics_to_tracker(torch.tensor(4.0), torch.tensor(3), torch.tensor(4), 0, 1)
    Helper.track_mtp_metrics(0.5, 1, None, None, {})
    reported = {}
    Helper.track_mtp_metrics(0.5, 1, None, None, reported)
    assert list(reported) == ["mtp_1 loss"]


def test_rates_are_in_the_log_line_until_others_are_measured(step):
    step((4.0, 3, 4))
    step((4.0, None, None))
    texts = [metric.text for metric in training_metrics() if metric.label.startswith("mtp_1 acc")]
    assert texts == [" mtp_1 acceptance %: 75.000 |", " mtp_1 acceptance % so far: 75.000 |"]


def test_a_step_without_counts_has_losses_only(step):
    step((4.0, 3, 4))
    assert step((4.0, None, None))[0] == {"mtp_1 loss": 2.0}
    assert step((4.0, 0, 4))[0]["mtp_1_cumulative_acceptance_rate"] == 37.5


def test_nemo_rl_finds_its_keys():
    """Its get_mtp_metrics reduces, reads these keys and cleans; it does not call track_mtp_metrics."""
    for _ in range(2):
        Helper.save_metrics_to_tracker(torch.tensor(4.0), torch.tensor(3), torch.tensor(4), 0, 1)
        Helper.save_metrics_to_tracker(torch.tensor(2.0), torch.tensor(1), torch.tensor(4), 0, 1)
        Helper.reduce_metrics_in_tracker()
        losses, correct, total = (Helper.tracker[f"{key}_values"] for key in ("loss", "correct", "total"))
        assert (losses.float() * 0.5).tolist() == [3.0]
        assert (correct / total.clamp(min=1) * 100.0).tolist() == [50.0]
        Helper.clean_metrics_in_tracker()


def test_counts_beyond_what_float32_can_count(step):
    many = 2**24
    step((0.0, many, many))
    scalars, _ = step((0.0, 1, 1))
    counts = Helper.tracker["cumulative_counts"]
    assert counts.flatten().tolist() == [many + 1, many + 1] and counts.dtype == torch.int64
    assert scalars["mtp_1_cumulative_acceptance_rate"] == 100.0


def test_method_names_of_older_releases_work():
    Helper.save_loss_to_tracker(torch.tensor(1.5), 0, 2)
    Helper.save_loss_to_tracker(torch.tensor(1.5), None, 2)
    assert Helper.tracker["values"].tolist() == Helper.tracker["loss_values"].tolist() == [1.5, 0.0]
    Helper.reduce_loss_in_tracker()
    Helper.clean_loss_in_tracker()
    assert not Helper.tracker["values"].any()


def test_method_names_of_older_releases_reduce_and_clean_the_counts_too(monkeypatch):
    reduced = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, **_: reduced.append(tensor.dtype))
    Helper.save_metrics_to_tracker(torch.tensor(1.0), torch.tensor(1), torch.tensor(2), 0, 1, avg_group="ranks")
    Helper.reduce_loss_in_tracker()
    assert reduced == [torch.float32, torch.int64]
    Helper.clean_loss_in_tracker()
    assert not Helper.tracker["correct_values"].any() and not Helper.tracker["total_values"].any()


def test_a_replayed_graph_is_reduced_over_the_groups_it_was_captured_with(monkeypatch):
    """A replay adds to the sums without running the code that sets the groups."""
    reduced = []
    monkeypatch.setattr(
        torch.distributed, "all_reduce", lambda tensor, group, **_: reduced.append((group, tensor.dtype))
    )
    Helper.save_metrics_to_tracker(torch.tensor(1.0), torch.tensor(1), torch.tensor(2), 0, 1, avg_group="ranks")
    Helper.track_mtp_metrics(1.0, 1, None)
    assert reduced == [("ranks", torch.float32), ("ranks", torch.int64)]
    assert Helper.tracker["avg_group"] is None
    Helper.tracker["total_values"] += 2
    Helper.track_mtp_metrics(1.0, 2, None)
    assert reduced[2:] == reduced[:2]
