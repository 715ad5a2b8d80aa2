"""verl's Megatron engine trains MTP heads through a skipped update and reports the metrics of the patches.

verl's TrainingWorker runs (train_mini_batch, as a PPO update does, and train_batch, as the SFT trainer does) with the
engine's own methods, verl's optimizer, MTP patch and MTP metrics. An object stands for the engine that the worker would
build from a model of Hugging Face, and no Ray actor holds the worker.
"""

import contextlib
from types import SimpleNamespace

import megatron_mtp_patches
import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed")

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from omegaconf import OmegaConf
from verl.utils import tensordict_utils
from verl.utils.megatron.optimizer import (
    get_megatron_optimizer,
    get_megatron_optimizer_param_scheduler,
    init_megatron_optim_config,
)
from verl.utils.megatron_utils import get_megatron_mtp_loss, patch_engine_mtp
from verl.utils.profiler import DistProfiler
from verl.workers.config import McoreEngineConfig, McoreOptimizerConfig
from verl.workers.engine.base import BaseEngine
from verl.workers.engine.megatron.transformer_impl import MegatronEngine
from verl.workers.engine_workers import TrainingWorker

pytestmark = pytest.mark.forked("patched")


def test_doctor_reads_the_configuration_that_verl_composes(tmp_path):
    from pathlib import Path

    import verl
    from hydra import compose, initialize_config_dir
    from megatron_mtp_patches.cli.run_files import read_runs
    from megatron_mtp_patches.defects.diagnosis import Settings, find_defects

    actor = "actor_rollout_ref.actor"
    overrides = [
        f"{actor}.optim.optimizer=muon",
        f"{actor}.megatron.context_parallel_size=2",
        f"+{actor}.megatron.override_transformer_config.mtp_num_layers=1",
    ]
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        composed = compose("ppo_megatron_trainer", overrides=overrides)
    (tmp_path / "verl.yaml").write_text(OmegaConf.to_yaml(composed))
    runs = {name.rpartition(" ")[2]: Settings(run.sources, "2.17.1") for name, run in read_runs(tmp_path / "verl.yaml")}
    assert {"ML-5394", "ML-7513b"} <= {finding.id for finding in find_defects(runs["actor"])}
    assert (runs["actor"].bf16, runs["actor"].world_size) == (True, 8)
    assert not {"ML-5394", "ML-7513b"} & {finding.id for finding in find_defects(runs["critic"])}


class Engine:
    """What MegatronEngine is while it trains, around a model of this test.

    Attributes:
        settings: verl's `override_optimizer_config`.
    """

    def __init__(self, model, detach_encoder=False, **settings):
        self.model = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
        self.module = [self.model]
        patch_engine_mtp(self.module, SimpleNamespace(mtp=SimpleNamespace(detach_encoder=detach_encoder)))
        config = {"optimizer": "adam", "lr": 1e-2, "min_lr": 0.0, "clip_grad": 1.0, "weight_decay": 0.0}
        config = OmegaConf.create({**config, "override_optimizer_config": settings})
        config = init_megatron_optim_config(config, use_distributed_optimizer=False, bf16=False)
        self.optimizer = get_megatron_optimizer(self.module, config)
        decay = McoreOptimizerConfig(lr=1e-2, lr_decay_style="constant", total_training_steps=10)
        self.lr_scheduler = get_megatron_optimizer_param_scheduler(self.optimizer, decay)

    def train_batch(self, data, loss_function):
        return BaseEngine.train_batch(self, data, loss_function)

    def optimizer_step(self):
        return MegatronEngine.optimizer_step(self)

    def is_mp_src_rank_with_outputs(self):
        return True

    def optimizer_zero_grad(self):
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def forward_backward_batch(self, data, loss_function, forward_only):
        output = self.model(**self.batch)
        loss_function(output, self.batch["labels"]).backward()
        self.model.finish_grad_sync()
        metrics = get_megatron_mtp_loss(1)
        # verl's forward_backward_batch has a list with an entry for each microbatch.
        metrics = {name: value if isinstance(value, list) else [value] for name, value in metrics.items()}
        return {"metrics": metrics, "loss": [0.0], "model_output": {}}

    def train_mode(self, **_):
        return contextlib.nullcontext()

    def lr_scheduler_step(self):
        return MegatronEngine.lr_scheduler_step(self)

    def get_data_parallel_group(self):
        return torch.distributed.group.WORLD

    def get_data_parallel_size(self):
        return 1

    def get_data_parallel_rank(self):
        return 0

    def worker(self, batch):
        """Return verl's TrainingWorker around this engine, and what it is to train on."""
        worker = object.__new__(TrainingWorker)
        worker.engine, worker.loss_fn, worker.device_name, worker.flops_counter = self, loss_of, "cpu", None
        worker.model_config, worker.profiler = {}, DistProfiler(rank=0, config=None, tool_config=None)
        worker.engine_config = McoreEngineConfig(use_dynamic_bsz=False, micro_batch_size_per_gpu=2)
        self.batch = batch
        settings = {"mini_batch_size": 2, "dataloader_kwargs": {"shuffle": False}}
        return worker, tensordict_utils.get_tensordict({"labels": batch["labels"]}, settings)

    def step(self, batch):
        """Return verl's metrics of a batch, and the parameters after it by name."""
        worker, data = self.worker(batch)
        metrics = tensordict_utils.get(worker.train_batch(data), "metrics")
        return metrics, {name: parameter.detach().clone() for name, parameter in self.model.module.named_parameters()}


