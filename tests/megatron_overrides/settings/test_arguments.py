"""A command line that cannot work is refused before a model is built. Needs megatron.training (not in 0.16.1)."""

import argparse
from argparse import Namespace

import pytest
from megatron_mtp_patches.engine.call import Call

pytestmark = pytest.mark.forked("patched")

arguments = pytest.importorskip("megatron.training.arguments", reason="the 0.16.1 wheel has no megatron.training")


def parse(*flags):
    return arguments.add_megatron_arguments(argparse.ArgumentParser()).parse_args(flags)


def test_the_flag_is_there_and_defaults_to_skipping_nothing():
    assert parse().grad_norm_skip_threshold == float("inf")
    assert parse("--grad-norm-skip-threshold", "7.5").grad_norm_skip_threshold == 7.5


def test_a_threshold_with_an_optimizer_cuda_graph_is_refused_at_once():
    both = Namespace(grad_norm_skip_threshold=5.0, optimizer_cuda_graph=True)
    with pytest.raises(ValueError, match="optimizer_cuda_graph. cannot give: leave one of the two out"):
        arguments.validate_args(both)
    with pytest.raises(ValueError, match="would skip every update"):
        arguments.validate_args(args=Namespace(grad_norm_skip_threshold=-1.0), defaults={})


def test_the_flags_of_clipping_are_there():
    parsed = parse("--clip-orthogonalizing-optimizers", "--min-clip-coefficient", "0.25")
    assert (parsed.clip_orthogonalizing_optimizers, parsed.min_clip_coefficient) == (True, 0.25)
    default = parse()
    assert (default.clip_orthogonalizing_optimizers, default.min_clip_coefficient) == (False, None)


def test_the_flags_of_a_watch_are_there():
    parsed = parse("--watch-invariants", "100", "--watch-action", "raise")
    assert (parsed.watch_invariants, parsed.watch_action) == (100, "raise")
    assert (parse().watch_invariants, parse().watch_action) == (0, "warn")


@pytest.mark.parametrize("flag", ["--muon-split-glu", "--muon-split-qkv-per-head", "--muon-split-gdn"])
def test_the_flags_of_split_weights_are_muon_s(flag):
    name = flag.removeprefix("--").replace("-", "_")
    assert getattr(parse(), name) is False
    parsed = parse(flag, "--optimizer", "adam")
    assert getattr(parsed, name) is True
    with pytest.raises(ValueError, match=f"{flag} .* the optimizer is adam: leave it out, or train with"):
        arguments.validate_args(parsed, {})


def test_a_clip_of_weights_that_are_sharded_is_refused_at_once():
    with pytest.raises(ValueError, match="--qk-clip: --use-megatron-fsdp shards the weights .* leave one of the two"):
        arguments.validate_args(parse("--qk-clip", "--use-megatron-fsdp"), {})


def test_a_function_is_no_flag_and_the_parser_builds():
    """ArgumentGroupFactory makes a flag of every other field."""
    assert not hasattr(parse(), "mtp_grad_scale_func")


def test_a_yaml_configuration_need_not_name_the_fields_that_we_add():
    import dataclasses

    from megatron.core.transformer import TransformerConfig
    from megatron.training.yaml_arguments import core_config_from_args

    fields = dataclasses.fields(TransformerConfig)
    ours = {field.name: field.default for field in fields if field.metadata.get("added_in_place")}
    written = Namespace(**{field.name: None for field in fields if field.name not in ours})
    config = core_config_from_args(written, TransformerConfig)
    assert {name: config[name] for name in ours} == ours
    del written.num_layers
    with pytest.raises(Exception, match="Missing argument num_layers"):
        core_config_from_args(written, TransformerConfig)


@pytest.mark.parametrize("flag", ["--mtp-clip-grad", "--mtp-grad-norm-skip-threshold"])
def test_a_limit_for_heads_that_are_not_clipped_on_their_own_is_refused(flag):
    with pytest.raises(ValueError, match=f"{flag} .* needs MTP heads .* add --mtp-detach-heads .*, or --separate-mtp-"):
        arguments.validate_args(parse(flag, "0.5"), {})


def test_the_flags_of_the_heads_are_there():
    parsed = parse("--mtp-detach-heads", "--mtp-clip-grad", "0.5", "--mtp-acceptance-interval", "10")
    assert (parsed.mtp_detach_heads, parsed.mtp_clip_grad, parsed.mtp_acceptance_interval) == (True, 0.5, 10)
    default = parse()
    assert (default.mtp_detach_heads, default.separate_mtp_grad_clip, default.mtp_acceptance_interval) == (
        False,
        False,
        1,
    )
    assert default.mtp_clip_grad is default.mtp_grad_norm_skip_threshold is None
    assert parse("--separate-mtp-grad-clip").separate_mtp_grad_clip


