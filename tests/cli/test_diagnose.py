"""`diagnose` names the defects that affect the configurations of a trainer without a command line."""

from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import megatron_mtp_patches
import pytest
from megatron.core.optimizer import OptimizerConfig
from megatron_mtp_patches.defects.declare import Gap
from megatron_mtp_patches.defects.labs.lab import make_config, make_gpt, run_microbatches, start
from megatron_mtp_patches.doctor import findings

pytestmark = pytest.mark.forked("patched")


@pytest.fixture
def declare(monkeypatch):
    """declare(defect, ...): from now on these are the known defects, and this Megatron has them."""

    def replace_known(*defects):
        monkeypatch.setattr(findings, "known_defects", lambda: defects)
        monkeypatch.setattr(findings, "has_defect", lambda defect: True)

    return replace_known


def test_configurations_are_diagnosed_as_flags_are():
    """TransformerConfig calls the number of experts otherwise than the command line."""
    model = SimpleNamespace(num_moe_experts=8, tensor_model_parallel_size=2, optimizer=None)
    model.moe_grouped_gemm = True
    findings = megatron_mtp_patches.diagnose(model, OptimizerConfig(optimizer="muon"), transformer_engine="2.16.1")
    patches = {finding.patch for finding in findings}
    assert {"exempt-muon-from-clipping", "keep-newton-schulz-scale-invariant"} <= patches
    assert all(finding.is_removed for finding in findings)


@pytest.mark.parametrize("is_on", [False, True])
def test_a_defect_is_removed_only_with_the_setting_that_its_patch_needs(is_on):
    run = SimpleNamespace(num_experts=8, moe_router_load_balancing_type="global_aux_loss", moe_aux_loss_coeff=0.1)
    run.data_parallel_size, run.moe_global_aux_loss_over_data_parallel = 2, is_on
    (finding,) = [one for one in megatron_mtp_patches.diagnose(run, transformer_engine="2.16.1") if one.id == "ML-5007"]
    assert finding.is_removed is is_on
    assert finding.remedy.startswith("" if is_on else "add --moe-global-aux-loss-over-data-parallel")


def test_a_defect_is_not_removed_from_the_runs_that_its_patch_leaves_out(declare):
    chosen = next(one for one in findings.known_defects() if one.patch and not (one.setting or one.after))
    gap = Gap(lambda run: run.is_deep, when="--is-deep", because="it is deep")
    one = replace(chosen, affects=lambda run: True, unless=gap, instead="--is-flat")
    declare(one)
    for is_deep in (False, True):
        (finding,) = megatron_mtp_patches.diagnose(SimpleNamespace(is_deep=is_deep))
        assert finding.is_removed is not is_deep
        remedy = f"{chosen.patch} does not remove it here, because it is deep; instead set --is-flat"
        assert finding.remedy == is_deep * remedy


@pytest.mark.parametrize("is_other_removed", [True, False])
def test_a_defect_may_be_removed_only_after_another_one(declare, is_other_removed):
    chosen = next(one for one in findings.known_defects() if one.patch and not (one.setting or one.unless))
    other = replace(chosen, id="other", affects=lambda run: True, patch=chosen.patch * is_other_removed)
    one = replace(other, id="one", patch=chosen.patch, after="other")
    declare(one, other)
    finding, _ = megatron_mtp_patches.diagnose(SimpleNamespace())
    assert finding.is_removed is is_other_removed
    assert finding.remedy.startswith(
        "" if is_other_removed else f"{chosen.patch} removes it only where other is removed"
    )


@pytest.mark.parametrize(
    "instead, remedy", [("--log-interval 1", "set --log-interval 1"), ("leave it out", "leave it out")]
)
def test_what_to_do_instead_is_said_as_something_to_do(declare, instead, remedy):
    chosen = next(one for one in findings.known_defects() if not one.patch)
    defect = replace(chosen, instead=instead, affects=lambda run: True)
    declare(defect)
    (finding,) = megatron_mtp_patches.diagnose(SimpleNamespace())
    assert finding.remedy == f"no patch; instead {remedy}"


@pytest.mark.parametrize(
    "settings", [(), (None,), ({"mtp_num_layers": 2},), ([SimpleNamespace()],), (SimpleNamespace,)]
)
def test_what_is_no_configuration_is_refused(settings):
    with pytest.raises(TypeError, match=r"diagnose\(\) takes Megatron's arguments or configurations, not "):
        megatron_mtp_patches.diagnose(*settings)


@pytest.mark.parametrize("version", ["abc", 2.13, (2, 13)])
def test_what_is_no_version_is_refused(version):
    with pytest.raises(ValueError, match="is not a version of TransformerEngine"):
        megatron_mtp_patches.diagnose(SimpleNamespace(), transformer_engine=version)


def test_a_model_whose_schedule_finalizes_no_gradients_is_named():
    """Its configuration is a copy of the one on which the trainer sets the function."""
    start()
    finalized: list[object] = []
    configuration = make_config()
    model = make_gpt(deepcopy(configuration))
    configuration.finalize_model_grads_func = lambda *chunks, **_: finalized.append(chunks)
    run_microbatches(model, 1)
    assert finalized == []
    assert megatron_mtp_patches.diagnose(model=[model])[0].id == "gradients-not-finalized"

    model.config.finalize_model_grads_func = configuration.finalize_model_grads_func
    run_microbatches(model, 1)
    assert len(finalized) == 1
    names = [finding.id for finding in megatron_mtp_patches.diagnose(OptimizerConfig(optimizer="muon"), model=model)]
    assert "gradients-not-finalized" not in names and "EO-238" in names


@pytest.mark.parametrize("model", [[], SimpleNamespace()])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(TypeError, match="model is Megatron's model, or the list of its chunks, not"):
        megatron_mtp_patches.diagnose(model=model)
