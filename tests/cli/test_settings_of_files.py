"""`doctor --batch FILES` names settings of the patches that do not act, or that Megatron would refuse."""

import json

import pytest

from .test_doctor_of_files import ACTOR, VARIABLES

pytestmark = [pytest.mark.forked("patched"), pytest.mark.usefixtures("trainer")]


@pytest.mark.parametrize(
    "text, hint",
    [
        ("optimizer: {mtp_clip_grad: 0.1}\nmodel: {mtp_init: random, mtp_detach_heads: true, mtp_num_layers: 1}\n", ""),
        ("model: {transformer: {mtp_detach_heads: true, mtp_num_layers: 1}}\n", ""),
        ("model: {mtp_detach_heads: false, mtp_logits_chunk_size: 0}\noptimizer: {mtp_clip_grad: null}\n", ""),
        (
            "model: {}\noptimizer: {mtp_loss_type: kl}\n",
            "optimizer.mtp_loss_type is not read there: it belongs in model",
        ),
        ("model: {detach_mtp_heads: true}\n", "model.detach_mtp_heads: did you mean model.mtp_detach_heads?"),
        ("model: {}\ntrain: {grad_norm_skip_threshold: 3.0}\n", "train.grad_norm_skip_threshold is not read there: "),
        ("model: {}\nmtp_detach_heads: true\n", "mtp_detach_heads is not read there: it belongs in model"),
        ("model: {mtp_clip_grad: 0.1}\n", "model.mtp_clip_grad is not read there: it belongs in optimizer"),
        ("model: {}\noptimizer: {mtp_lr: 0.1}\n", "mtp_lr: no effect, because model.mtp_num_layers is not set"),
        ("model: {mtp_num_layers: 1}\noptimizer: {mtp_clip_grad: 0.1}\n", "(OptimizerConfig.mtp_clip_grad) needs "),
    ],
)
def test_settings_that_do_not_act_in_bridge_end_with_2(doctor_of_file, monkeypatch, text, hint):
    monkeypatch.setenv("MEGATRON_MTP_PATCHES", "all")  # which such a file does not show
    done = doctor_of_file(text, name="run_config.yaml")
    assert done.code == (2 if hint else 0) and hint in done.out, done.out
    assert ("did you mean" in done.out or "not read there" in done.out or "mtp_" in done.out) is bool(hint)
    assert f" {int(bool(hint))} with settings that do not act or are refused, 0 that cannot be checked." in done.out


def test_settings_that_do_not_act_are_counted_for_programs(doctor_of_file):
    texts = {False: "model: {mtp_num_layers: 1}\n", True: "model: {mtp_num_layers: 1, mtp_loss_tpye: tv}\n"}
    for has_idle_settings, text in texts.items():
        (run,) = json.loads(doctor_of_file(text, "--json", name="run_config.yaml").out)["runs"]
        assert run["has_idle_settings"] is has_idle_settings and not run["refused"]


def test_what_keeps_the_settings_of_verl_from_acting_is_named(doctor_of_file):
    variables = "ray_kwargs: {ray_init: {runtime_env: {env_vars: {VERL_USE_EXTERNAL_MODULES: %s}}}}\n"
    told = doctor_of_file(ACTOR, name="verl.yaml").out
    model = "actor_rollout_ref.actor.megatron.override_transformer_config"
    assert f"{model}.mtp_detach_head: did you mean {model}.mtp_detach_heads?\n" in told
    home = "actor_rollout_ref.actor.optim.override_optimizer_config"
    assert f"{model}.mtp_clip_grad is not read there: it belongs in {home}\n" in told
    variable = "ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES=megatron_mtp_patches"
    assert f"the workers import the patches only where zero-touch is enabled: set {variable}\n" in told
    chosen = variables % '"mine,megatron_mtp_patches"'
    assert "the workers import" not in doctor_of_file(ACTOR + chosen, name="verl.yaml").out