def loss_of(output, labels):
    """verl's model returns logits, [b, s, v], and verl computes its loss from them."""
    return torch.nn.functional.cross_entropy(output.float().flatten(0, 1), labels.flatten())


@pytest.fixture
def make_engine(make_model):
    """make_engine(detach_encoder=False, model={}, **optimizer): an engine with one MTP head."""

    def make(detach_encoder=False, model=(), **optimizer):
        return Engine(make_model(**{"mtp_num_layers": 1, **dict(model)}), detach_encoder, **optimizer)

    return make


def test_training_goes_on_after_a_skipped_update(make_engine, batch):
    engine = make_engine(grad_norm_skip_threshold=1e-3)
    before = {name: parameter.clone() for name, parameter in engine.model.module.named_parameters()}
    metrics, after = engine.step(batch)
    assert metrics["grad_norm"] > 0.1 and metrics["megatron/updates_skipped_for_grad_norm"] == 1
    assert all(torch.equal(after[name], before[name]) for name in before)
    engine.optimizer.config.grad_norm_skip_threshold = 1e3
    metrics, after = engine.step(batch)
    assert metrics["megatron/updates_skipped_for_grad_norm"] == 1
    assert not any(torch.equal(after[name], before[name]) for name in before)


@pytest.fixture
def without_the_patch():
    megatron_mtp_patches.apply("-skip-updates-in-verl")
    yield
    megatron_mtp_patches.apply()


@pytest.mark.usefixtures("without_the_patch")
def test_without_the_patch_a_skipped_update_ends_verl(make_engine, batch):
    engine = make_engine(grad_norm_skip_threshold=1e-3)
    with pytest.raises(NotImplementedError, match="optimizer step failed"):
        engine.step(batch)


def test_another_failure_still_ends_verl(make_engine, batch, monkeypatch):
    engine = make_engine()
    monkeypatch.setattr(engine.optimizer, "step", lambda: (False, None, None))
    with pytest.raises(NotImplementedError, match="optimizer step failed"):
        engine.step(batch)


def test_verl_reports_the_metrics_of_heads_and_optimizer(make_engine, batch):
    engine = make_engine(model={"mtp_detach_heads": True}, mtp_clip_grad=0.1)
    metrics, _ = engine.step(batch)
    assert metrics["megatron/mtp_grad_norm"] > 0.1
    assert metrics["mtp_losses/mtp_1_loss"] > 3.0
    assert 0.0 <= metrics["mtp_losses/mtp_1_acceptance_rate"] <= 100.0
    assert megatron_mtp_patches.metrics(engine.optimizer)["mtp grad norm"] == metrics["megatron/mtp_grad_norm"]


