"""The configuration of verl's PPO trainer, composed as `python -m verl.trainer.main_ppo` does, and its workers."""

import re
from functools import partial
from pathlib import Path

import pytest
import ray
import torch
import verl.workers.engine_workers
from hydra import compose, initialize_config_dir
from megatron_mtp_patches.doctor.findings import RunSettings, find_defects
from megatron_mtp_patches.doctor.run_files import read_runs
from omegaconf import OmegaConf
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
from verl.trainer.ppo.core_algos import compute_gae_advantage_return
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils import tensordict_utils
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.utils.losses import value_loss
from verl.workers.utils.padding import no_padding_2_padding

from tests.pages import ROOT
from tests.warm.processes import run_ranks

from .conftest import REHEARSED
from .ppo import changed, parameters

pytestmark = pytest.mark.forked("verl")

PAGE = (ROOT / "docs" / "verl.md").read_text(encoding="utf-8")
ACTOR = "actor_rollout_ref.actor"
CONFIGURATIONS = Path(verl.__file__).parent / "trainer" / "config"


def shown_words():
    """What the page gives to main_ppo."""
    (text,) = re.findall(r"python -m verl.trainer.main_ppo (.*?) \.\.\.\n", PAGE, re.DOTALL)
    return text.replace("\\\n", " ").split()


def shown_yaml():
    """The part of verl's configuration that the page shows."""
    (text,) = re.findall(r"```yaml\n(actor_rollout_ref:.*?)```", PAGE, re.DOTALL)
    return OmegaConf.create(text)


def compose_ppo(*words):
    with initialize_config_dir(str(CONFIGURATIONS), version_base=None):
        return compose("ppo_trainer", overrides=list(words))


def test_the_command_line_of_the_page_sets_what_its_yaml_sets():
    composed = compose_ppo(*shown_words())
    variables = composed.ray_kwargs.ray_init.runtime_env.env_vars
    assert variables == {"VERL_USE_EXTERNAL_MODULES": "megatron_mtp_patches"}
    shown = shown_yaml()
    shown.actor_rollout_ref.actor.optim.override_optimizer_config.pop("grad_norm_skip_threshold")
    assert OmegaConf.merge(composed, shown) == composed


def train_by_ray(configuration, batch):
    """What main_ppo and its task runner do, with one worker on a CPU."""
    default = get_ppo_ray_runtime_env(configuration)
    environment = OmegaConf.merge(default, configuration.ray_kwargs.ray_init.runtime_env)
    ray.init(
        num_cpus=1,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        runtime_env=OmegaConf.to_container(environment),
    )
    worker = RayClassWithInitArgs(
        cls=ray.remote(ActorRolloutRefWorker), config=configuration.actor_rollout_ref, role="actor"
    )
    pool = RayResourcePool(process_on_nodes=[1], use_gpu=False, max_colocate_count=1)
    group = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=worker, use_gpu=False)
    group.init_model()
    mask = batch["response_mask"]
    batch["advantages"] = batch["old_log_probs"] = batch["ref_log_prob"] = mask.float()
    metrics = tensordict_utils.get(group.update_actor(batch), "metrics")
    print("metrics of the Ray worker:", sorted(metrics), metrics["megatron/mtp_grad_norm"][0] > 0.0)
    ray.shutdown()


# First: it forks this process, which has no threads yet.
def test_a_ray_worker_imports_the_patches_before_megatron(configuration, make_batch):
    variables = dict(configuration.ray_kwargs.ray_init.runtime_env.env_vars)
    variables["VERL_USE_EXTERNAL_MODULES"] += ",tests.frameworks.verl.rehearsed"
    variables |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'patches'}", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    configuration.ray_kwargs.ray_init.runtime_env.env_vars = variables
    (ended,) = run_ranks(1, partial(train_by_ray, configuration, make_batch()))
    assert ended.code == 0, ended.output[-6000:]
    assert re.search(r"metrics of the Ray worker:.*megatron/mtp_grad_norm.*True", ended.output), ended.output[-6000:]


