"""What is read off the configuration that verl composes for its PPO trainer."""

from pathlib import Path

import pytest

pytest.importorskip("verl", reason="verl is not installed")

import verl
from hydra import compose, initialize_config_dir
from megatron_mtp_patches.cli.run_files import read_runs
from megatron_mtp_patches.defects.diagnosis import Settings, find_defects
from omegaconf import OmegaConf

pytestmark = pytest.mark.forked("patched")


def test_doctor_reads_it(tmp_path):
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
