"""A training whose heads have rates of their own goes on from Megatron's checkpoint as it was.

tests/end_to_end/test_head_rates.py shows it of Megatron's trainer, which the wheel of 0.16.1 lacks.
"""

import pytest
import torch

from .test_frozen_main_model import BF16, DISTRIBUTED, LAYOUTS, Layout, layout, make  # noqa: F401

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("train-mtp-heads-at-own-rate"), pytest.mark.ranks(2)]

RESUMED = {
    "DP2, distributed optimizer": Layout({}, BF16, {"bf16": True, **DISTRIBUTED}),
    "TP2": Layout({"tensor_model_parallel_size": 2}),
    "PP2": LAYOUTS["PP2"],
}
RATES = {"lr": 1e-2, "min_lr": 1e-3, "mtp_lr": 2e-2, "mtp_min_lr": 1e-2, "mtp_weight_decay": 0.3}
STEPS, SAVED_AT = 4, 2


@pytest.fixture
def start(make):  # noqa: F811
    """start(): a training of detached heads, and the schedule of its learning rates and weight decay."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    def build():
        training = make(mtp_detach_heads=True)
        schedule = OptimizerParamScheduler(
            training.optimizer,
            init_lr=0.0,
            max_lr=RATES["lr"],
            min_lr=RATES["min_lr"],
            lr_warmup_steps=2,
            lr_decay_steps=STEPS,
            lr_decay_style="cosine",
            start_wd=0.1,
            end_wd=0.1,
            wd_incr_steps=STEPS,
            wd_incr_style="constant",
        )
        return training, schedule

    return build


@pytest.mark.parametrize(
    "layout",
    [resumed._replace(optimizer={**resumed.optimizer, **RATES}) for resumed in RESUMED.values()],
    indirect=True,
    ids=RESUMED,
)
def test_a_training_goes_on_as_it_was(start, checkpoint, from_all_ranks):
    from megatron.core import dist_checkpointing

    training, schedule = start()
    for number in range(STEPS):
        if number == SAVED_AT:
            dist_checkpointing.save(state_of(training, schedule), checkpoint)
        take_step(training, schedule, number)
    resumed, schedule = start()
    state = dist_checkpointing.load(state_of(resumed, schedule, is_loading=True), checkpoint)
    resumed.bare[0].load_state_dict(state["model"])
    resumed.optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    for number in range(SAVED_AT, STEPS):
        take_step(resumed, schedule, number)
    straight = training.main_model() | training.heads()
    assert all(torch.equal(tensor, straight[name]) for name, tensor in (resumed.main_model() | resumed.heads()).items())
    rates = [
        [(group["lr"], group["weight_decay"]) for group in one.optimizer.param_groups] for one in (resumed, training)
    ]
    assert rates[0] == rates[1]
    assert set(sum(from_all_ranks(rates[0]), [])) >= {(RATES["min_lr"], 0.1), (RATES["mtp_min_lr"], 0.3)}


def take_step(training, schedule, number):
    training.step(number)
    schedule.step(1)


def state_of(training, schedule, is_loading=False):
    """What Megatron's trainer saves."""
    from megatron.core import parallel_state

    (model,) = training.bare
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "distrib_optim_sharding_type": "dp_reshardable",
    }
    sharded = model.sharded_state_dict(metadata=metadata)
    optimizer = training.optimizer.sharded_state_dict(sharded, is_loading=is_loading, metadata=metadata)
    return {"model": sharded, "optimizer": optimizer, "schedule": schedule.state_dict()}