def test_the_flags_of_losses_for_acceptance_are_there():
    parsed = parse("--mtp-loss-type", "e2e_tv", "--mtp-depth-weights", "1,0.5", "--mtp-logits-chunk-size", "256")
    assert (parsed.mtp_loss_type, parsed.mtp_depth_weights, parsed.mtp_logits_chunk_size) == ("e2e_tv", "1,0.5", 256)
    weighed = parse("--mtp-position-weights", "dpace", "--mtp-dpace-alpha", "0.3")
    assert (weighed.mtp_position_weights, weighed.mtp_dpace_alpha) == ("dpace", 0.3)
    parsed = parse("--mtp-acceptance-length-interval", "10", "--no-mtp-eval")
    assert (parsed.mtp_acceptance_length_interval, parsed.mtp_eval) == (10, False)
    default = parse()
    assert (default.mtp_loss_type, default.mtp_depth_weights, default.mtp_logits_chunk_size) == (
        "cross_entropy", None, 0,
    )  # fmt: skip
    assert (default.mtp_position_weights, default.mtp_dpace_alpha) == ("equal", 0.5)
    assert (default.mtp_acceptance_length_interval, default.mtp_eval) == (0, True)


def test_the_flags_of_new_heads_and_of_their_rates_are_there():
    parsed = parse("--mtp-init", "last-layer", "--mtp-lr", "2e-3", "--mtp-min-lr", "1e-4")
    assert (parsed.mtp_init, parsed.mtp_lr, parsed.mtp_min_lr) == ("last-layer", 2e-3, 1e-4)
    assert parse("--mtp-weight-decay", "0.3").mtp_weight_decay == 0.3
    default = parse()
    assert (default.mtp_init, default.mtp_lr, default.mtp_min_lr, default.mtp_weight_decay) == (None,) * 4


def test_norm_groups_are_given_one_by_one_and_checked_at_once():
    parsed = parse("--grad-norm-group", "router=mlp.router:1.0", "--grad-norm-group", "gdn=in_proj:0.5")
    assert parsed.grad_norm_group == ["router=mlp.router:1.0", "gdn=in_proj:0.5"]
    assert parse().grad_norm_group is None
    with pytest.raises(ValueError, match="--grad-norm-group .* 'router': write NAME=REGEX:LIMIT"):
        arguments.validate_args(parse("--grad-norm-group", "router"), {})


def settle(**changes):
    """The settings that upstream's own checks get to see."""
    from megatron_overrides.fsdp.main_weights import enforce_megatron_fsdp_args

    settings = Namespace(
        **{
            "use_megatron_fsdp": True,
            "optimizer": "adam",
            "use_distributed_optimizer": False,
            "reuse_grad_buf_for_mxfp8_param_ag": True,
            **changes,
        }
    )
    assert enforce_megatron_fsdp_args(Call(lambda args, defaults: args, None, (settings, {}), {})) is settings
    return settings.use_distributed_optimizer, settings.reuse_grad_buf_for_mxfp8_param_ag


def test_megatron_fsdp_gets_the_distributed_optimizer_and_no_mxfp8_buffer(caplog):
    assert settle() == (True, False)
    assert "--use-megatron-fsdp sets --use-distributed-optimizer" in caplog.text
    assert "--use-megatron-fsdp unsets --reuse-grad-buf-for-mxfp8-param-ag" in caplog.text
    caplog.clear()
    changes = {"use_distributed_optimizer": True, "reuse_grad_buf_for_mxfp8_param_ag": False}
    assert settle(**changes, optimizer="sgd") == (True, False)
    assert caplog.text == ""


@pytest.mark.parametrize("changes", [{"use_megatron_fsdp": False}, {"megatron_fsdp_version": 2}])
def test_without_megatron_fsdp_or_with_its_version_2_nothing_is_set(changes):
    assert settle(**changes, optimizer="muon") == (False, True)


def test_megatron_fsdp_with_an_optimizer_that_it_cannot_shard_is_refused_at_once():
    with pytest.raises(ValueError, match="--optimizer muon: choose adam or sgd, or leave --use-megatron-fsdp out"):
        arguments.validate_args(parse("--use-megatron-fsdp", "--optimizer", "muon"), {})
