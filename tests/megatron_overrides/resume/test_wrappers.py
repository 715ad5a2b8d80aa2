"""A run that resumes has the learning rates of its checkpoint, or with --override-opt-param-scheduler its own."""

import pytest

pytestmark = pytest.mark.forked("patched")
DECOUPLED = {"lr": 1e-3, "decoupled_lr": 1e-4}


@pytest.fixture
def resume():
    from megatron_mtp_patches.reproductions.lab import resume

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


@pytest.mark.parametrize("with_distributed_optimizer", [False, True])
def test_a_run_with_more_groups_than_the_checkpoint_is_refused(with_distributed_optimizer):
    from megatron_mtp_patches.reproductions.lab import make_config, make_ddp, make_gpt, make_optimizer

    settings = {"use_distributed_optimizer": with_distributed_optimizer}
    optimizers = []
    for rates in ({}, {"mtp_lr": 0.1}):
        config = make_config(mtp_num_layers=1)
        model = make_ddp(config, make_gpt(config), **settings)
        optimizers.append(make_optimizer(model, **settings, **rates))
    state = optimizers[0].sharded_state_dict({}) if not with_distributed_optimizer else optimizers[0].state_dict()
    with pytest.raises(ValueError, match="has 2 parameter groups, that of this run 4: .* --no-load-optim"):
        optimizers[1].load_state_dict(state)


def test_a_scheduler_of_another_class_is_left_alone():
    from megatron_overrides.resume.wrappers import override_learning_rates_of_groups

    class LoadCheckpoint(dict):
        def proceed(self):
            return "iteration"

    assert override_learning_rates_of_groups(LoadCheckpoint(opt_param_scheduler=object())) == "iteration"
