"""Where the configurations of model and optimizer meet, what cannot work together is refused."""

import re

import megatron_mtp_patches
import pytest
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

pytestmark = pytest.mark.forked("patched")


def build(chunk, config):
    """The optimizer of a model in DDP."""
    model = DistributedDataParallel(chunk.config, DistributedDataParallelConfig(), chunk)
    return get_megatron_optimizer(config, [model])


@pytest.fixture
def make_optimizer(make_model):
    """make_optimizer(model={}, changes={}, **settings): `changes` are made to a configuration that was checked."""

    def make(model=(), changes=(), **settings):
        chunk = make_model(**dict(model))
        config = OptimizerConfig(optimizer="adam", lr=0.1, **settings)
        for name, value in dict(changes).items():
            setattr(chunk.config if hasattr(chunk.config, name) else config, name, value)
        return build(chunk, config)

    return make


@pytest.mark.parametrize("name", ["mtp_clip_grad", "mtp_grad_norm_skip_threshold"])
def test_a_limit_for_heads_without_a_separate_norm_is_refused(make_optimizer, name):
    with pytest.raises(ValueError, match=rf"\(\w+Config.{name}\) needs MTP heads .*\(\w+Config.mtp_detach_heads\)"):
        make_optimizer(**{name: 0.5})
    assert make_optimizer({"mtp_detach_heads": True}, **{name: 0.5}).config
    assert make_optimizer({"separate_mtp_grad_clip": True}, **{name: 0.5}).config


def test_a_model_without_heads_may_share_the_configuration(make_optimizer):
    """An actor with heads and a critic without."""
    assert make_optimizer({"mtp_num_layers": None}, mtp_clip_grad=0.5).config


@pytest.mark.parametrize(
    "changes",
    [
        {"mtp_clip_grad": -1.0},
        {"grad_norm_skip_threshold": 0.0},
        {"mtp_acceptance_interval": -1},
        {"mtp_depth_weights": "1,2,3,4,5"},
        {"mtp_detach_heads": "false"},
        {"separate_mtp_grad_clip": 1},
        {"mtp_acceptance_interval": 1.5},
        {"mtp_logits_chunk_size": "8"},
        {"clip_orthogonalizing_optimizers": "no"},
    ],
    ids=str,
)
def test_what_was_changed_after_its_check_is_checked_again(make_optimizer, changes):
    (name,) = changes
    with pytest.raises(ValueError, match=rf"\(\w+Config.{name}\)"):
        make_optimizer({"mtp_detach_heads": True}, changes)


@pytest.mark.parametrize(
    "name, value, place, home",
    [
        ("mtp_detach_heads", True, "OptimizerConfig", "TransformerConfig"),
        ("grad_norm_skip_threshold", 5.0, "TransformerConfig", "OptimizerConfig"),
    ],
)
def test_a_setting_of_the_other_configuration_is_refused(make_model, name, value, place, home):
    """Python sets any attribute, and nothing would read it there."""
    chunk, config = make_model(), OptimizerConfig(optimizer="adam", lr=0.1)
    setattr(config if place == "OptimizerConfig" else chunk.config, name, value)
    with pytest.raises(ValueError, match=f"^{place}.{name} is not read there: it belongs in {home}$"):
        build(chunk, config)


@pytest.mark.parametrize(
    "name, meant, place",
    [
        ("mtp_detatch_heads", "TransformerConfig.mtp_detach_heads", "TransformerConfig"),
        ("mtp_clip_grd", "OptimizerConfig.mtp_clip_grad", "OptimizerConfig"),
        ("freeze_base_model_for_mpt", "TransformerConfig.freeze_base_model_for_mtp", "OptimizerConfig"),
        ("detach_mtp_heads", "TransformerConfig.mtp_detach_heads", "TransformerConfig"),
    ],
)
def test_a_misspelt_setting_is_refused(make_model, name, meant, place):
    chunk, config = make_model(), OptimizerConfig(optimizer="adam", lr=0.1)
    setattr(config if place == "OptimizerConfig" else chunk.config, name, True)
    with pytest.raises(ValueError, match=rf"^{place}.{name}: did you mean {meant}\?$"):
        build(chunk, config)


