"""Settings that nothing in verl reads are refused before the first step, with the place where they belong."""

import megatron_mtp_patches
import pytest

pytestmark = pytest.mark.forked("verl")

MODEL, OPTIMIZER = "override_transformer_config", "override_optimizer_config"


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
        make_worker({"mtp_detach_heads": True, "mtp_loss_scaling_schedule": "0:0.3"}, {"mtp_lr": 0.1})
    settings = f"{MODEL}.mtp_detach_heads, {MODEL}.mtp_loss_scaling_schedule, {OPTIMIZER}.mtp_lr"
    patches = (
        "detach-mtp-heads",
        "schedule-mtp-loss-weight-in-verl",
        "schedule-mtp-loss-weight",
        "train-mtp-heads-at-own-rate",
    )
    without = f"{settings} do not act without {', '.join(patches)}, left out by MEGATRON_MTP_PATCHES"
    choice = ",".join(("repairs", *sorted(patches)))
    assert str(refused.value) == f"{without}: set MEGATRON_MTP_PATCHES={choice}, or take these settings out"


@pytest.mark.parametrize(
    "section, problem",
    [
        ({"megatron": {"mtp_detach_heads": True}}, f"megatron.mtp_detach_heads is not read there: .* {MODEL}"),
        ({"optim": {"mtp_clip_grad": 0.1}}, f"optim.mtp_clip_grad is not read there: it belongs in {OPTIMIZER}"),
        ({"mtp": {"mtp_loss_tpye": "tv"}}, f"mtp.mtp_loss_tpye: did you mean {MODEL}.mtp_loss_type"),
    ],
)
def test_every_section_of_which_verl_makes_an_object_is_checked(section, problem):
    from omegaconf import OmegaConf
    from verl.utils.config import omega_conf_to_dataclass

    config = OmegaConf.create(
        {"_target_": "verl.workers.config.McoreActorConfig", "ppo_epochs": "${missing}", **section}
    )
    with pytest.raises(ValueError, match=problem):
        omega_conf_to_dataclass(config)