@pytest.fixture
def configuration(save_model):
    """The page's YAML over verl's configuration of a small run."""
    sizes = {
        f"{ACTOR}.ppo_mini_batch_size": 4,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": 2,
        f"{ACTOR}.use_dynamic_bsz": False,
        f"{ACTOR}.optim.lr": 1e-2,
        f"{ACTOR}.megatron.sequence_parallel": False,
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.n": 1,
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": False,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 2,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 2,
        "actor_rollout_ref.ref.megatron.sequence_parallel": False,
        "actor_rollout_ref.model.path": save_model(1),
        "critic.model.path": save_model(1),
        "critic.ppo_mini_batch_size": 4,
        "critic.use_dynamic_bsz": True,
        "critic.optim.lr": 1e-2,
        "critic.megatron.sequence_parallel": False,
        f"{ACTOR}.use_kl_loss": True,
        f"{ACTOR}.optim.total_training_steps": 10,  # which verl's trainer computes
        "critic.optim.total_training_steps": 10,
        "data.train_batch_size": 4,
        "trainer.n_gpus_per_node": 1,
    }
    rehearsed = [
        f"++{role}.megatron.override_transformer_config.{name}={value}"
        for role in (ACTOR, "critic")
        for name, value in REHEARSED.items()
    ]
    words = [f"{name}={value}" for name, value in sizes.items()]
    words.append("+critic.optim.override_optimizer_config.grad_norm_skip_threshold=1e-6")
    words.append("+critic.checkpoint.strict=false")
    composed = compose_ppo(*shown_words(), *words, *rehearsed)
    OmegaConf.set_struct(composed, False)
    composed.merge_with(shown_yaml())
    OmegaConf.set_struct(composed, True)
    validate_config(composed, need_reference_policy(composed), need_critic(composed))
    return composed


def make_critic(configuration):
    """verl's critic, as its trainer makes it."""
    critic = omega_conf_to_dataclass(configuration.critic)
    critic.engine.infer_max_token_len_per_gpu = critic.ppo_infer_max_token_len_per_gpu
    critic.engine.max_token_len_per_gpu = critic.ppo_infer_max_token_len_per_gpu
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="value_model",
            model_config=critic.model,
            engine_config=critic.engine,
            optimizer_config=critic.optim,
            checkpoint_config=critic.checkpoint,
        )
    )
    worker.reset()
    worker.set_loss_fn(partial(value_loss, config=critic))
    return worker


def test_actor_reference_and_critic_are_made_of_it_and_train(configuration, make_batch, caplog):
    workers = {role: ActorRolloutRefWorker(configuration.actor_rollout_ref, role=role) for role in ("actor", "ref")}
    for worker in workers.values():
        worker.init_model()
    actor, critic = workers["actor"].actor, make_critic(configuration)
    lines = [record.getMessage() for record in caplog.records if "no MTP heads" in record.getMessage()]
    assert len(lines) == 1 and "mtp_detach_heads" in lines[0]  # of the reference model
    before = parameters(actor)

    batch = make_batch()
    tensordict_utils.assign_non_tensor(batch, compute_loss=False)

    def ask(method, name):
        return no_padding_2_padding(method(batch.clone())[name], batch).float()

    old = ask(workers["actor"].compute_log_prob, "log_probs")
    reference = ask(workers["ref"].compute_ref_log_prob, "log_probs")
    values = ask(critic.infer_batch, "values")
    assert torch.equal(old, reference) and values.any()
    mask = batch["response_mask"]
    rewards = torch.zeros(mask.shape)
    rewards[torch.arange(4), mask.sum(1) - 1] = 1.0
    advantages, returns = compute_gae_advantage_return(rewards, values, mask.float(), gamma=1.0, lam=1.0)
    batch["old_log_probs"], batch["ref_log_prob"], batch["advantages"] = old, reference, advantages
    batch["values"], batch["returns"] = values, returns
    metrics = tensordict_utils.get(workers["actor"].update_actor(batch.clone()), "metrics")
    assert metrics["megatron/mtp_grad_norm"][0] > 0.0 and metrics["mtp_losses/mtp_1_loss"][0] > 0.0
    assert metrics["megatron/updates_skipped_for_grad_norm"] == [0.0] and metrics["kl_loss"] == [0.0]
    assert "mtp" in changed(actor, before)
    metrics = tensordict_utils.get(critic.train_mini_batch(batch.clone()), "metrics")
    assert metrics["critic/vf_loss"][0] > 0.0 and not any("mtp" in name for name in metrics)
    assert metrics["megatron/updates_skipped_for_grad_norm"] == [1.0]


def test_doctor_reads_it(tmp_path):
    words = [
        f"{ACTOR}.optim.optimizer=muon",
        f"{ACTOR}.megatron.context_parallel_size=2",
        f"+{ACTOR}.megatron.override_transformer_config.mtp_num_layers=1",
    ]
    (tmp_path / "verl.yaml").write_text(OmegaConf.to_yaml(compose_ppo("model_engine=megatron", *words)))
    runs = {
        name.rpartition(" ")[2]: RunSettings(run.sources, "2.17.1") for name, run in read_runs(tmp_path / "verl.yaml")
    }
    assert {"ML-5394", "ML-7513b"} <= {finding.id for finding in find_defects(runs["actor"])}
    assert (runs["actor"].bf16, runs["actor"].world_size) == (True, 8)
    assert not {"ML-5394", "ML-7513b"} & {finding.id for finding in find_defects(runs["critic"])}
