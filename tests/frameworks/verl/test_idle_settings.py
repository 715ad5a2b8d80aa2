"""Settings that nothing in verl reads are refused before the first step, with the place where they belong."""

from pathlib import Path

import megatron_mtp_patches
import pytest

pytestmark = pytest.mark.forked("verl")

MODEL, OPTIMIZER = "override_transformer_config", "override_optimizer_config"
ACTOR, NOT_READ = "actor_rollout_ref.actor", "is not read there: it belongs in"


def test_the_dictionaries_for_megatron_s_configurations_are_checked(make_worker):
    with pytest.raises(ValueError) as refused:
        make_worker({"mtp_detatch_heads": True, "mtp_clip_grad": 0.05}, {"mtp_loss_type": "tv"})
    assert str(refused.value).splitlines() == [
        f"{MODEL}.mtp_detatch_heads: did you mean {MODEL}.mtp_detach_heads?",
        f"{MODEL}.mtp_clip_grad is not read there: it belongs in {OPTIMIZER}",
        f"{OPTIMIZER}.mtp_loss_type is not read there: it belongs in {MODEL}",
    ]


def test_a_setting_whose_patch_is_left_out_is_refused_with_its_patch(make_worker):
    megatron_mtp_patches.revert()
    megatron_mtp_patches.apply("repairs")
    with pytest.raises(ValueError) as refused:
        make_worker({"mtp_detach_heads": True, "mtp_loss_scaling_schedule": "0:0.3"}, {"grad_norm_skip_threshold": 9.0})
    settings = f"{MODEL}.mtp_detach_heads, {MODEL}.mtp_loss_scaling_schedule, {OPTIMIZER}.grad_norm_skip_threshold"
    patches = (
        "detach-mtp-heads",
        "schedule-mtp-loss-weight-in-verl",
        "schedule-mtp-loss-weight",
        "skip-updates-in-verl",
    )
    without = f"{settings} do not act without {', '.join(patches)}, left out by MEGATRON_MTP_PATCHES"
    choice = ",".join(("repairs", *sorted(patches)))
    assert str(refused.value) == f"{without}: set MEGATRON_MTP_PATCHES={choice}, or take these settings out"


def compose_configuration(name, *words):
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(name, overrides=list(words))


def test_the_sft_trainer_refuses_settings_in_its_whole_configuration_at_once():
    from verl.utils.device import auto_set_device

    megatron_mtp_patches.revert()
    megatron_mtp_patches.apply("repairs")
    words = ("engine=megatron", "optim=megatron")
    auto_set_device(compose_configuration("sft_trainer_engine", *words))
    idle = (
        "+mtp_detach_heads=true",
        "+trainer.watch_invariants=1",
        f"+engine.{MODEL}.mtp_detach_heads=true",
        f"+engine.{MODEL}.mtp_loss_tpye=tv",
        f"+optim.{OPTIMIZER}.mtp_lr=0.1",
    )
    with pytest.raises(ValueError) as refused:
        auto_set_device(compose_configuration("sft_trainer_engine", *words, *idle))
    lines = str(refused.value).splitlines()
    assert lines[:-1] == [
        f"mtp_detach_heads is not read there: it belongs in engine.{MODEL}",
        f"engine.{MODEL}.mtp_loss_tpye: did you mean engine.{MODEL}.mtp_loss_type?",
        f"trainer.watch_invariants is not read there: it belongs in optim.{OPTIMIZER}",
    ]
    settings = f"engine.{MODEL}.mtp_detach_heads, optim.{OPTIMIZER}.mtp_lr"
    assert lines[-1].startswith(f"{settings} do not act without detach-mtp-heads, train-mtp-heads-at-own-rate, left ")


@pytest.mark.parametrize(
    "word, problem",
    [
        ("+mtp_detach_heads=true", f"mtp_detach_heads {NOT_READ} {ACTOR}.megatron.{MODEL}"),
        (f"+{ACTOR}.megatron.mtp_detach_heads=true", f"{ACTOR}.megatron.mtp_detach_heads {NOT_READ} {ACTOR}.meg"),
        ("+critic.optim.mtp_clip_grad=0.1", f"critic.optim.mtp_clip_grad {NOT_READ} critic.optim.{OPTIMIZER}"),
        ("+actor_rollout_ref.model.mtp.mtp_loss_tpye=tv", f"mtp.mtp_loss_tpye: did you mean {ACTOR}.megatron.{MODEL}"),
    ],
)
def test_the_trainers_of_ppo_refuse_settings_anywhere_in_their_configuration(word, problem):
    import verl.trainer.ppo
    from verl.trainer.ppo.utils import need_critic

    # They import engines of rollouts, which are not here.
    for trainer in ("ray_trainer.py", "v1/trainer_base.py"):
        assert "= need_critic(self.config)" in Path(verl.trainer.ppo.__path__[0], trainer).read_text()
    assert need_critic(compose_configuration("ppo_trainer", "model_engine=megatron"))
    with pytest.raises(ValueError, match=problem):
        need_critic(compose_configuration("ppo_trainer", "model_engine=megatron", word))