@pytest.mark.parametrize(
    "choice, way",
    [
        ("-train-mtp-heads-at-own-rate", "all"),
        ("-detach-mtp-heads,-train-mtp-heads-at-own-rate", "-detach-mtp-heads"),
        ("repairs,detach-mtp-heads", "repairs,detach-mtp-heads,train-mtp-heads-at-own-rate"),
        ("none", "train-mtp-heads-at-own-rate"),
    ],
)
def test_a_setting_of_a_patch_that_is_left_out_is_refused(make_model, choice, way):
    """The field is not there, and Python sets any attribute."""
    megatron_mtp_patches.revert()
    try:
        megatron_mtp_patches.apply(choice)
        chunk, config = make_model(), OptimizerConfig(optimizer="adam", lr=0.1)
        config.mtp_lr = 0.2
        message = "OptimizerConfig.mtp_lr does not act without train-mtp-heads-at-own-rate, left out by "
        with pytest.raises(ValueError, match=f"^{message}MEGATRON_MTP_PATCHES: set MEGATRON_MTP_PATCHES={way}, or"):
            build(chunk, config)
    finally:
        megatron_mtp_patches.revert()
        megatron_mtp_patches.apply()


def test_the_log_says_once_which_settings_a_run_has(make_optimizer, caplog):
    for _ in range(2):
        make_optimizer({"mtp_detach_heads": True}, mtp_clip_grad=0.125)
    make_optimizer()
    lines = [record.getMessage() for record in caplog.records if "settings of the patches" in record.getMessage()]
    assert lines == ["settings of the patches: mtp_clip_grad=0.125, mtp_detach_heads=True"]


def test_an_attribute_that_is_no_setting_may_be_anywhere(make_model):
    chunk, config = make_model(), OptimizerConfig(optimizer="adam", lr=0.1)
    config.num_layers, chunk.config.lr, config.note = 7, 0.2, "x"
    chunk.config.weight_decay, chunk.config.clip_grad, chunk.config.min_lr = 0.1, 1.0, 0.0
    assert build(chunk, config)


@pytest.mark.parametrize("detaches", [False, True])
def test_a_loss_type_that_is_set_after_the_model_was_built_is_checked_in_its_forward_pass(make_model, batch, detaches):
    model = make_model(mtp_detach_heads=detaches)
    model.config.mtp_loss_type = "TV"
    with pytest.raises(ValueError, match="must be one of cross_entropy, kl, tv, lk, e2e_tv, not 'TV'"):
        model(**batch)


@pytest.fixture
def warnings_of_shared_norm(caplog):
    """warnings_of_shared_norm(): how often detached heads were said to share the norm of the main model."""
    from megatron_overrides.mtp.heads import checks as settings

    settings._warn_of_shared_norm.cache_clear()
    return lambda: [record.message for record in caplog.records if "clip-mtp-grads-separately" in record.message]


def test_detached_heads_without_the_patch_that_clips_them_are_warned_of(make_model, warnings_of_shared_norm):
    import megatron_mtp_patches
    from megatron.core.optimizer import optimizer

    make_model(mtp_detach_heads=True)
    assert not warnings_of_shared_norm()
    megatron_mtp_patches.apply("-clip-mtp-grads-separately")
    try:
        make_model()
        assert not warnings_of_shared_norm()
        make_model(mtp_detach_heads=True)
        make_model(mtp_detach_heads=True)
        is_native = hasattr(optimizer, "MTP_GRAD_NORM_GROUP")
        assert len(warnings_of_shared_norm()) == (0 if is_native else 1)
    finally:
        megatron_mtp_patches.apply()


@pytest.mark.parametrize("setting", ["mtp_detach_heads", "separate_mtp_grad_clip"])
def test_a_setting_of_heads_that_the_model_lacks_is_warned_of_once(make_optimizer, caplog, setting):
    make_optimizer({"mtp_num_layers": None, setting: True})
    assert caplog.text.count(f"Config.{setting}) has no effect: the model has no MTP heads") == 1
    caplog.clear()
    make_optimizer({setting: True})
    assert "has no effect" not in caplog.text


@pytest.mark.parametrize("setting", ["mtp_lr", "mtp_min_lr", "mtp_weight_decay"])
@pytest.mark.parametrize("model", [{"mtp_num_layers": None}, {"disable_mtp_loss": True}], ids=str)
def test_a_rate_of_heads_that_do_not_train_is_warned_of(make_optimizer, caplog, setting, model):
    from megatron_overrides.settings import absent_heads

    absent_heads._log_untrained_heads.cache_clear()
    make_optimizer(model, **{setting: 0.01})
    why = "disable_mtp_loss" if "disable_mtp_loss" in model else "the model has no MTP heads"
    assert re.search(rf"\(\w+Config.{setting}\) has no effect: .*{why}", caplog.text)