@pytest.mark.parametrize(
    "place, hint",
    [
        ("megatron: {mtp_detach_heads: true}", "megatron.mtp_detach_heads is not read there"),
        ("optim: {grad_norm_skip_threshold: 2.0}", "optim.grad_norm_skip_threshold is not read there"),
        (
            "optim: {}}}\ncritic: {strategy: megatron, optim: {mtp_clip_grad: 2.0, override_transformer_config: {}",
            "critic.optim.mtp_clip_grad is not read there: it belongs in critic.optim.override_optimizer_config",
        ),
        (
            "optim: {}}}\ntrainer: {sub: {watch_invariants: 1",
            "trainer.sub.watch_invariants is not read there: it belongs in actor_rollout_ref.actor.optim.override",
        ),
        (
            "optim: {}}}\nmtp_detach_heads: true\noverride_transformer_config: {x: {",
            "\nmtp_detach_heads is not read there: it belongs in actor_rollout_ref.actor.megatron.override_transformer",
        ),
        (
            "optim: {}}}\noverride_optimizer_config: {mtp_lr: 1.0, x: {",
            "override_optimizer_config.mtp_lr is not read there: it belongs in actor_rollout_ref.actor.optim.override_",
        ),
        (
            "megatron: {override_transformer_config: {mtp-detach-heads: true}}",
            "did you mean actor_rollout_ref.actor.megatron.override_transformer_config.",
        ),
        (
            "megatron: {override_transformer_config: {freeze_base_model_for_mtp: true}}}, model: {mtp: {enable: true}",
            "freeze_base_model_for_mtp is refused unless mtp.enable_train=true",
        ),
        ("optim: {override_optimizer_config: {mtp_lr: 1.0}}", "mtp_lr: no effect, because mtp.enable is not true"),
        ("megatron: {override_transformer_config: {mtp_loss_type: tvd}}", "must be one of"),
        ("optim: {override_optimizer_config: {grad_norm_skip_threshold: 0.0}}", "would skip every update"),
    ],
)
def test_what_verl_would_not_read_or_megatron_refuse_ends_with_2(doctor_of_file, place, hint):
    text = f"actor_rollout_ref: {{actor: {{strategy: megatron, {place}}}}}\n"
    done = doctor_of_file(text + VARIABLES % "", name="verl.yaml")
    assert done.code == 2 and hint in done.out
    assert "freeze_base_model_for_mtp: no effect" not in done.out


HEADS = "  model: {mtp: {enable: true, enable_train: %s}}\n"


@pytest.mark.parametrize(
    "is_trained, hint",
    [
        ("true", "disable_mtp_loss is refused unless mtp.enable_train=false"),
        ("false", "\nmtp_clip_grad, mtp_detach_heads: no effect, because mtp.enable_train is not true, "),
    ],
)
def test_which_settings_act_on_heads_that_verl_does_not_train(doctor_of_file, is_trained, hint):
    model = "megatron: {override_transformer_config: {mtp_detach_heads: true, disable_mtp_loss: true}}"
    optimizer = "optim: {override_optimizer_config: {mtp_clip_grad: 0.1}}"
    text = f"actor_rollout_ref:\n  actor: {{strategy: megatron, {model}, {optimizer}}}\n{HEADS % is_trained}"
    done = doctor_of_file(text + VARIABLES % "", name="verl.yaml")
    assert done.code == 2 and hint in done.out and done.err == "", done


SFT = """
model: {path: %s, mtp: {enable: true, enable_train: true}}
engine:
  _target_: verl.workers.config.McoreEngineConfig
  tensor_model_parallel_size: 2
  context_parallel_size: 2
  dtype: bfloat16
  override_transformer_config: {mtp_detach_heads: true, mtp_loss_type: tv}
optim: {optimizer: adam, clip_grad: 1.0, override_optimizer_config: {mtp_clip_grad: 0.1}}
"""


def test_the_file_of_verl_s_sft_trainer_is_a_run_of_verl(doctor_of_file, tmp_path):
    (tmp_path / "config.json").write_text('{"n_routed_experts": 8, "num_nextn_predict_layers": 1}')
    text = SFT % tmp_path
    told = doctor_of_file(text, name="config.yaml")
    assert told.code == 0 and "config.yaml sft: known defects: " in told.out and "not read there" not in told.out
    assert "\n* ML-7513b, " in told.out
    assert "nothing in this file shows" in doctor_of_file(text.replace("mtp_", "_mtp_"), name="config.yaml").out
    text = text.replace("optim: {", "optim: {mtp_lr: 0.1, ")
    text += "trainer: {nnodes: 2, n_gpus_per_node: 8, watch_invariants: 1}\n"
    told = doctor_of_file(text, name="config.yaml")
    assert told.code == 2 and "; 16 ranks" in told.out
    home = "is not read there: it belongs in optim.override_optimizer_config\n"
    assert f"optim.mtp_lr {home}trainer.watch_invariants {home}" in told.out
