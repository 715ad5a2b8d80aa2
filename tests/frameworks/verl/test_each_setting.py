"""Each setting of the patches alone, in verl's TrainingWorker: it trains, or is refused by its name."""

import math

import pytest
from megatron_mtp_patches.catalog import SETTINGS
from megatron_mtp_patches.declarations.settings import OPTIMIZER_CONFIG

from tests.conformance.inspection import choose_value

from .ppo import update

pytestmark = pytest.mark.forked("verl")

EDITS = {edit.field: edit for edit in SETTINGS}
# Values that a run under verl can have, where the one of other tests is not.
VALUES = {
    "mtp_dpace_alpha": 0.3,
    "mtp_loss_scaling_schedule": "0:0.3,4:0.1",
    "grad_norm_group": ["router=router:1.0"],
    "mtp_min_lr": 1e-3,
}
SCHEDULE = {"mtp_loss_scaling_schedule": "0:0.3,4:0.1"}
# What a setting of the model, or of the optimizer, needs beside it.
NEEDED_OF_MODEL = {
    "mtp_dpace_alpha": {"mtp_position_weights": "dpace"},
    "mtp_loss_scaling_schedule_style": SCHEDULE,
    "mtp_clip_grad": {"mtp_detach_heads": True},
    "mtp_grad_norm_skip_threshold": {"mtp_detach_heads": True},
    "moe_global_aux_loss_over_data_parallel": {"moe_router_load_balancing_type": "global_aux_loss"},
}

# What cannot work there is refused by name.
REFUSALS = {
    "disable_mtp_loss": "disable_mtp_loss cannot skip the heads of this model.*mtp.enable_train=false of verl",
    "muon_split_gdn": r"\(\w+Config.muon_split_gdn\) has nothing to split: the model has no GatedDeltaNet",
}


def values_of(edit):
    if edit.setting.choices:
        return [value for value in edit.setting.choices if value != edit.default]
    return [VALUES.get(edit.field, choose_value(edit))]


@pytest.mark.parametrize("name, value", [(name, value) for name, edit in EDITS.items() for value in values_of(edit)])
def test_training_runs_with_a_setting_alone_or_refuses_it(make_worker, make_batch, name, value):
    is_optimizer_s = EDITS[name].target == OPTIMIZER_CONFIG
    model = NEEDED_OF_MODEL.get(name, {}) | ({} if is_optimizer_s else {name: value})
    optimizer = {name: value} if is_optimizer_s else {}

    def train():
        return update(make_worker(model, optimizer, name="muon" if "muon" in name else "adam"), make_batch())

    if name in REFUSALS:
        with pytest.raises((ValueError, NotImplementedError), match=REFUSALS[name]):
            train()
        return
    metrics = train()
    assert all(math.isfinite(number) for numbers in metrics.values() for number in numbers)
    assert metrics["mtp_losses/mtp_1_loss"][0] > 0.0 and metrics["grad_norm"][0] > 0.0


def test_a_limit_for_heads_without_a_separate_norm_is_refused_by_its_name(make_worker):
    with pytest.raises(ValueError, match=r"\(\w+Config.mtp_clip_grad\) needs MTP heads with a separate norm"):
        make_worker(optimizer={"mtp_clip_grad": 0.05})