SETTINGS = {
    "none": {},
    "detached heads": {"model": {"mtp_detach_heads": True}},
    "heads clipped separately": {"model": {"mtp_detach_heads": True}, "mtp_clip_grad": 0.05},
    "threshold": {"grad_norm_skip_threshold": 100.0},
    "threshold that skips": {"grad_norm_skip_threshold": 1e-3},
    "loss": {"model": {"mtp_loss_type": "e2e_tv", "mtp_acceptance_length_interval": 1}},
    "frozen main model": {"model": {"freeze_base_model_for_mtp": True}},
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_ppo_update_trains_and_reports_numbers(make_engine, batch, settings):
    """TrainingWorker.train_mini_batch chains what is a list; a number that is none ended each update."""
    worker, data = make_engine(**SETTINGS[settings]).worker(batch)
    metrics = tensordict_utils.get(worker.train_mini_batch(data), "metrics")
    ours = {name: value for name, value in metrics.items() if name.startswith("megatron/")}
    assert "grad_norm" in metrics and all(isinstance(value, float) for [value] in ours.values())
    assert ("megatron/mtp_grad_norm" in ours) == bool(SETTINGS[settings].get("model", {}).get("mtp_detach_heads"))
    if "threshold" in settings:
        assert ours["megatron/updates_skipped_for_grad_norm"] == [float("skips" in settings)]


def test_tensorboard_of_the_sft_trainer_takes_the_metrics(make_engine, batch, tmp_path, monkeypatch):
    from verl.utils.tracking import Tracking

    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path))
    metrics, _ = make_engine(model={"mtp_detach_heads": True}, mtp_clip_grad=0.05).step(batch)
    tracking = Tracking("project", "experiment", default_backend=["tensorboard"])
    tracking.log(metrics, step=1)
    assert list(tmp_path.iterdir())


def test_heads_train_for_acceptance(make_engine, batch):
    engine = make_engine(model={"mtp_detach_heads": True, "mtp_loss_type": "tv"})
    for _ in range(2):
        metrics, _ = engine.step(batch)
        # one head: its total variation is what the accepted length lacks to two
        loss = metrics["mtp_losses/mtp_1_loss"]
        assert 0.0 < loss < 1.0 and metrics["megatron/mtp_grad_norm"] > 0.0
        assert metrics["mtp_losses/mtp_acceptance_length"] == pytest.approx(2.0 - loss, rel=1e-5)


def gradients(engine, batch):
    engine.optimizer_zero_grad()
    loss_of(engine.model(**batch), batch["labels"]).backward()
    return {name: parameter.main_grad.clone() for name, parameter in engine.model.module.named_parameters()}


def test_the_logits_of_the_heads_may_be_made_in_chunks(make_engine, batch):
    whole, chunked = (gradients(make_engine(model={"mtp_logits_chunk_size": size}), batch) for size in (0, 8))
    for name, gradient in whole.items():
        torch.testing.assert_close(chunked[name], gradient, rtol=1e-5, atol=1e-6)


def test_depth_weights_weigh_the_heads(make_engine, batch):
    first, second = (
        gradients(make_engine(model={"mtp_num_layers": 2, "mtp_depth_weights": weights}), batch)
        for weights in ("1,0", "0,1")
    )
    assert not first["mtp.layers.1.eh_proj.weight"].any() and first["mtp.layers.0.eh_proj.weight"].any()
    assert second["mtp.layers.1.eh_proj.weight"].any()


def test_the_loss_has_the_weight_of_its_schedule(make_engine, batch):
    """An iteration is a batch, from which two updates are made here."""
    engine = make_engine(model={"mtp_detach_heads": True, "mtp_loss_scaling_schedule": "0:0.5,1:0"})
    for weight in (0.5, 0.0):
        worker, data = engine.worker(batch)
        tensordict_utils.assign_non_tensor(data, epochs=2)
        metrics = tensordict_utils.get(worker.train_mini_batch(data), "metrics")
        assert metrics["mtp_losses/mtp_loss_scaling_factor"] == [weight] * 2
        assert [norm > 0.0 for norm in metrics["megatron/mtp_grad_norm"]] == [weight > 0.0] * 2


