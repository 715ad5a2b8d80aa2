"""A run that resumes has the learning rates of its checkpoint, or with --override-opt-param-scheduler its own."""

import pytest

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("keep-learning-rates-at-resume")]
DECOUPLED = {"lr": 1e-3, "decoupled_lr": 1e-4}


@pytest.fixture
def resume():
    from megatron_mtp_patches.defects.labs.lab import resume

    return resume


def test_groups_keep_their_own_rates(resume):
    before, after = resume(DECOUPLED, DECOUPLED)
    assert after == before
    assert len(set(before)) == 2


def test_an_override_gives_each_group_its_own_rate(resume):
    override = {"override_opt_param_scheduler": True, "use_checkpoint_opt_param_scheduler": False}
    before, after = resume(DECOUPLED, {"lr": 1e-2, "decoupled_lr": 1e-5}, **override)
    assert after == [{1e-3: 1e-2, 1e-4: 1e-5}[rate] for rate in before]


def test_without_an_override_the_rates_of_the_checkpoint_stay(resume):
    before, after = resume(DECOUPLED, {"lr": 1e-2, "decoupled_lr": 1e-5}, use_checkpoint_opt_param_scheduler=True)
    assert after == before


@pytest.fixture
def make_optimizer():
    """make_optimizer(with_distributed_optimizer=False, **settings): that of a GPT with one head."""
    from megatron_mtp_patches.defects.labs import lab

    def make(with_distributed_optimizer=False, **settings):
        config = lab.make_config(mtp_num_layers=1)
        ddp = {"use_distributed_optimizer": with_distributed_optimizer}
        return lab.make_optimizer(lab.make_ddp(config, lab.make_gpt(config), **ddp), **ddp, **settings)

    return make


@pytest.mark.parametrize("before, after, numbers", [({}, {"mtp_lr": 0.1}, (2, 4)), ({"mtp_lr": 0.1}, {}, (4, 2))])
@pytest.mark.parametrize("with_distributed_optimizer", [False, True])
def test_a_run_with_another_number_of_groups_than_the_checkpoint_is_refused(
    make_optimizer, before, after, numbers, with_distributed_optimizer
):
    saved, current = (make_optimizer(with_distributed_optimizer, **rates) for rates in (before, after))
    state = saved.state_dict() if with_distributed_optimizer else saved.sharded_state_dict({})
    message = "has {} parameter groups, that of this run {}: .* --no-load-optim .* verl: checkpoint.load".format(
        *numbers
    )
    with pytest.raises(ValueError, match=message):
        current.load_state_dict(state)


@pytest.mark.parametrize(
    "before, after, owner", [({}, {"mtp_lr": 0.1}, "this run"), ({"mtp_lr": 0.1}, {}, "the checkpoint")]
)
def test_the_load_of_such_a_checkpoint_ends_with_the_same_words(make_optimizer, tmp_path, before, after, owner):
    from megatron.core import dist_checkpointing

    dist_checkpointing.save({"optimizer": make_optimizer(**before).sharded_state_dict({})}, str(tmp_path))
    current = make_optimizer(**after).sharded_state_dict({})
    message = rf"resume with .*--mtp-lr \(OptimizerConfig.mtp_lr.* only {owner} has a group with max_lr 0.1"
    with pytest.raises(ValueError, match=message):
        dist_checkpointing.load({"optimizer": current}, str(tmp_path))


def test_groups_that_this_run_does_not_have_are_refused():
    """Megatron gives each group the parameters of the saved one in its place."""
    from megatron.core.optimizer.optimizer import MegatronOptimizer

    group = {"params": [0], "wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
    saved = [{**group, "is_expert_parallel": True}, {**group, "params": [1]}]
    message = "the optimizer of the checkpoint has 2 parameter groups, that of this run 1: .* --no-load-optim"
    with pytest.raises(ValueError, match=message):
        MegatronOptimizer._filter_and_reorder_param_groups([group], saved)


HEADS_BEFORE, HEADS_AFTER = {"mtp_lr": 0.1, "mtp_weight_decay": 0.3}, {"mtp_lr": 0.2, "mtp_weight_decay": 0.5}


@pytest.mark.parametrize("is_overridden", [False, True])
def test_heads_go_on_with_the_settings_of_the_checkpoint_unless_the_run_overrides_them(
    make_optimizer, caplog, is_overridden
):
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    schedule = {"init_lr": 0.0, "max_lr": 1e-2, "min_lr": 0.0, "lr_warmup_steps": 0, "lr_decay_steps": 9}
    schedule |= {"lr_decay_style": "constant", "start_wd": 0.1, "end_wd": 0.1, "wd_incr_steps": 9}
    schedule |= {"wd_incr_style": "constant", "use_checkpoint_opt_param_scheduler": False}
    schedule |= {"override_opt_param_scheduler": is_overridden}
    saved, current = make_optimizer(**HEADS_BEFORE), make_optimizer(**HEADS_AFTER)
    saved_schedule, current_schedule = (
        OptimizerParamScheduler(optimizer, **schedule) for optimizer in (saved, current)
    )
    current.load_state_dict(saved.state_dict())
    current_schedule.load_state_dict(saved_schedule.state_dict())
    current_schedule.step(1)
    expected = HEADS_AFTER if is_overridden else HEADS_BEFORE
    rates = {(group["lr"], group["weight_decay"]) for group in current.param_groups if group["wd_mult"]}
    assert rates == {(1e-2, 0.1), (expected["mtp_lr"], expected["mtp_weight_decay"])}
    is_warned = "start_wd 0.5, end_wd 0.5): add --override-opt-param-scheduler" in caplog.text
    assert is_warned is not is_overridden


def test_a_scheduler_of_another_class_is_left_alone():
    from megatron_overrides.resume.learning_rates import override_learning_rates_of_groups

    class LoadCheckpoint(dict):
        def proceed(self):
            return "iteration"

    assert override_learning_rates_of_groups(LoadCheckpoint(opt_param_scheduler=object())) == "iteration"
