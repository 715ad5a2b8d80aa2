"""The logged auxiliary loss is the mean over the MoE layers: 1 where each of them adds 1."""

import importlib
from types import SimpleNamespace

import pytest
import torch
from megatron_mtp_patches.engine.call import Call
from megatron_mtp_patches.engine.source import find_file

from megatron_overrides.frameworks import bridge
from megatron_overrides.report.megatron_log import mark_training_log
from megatron_overrides.report.metrics import logged_run
from megatron_overrides.scoped import scoped

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("average-aux-loss-over-moe-layers")]

MOE = "megatron.core.transformer.moe"
HAS_TRACKER = bool(find_file(f"{MOE}.moe_logging"))  # since 0.18; 0.16 and 0.17 have functions in its place
NAME = "load_balancing_loss"
GPT = {"num_layers": 4, "moe_layer_freq": 1, "mtp_num_layers": None}
HYBRID = {"num_layers": 4, "moe_layer_freq": 1, "mtp_num_layers": 3, "hybrid_layer_pattern": "ME|*E/*E/*E/*E"}
FROZEN = {"freeze_base_model_for_mtp": True}
DISABLED = {"disable_mtp_loss": True}
DENSE_LAST = {**GPT, "moe_layer_freq": 2}
# A run, and how many MoE layers it has.
RUNS = [
    pytest.param(GPT, 4, id="no heads"),
    pytest.param({**GPT, "moe_layer_freq": None}, 4, id="no frequency"),
    pytest.param({**GPT, "mtp_num_layers": 3}, 7, id="heads"),
    pytest.param({**GPT, "mtp_num_layers": 3, "mtp_use_repeated_layer": True}, 5, id="repeated head"),
    pytest.param({**GPT, "mtp_use_repeated_layer": True}, 4, id="repeated, but no head"),
    pytest.param(DENSE_LAST, 2, id="dense last layer"),
    pytest.param({**DENSE_LAST, "mtp_num_layers": 3}, 2, id="dense heads"),
    pytest.param({**GPT, "moe_layer_freq": [0, 0, 1, 1], "mtp_num_layers": 3}, 5, id="a list"),
    pytest.param({**GPT, "moe_layer_freq": [1, 1, 1, 0], "mtp_num_layers": 3}, 3, id="a list that ends dense"),
    pytest.param(HYBRID, 5, id="hybrid"),
    pytest.param({**HYBRID, "mtp_use_repeated_layer": True}, 3, id="hybrid with a repeated head"),
    pytest.param({**HYBRID, "hybrid_layer_pattern": "ME|*E/*M/*M/*M"}, 2, id="hybrid with dense heads"),
    pytest.param({**GPT, "hybrid_layer_pattern": "ME|*E"}, 2, id="hybrid without heads"),
    pytest.param({**GPT, "mtp_num_layers": 3, **FROZEN}, 3, id="heads over a frozen main model"),
    pytest.param({**HYBRID, **FROZEN}, 3, id="hybrid, heads over a frozen main model"),
    pytest.param({**GPT, "mtp_num_layers": 3, **DISABLED}, 4, id="disabled heads"),
    pytest.param({**HYBRID, **DISABLED}, 2, id="hybrid, disabled heads"),
    pytest.param({**GPT, "hybrid_override_pattern": "ME*E"}, 2, id="hybrid of 0.16"),
]


@pytest.fixture
def record():
    """record(losses): as if routers had put these into their slots."""

    def fill(losses):
        values = torch.tensor(losses)
        if HAS_TRACKER:
            logging = importlib.import_module(f"{MOE}.moe_logging")
            logging.destroy_moe_metrics_tracker()
            for number in range(1, len(losses) + 1):
                logging.get_moe_metrics_tracker().record(NAME, values[number - 1], number, len(losses))
        else:
            utils = importlib.import_module(f"{MOE}.moe_utils")
            utils.get_moe_layer_wise_logging_tracker().clear()
            for number in range(1, len(losses) + 1):
                utils.save_to_aux_losses_tracker(NAME, values[number - 1], number, len(losses))

    yield fill
    fill([])


@pytest.fixture
def report():
    """report(**settings): the mean that Megatron logs."""

    def ask(**settings):
        totals = {}
        if HAS_TRACKER:
            track = importlib.import_module(f"{MOE}.moe_logging").get_moe_metrics_tracker().report
        else:
            track = importlib.import_module(f"{MOE}.moe_utils").track_moe_metrics
        track(1.0, 1, track_names=[NAME], total_loss_dict=totals, **settings)
        return float(totals[NAME])

    return ask


@pytest.fixture(params=["Megatron-LM", "Megatron-Bridge"])
def log(request, monkeypatch, report):
    """log(run): what training_log logs of a run with these settings, whatever it has counted itself."""

    def ask(run):
        settings = SimpleNamespace(**run)
        training = SimpleNamespace(get_args=lambda: settings)
        monkeypatch.setitem(__import__("sys").modules, "megatron.training.global_vars", training)

        def training_log(config):
            return report(
                num_layers=99,
                moe_layer_freq=run["moe_layer_freq"],
                mtp_num_layers=run["mtp_num_layers"],
                force_initialize=True,
            )

        mark = {"Megatron-LM": mark_training_log, "Megatron-Bridge": bridge.mark_training_log}[request.param]
        return mark(Call(training_log, None, (SimpleNamespace(model=settings),), {}))

    return ask


@pytest.mark.parametrize("run, layers", RUNS)
def test_the_mean_is_over_the_layers_that_have_a_loss(record, log, run, layers):
    record([1.0] * layers + [0.0] * (9 - layers))
    assert log(run) == pytest.approx(1.0)


def test_a_stage_without_experts_has_as_many_slots_as_the_others(record, log):
    record([])
    if HAS_TRACKER:
        metrics = importlib.import_module(f"{MOE}.moe_logging").get_moe_metrics_tracker()._metrics
    else:
        metrics = importlib.import_module(f"{MOE}.moe_utils").get_moe_layer_wise_logging_tracker()
    metrics.clear()
    log(HYBRID)
    values = metrics[NAME].values if HAS_TRACKER else metrics[NAME]["values"]
    assert len(values) == 4 + 3


@pytest.mark.parametrize("run", [None, SimpleNamespace], ids=["no trainer", "Bridge's MIMO models"])
def test_other_callers_are_answered_as_before(record, report, run):
    record([1.0] * 6)
    with scoped(logged_run, run):
        assert report(num_layers=4, moe_layer_freq=2, mtp_num_layers=1) == pytest.approx(6 / 3)


def test_other_callers_may_say_the_number(record, report):
    record([1.0] * 6)
    assert report(num_layers=4, moe_layer_freq=2, mtp_num_layers=2, num_moe_layers=5) == pytest.approx(6 / 5)


@pytest.mark.skipif(not HAS_TRACKER, reason="track_moe_metrics is what `report` tests before 0.18")
def test_the_older_name_takes_the_number_as_well(record):
    totals = {}
    record([1.0] * 6)
    track = importlib.import_module(f"{MOE}.moe_utils").track_moe_metrics
    track(1.0, 1, track_names=[NAME], total_loss_dict=totals, num_layers=6, num_moe_layers=3)
    assert float(totals[NAME]) == pytest.approx(2.0)