def test_a_schedule_in_per_cent_is_refused(make_engine, batch):
    with pytest.raises(ValueError, match="neither a number of train iterations nor of samples"):
        make_engine(model={"mtp_loss_scaling_schedule": "0:0.5,50%:0.1"}).step(batch)


def test_heads_train_alone(make_engine, batch):
    engine = make_engine(model={"freeze_base_model_for_mtp": True})
    before = {name: parameter.clone() for name, parameter in engine.model.module.named_parameters()}
    metrics, after = engine.step(batch)
    assert metrics["mtp_losses/mtp_1_loss"] > 3.0
    changed = {name for name in before if not torch.equal(after[name], before[name])}
    assert changed and changed == {name for name in before if name.startswith("mtp.")}


def test_disabled_heads_need_verl_s_own_setting_too(make_engine, batch):
    """With mtp.enable_train=false verl's own method gets no labels and runs no head."""
    engine = make_engine(model={"disable_mtp_loss": True})
    with pytest.raises(NotImplementedError, match="mtp.enable_train=false of verl"):
        engine.model(**batch)
    engine.model(**{**batch, "labels": None, "loss_mask": None}).mean().backward()
    trained = {name for name, param in engine.model.module.named_parameters() if hasattr(param, "main_grad")}
    assert trained and not any(name.startswith("mtp.") for name in trained)


def test_a_limit_for_heads_without_a_separate_norm_is_refused_by_its_field(make_engine):
    with pytest.raises(ValueError, match=r"\(config.mtp_clip_grad\) needs MTP heads with a separate norm"):
        make_engine(mtp_clip_grad=0.1)


def test_training_goes_on_from_verl_s_checkpoint(make_engine, batch, tmp_path):
    from verl.utils.megatron.dist_checkpointing import load_dist_checkpointing, save_dist_checkpointing

    def state(engine, is_loading=False):
        of_model = engine.model.module.sharded_state_dict()
        return {"model": of_model, "optimizer": engine.optimizer.sharded_state_dict(of_model, is_loading)}

    settings = {"model": {"mtp_detach_heads": True}, "mtp_clip_grad": 0.1}
    engine = make_engine(**settings)
    engine.step(batch)
    save_dist_checkpointing(state(engine), str(tmp_path))
    resumed = make_engine(**settings)
    loaded = load_dist_checkpointing(state(resumed, is_loading=True), str(tmp_path))
    resumed.model.module.load_state_dict(loaded["model"])
    resumed.optimizer.load_state_dict(loaded["optimizer"])
    (metrics, after), (of_resumed, after_resumed) = engine.step(batch), resumed.step(batch)
    assert of_resumed["megatron/mtp_grad_norm"] == metrics["megatron/mtp_grad_norm"]
    assert all(torch.equal(after_resumed[name], after[name]) for name in after)


@pytest.mark.parametrize("detach_encoder", [False, True])
def test_detached_heads_stay_detached_under_verl_s_own_patch(make_engine, batch, detach_encoder):
    engine = make_engine(detach_encoder, model={"mtp_detach_heads": True})
    engine.optimizer_zero_grad()
    (0.0 * engine.model(**batch).float().sum()).backward()
    reached = {name for name, parameter in engine.model.module.named_parameters() if parameter.main_grad.any()}
    assert reached and all(name.startswith("mtp.") for name in reached)


def test_an_mtp_pass_is_refused(make_engine, batch):
    """verl's own method computes the loss, and knows nothing of it."""
    engine = make_engine()
    with (
        megatron_mtp_patches.mtp_pass(compute=True),
        pytest.raises(NotImplementedError, match="mtp_pass has no effect"),
    ):
        engine.model(**batch)
