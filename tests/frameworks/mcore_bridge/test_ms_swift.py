"""ms-swift takes the settings of the patches and reports their metrics. `megatron sft` itself does not run."""

import dataclasses
import logging
from types import SimpleNamespace

import pytest

pytest.importorskip("swift.megatron", reason="ms-swift is not installed")

import megatron_mtp_patches
from megatron.core.optimizer import OptimizerConfig
from megatron_mtp_patches.cli.status import EXPECTED
from megatron_mtp_patches.doctor.ms_swift_arguments import complete, find_unknown
from megatron_mtp_patches.engine.state import TargetState
from swift.megatron.arguments import MegatronSftArguments
from swift.megatron.trainers.base import BaseMegatronTrainer
from transformers import HfArgumentParser

from megatron_overrides.settings.checks import declared_settings

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("add-settings-to-ms-swift"), pytest.mark.ranks(1)]

WORDS = """--mtp_detach_heads true --mtp_clip_grad 0.05 --grad_norm_skip_threshold 100 --min_clip_coefficient 0.01
    --mtp_grad_norm_skip_threshold 5 --clip_orthogonalizing_optimizers true
    --grad_norm_group router=router:1.0 --moe_global_aux_loss_over_data_parallel true
    --mtp_lr 0.001 --mtp_min_lr 0.0001 --mtp_weight_decay 0.2""".split()


def test_its_command_line_has_the_settings():
    parsed, unknown = HfArgumentParser([MegatronSftArguments]).parse_known_args(WORDS)
    assert not unknown
    assert (parsed.mtp_detach_heads, parsed.mtp_clip_grad, parsed.grad_norm_skip_threshold) == (True, 0.05, 100.0)
    assert (parsed.mtp_grad_norm_skip_threshold, parsed.min_clip_coefficient) == (5.0, 0.01)
    assert parsed.clip_orthogonalizing_optimizers is True and parsed.grad_norm_group == ["router=router:1.0"]
    assert parsed.moe_global_aux_loss_over_data_parallel is True
    assert (parsed.mtp_lr, parsed.mtp_min_lr, parsed.mtp_weight_decay) == (0.001, 0.0001, 0.2)


def test_they_reach_the_configuration_of_the_optimizer_and_default_to_its_defaults():
    """ms-swift hands on what is an attribute of its arguments and a field of the configuration."""
    parsed, _ = HfArgumentParser([MegatronSftArguments]).parse_known_args([])
    shared = {field.name for field in dataclasses.fields(OptimizerConfig)} & set(vars(parsed))
    ours = {setting.name for setting in declared_settings(OptimizerConfig)}
    assert {"mtp_clip_grad", "mtp_lr", "muon_split_glu"} <= ours <= shared
    default = OptimizerConfig()
    assert {name: getattr(parsed, name) for name in ours} == {name: getattr(default, name) for name in ours}


@pytest.mark.parametrize("name", ["mtp_loss_scaling_schedule", "mtp_eval", "disable_mtp_loss", "mtp_init"])
def test_it_does_not_know_what_does_not_act_there(name):
    _, unknown = HfArgumentParser([MegatronSftArguments]).parse_known_args([f"--{name}", "1"])
    assert unknown == [f"--{name}", "1"]


def test_its_sources_tell_which_names_it_knows():
    names = [field.name for field in dataclasses.fields(MegatronSftArguments)]
    assert list(find_unknown([*names, "tensor_model", "mtp_detach"])) == []
    assert [complete(name) for name in ("mtp_detach", "mtp_loss", "lr")] == ["mtp_detach_heads", "mtp_loss", "lr"]
    assert "refuses mtp_loss" in next(find_unknown(["mtp_loss"]))
    (sentence,) = find_unknown([*names, "optimizer_config", "mtp_eval"])
    assert "refuses optimizer_config, mtp_eval: " in sentence


@pytest.mark.parametrize("prefix", ["", "eval_"])
def test_its_log_of_training_has_the_metrics_of_the_step(prefix, monkeypatch):
    from megatron_overrides.frameworks import ms_swift

    monkeypatch.setattr(ms_swift, "step_scalars", lambda optimizer: {"mtp-grad-norm": 0.5} if optimizer else {})
    logged = {}
    trainer = SimpleNamespace(
        optimizer="optimizer",
        _log_callback=lambda logs, steps: None,
        call_event=lambda event, logs: logged.update(logs),
    )
    BaseMegatronTrainer.on_log(trainer, {"n_steps": 1, "grad_norm": 1.0}, prefix)
    assert logged == ({"eval_grad_norm": 1.0} if prefix else {"grad_norm": 1.0, "mtp_grad_norm": 0.5})


def test_warnings_of_the_patches_show_where_mcore_bridge_hides_those_of_the_root_logger(monkeypatch, capsys):
    from mcore_bridge.utils import logger as mcore_bridge_logger
    from megatron_mtp_patches.run_record.shown_warnings import show_warnings

    ours = logging.getLogger("megatron_overrides.watch")
    monkeypatch.setattr(mcore_bridge_logger, "init_loggers", {})
    for name in (None, "megatron_mtp_patches", "megatron_overrides", "mcore_bridge"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
    logging.getLogger().addHandler(logging.StreamHandler())
    mcore_bridge_logger.get_logger()
    ours.warning("hidden")
    for _ in range(2):
        show_warnings()
    ours.warning("shown")
    ours.error("wrong")
    assert capsys.readouterr().err == "shown\nwrong\n"


def test_status_expects_all_that_mcore_bridge_changes():
    targets = [target for report in megatron_mtp_patches.status() for target in report.targets.items()]
    changed = {target for target, state in targets if state is TargetState.CHANGED}
    assert changed == {target for target, (library, _) in EXPECTED.items() if library == "mcore_bridge"}
