"""`doctor -- FLAGS` names the defects that a command line meets on the installed release, and what removes them."""

import json
import os
from types import SimpleNamespace

import megatron_mtp_patches
import pytest
from megatron_mtp_patches.defects.conditions import is_vlm
from megatron_mtp_patches.doctor import findings
from megatron_mtp_patches.doctor.findings import RunSettings
from megatron_mtp_patches.doctor.flags import read
from megatron_mtp_patches.megatrons import installed as installed_megatron
from megatron_mtp_patches.parity import trainer as megatron_trainer

from .training_flags import EXPERTS, SMALL

pytestmark = pytest.mark.forked("patched")

UP_TO_0_18 = ("0.16.1", "0.17.1", "0.18.2")


@pytest.fixture
def defects(doctor):
    """defects(flags, *words): {patch: [the findings that it removes]}, from the JSON."""

    def find(flags, *words):
        findings = {}
        for finding in json.loads(doctor(flags, "--json", *words).out)["defects"]:
            findings.setdefault(finding["patch"], []).append(finding)
        return findings

    return find


def test_a_command_line_that_meets_nothing(doctor):
    done = doctor(SMALL)
    assert done.code == 0
    assert done.out.splitlines()[-1] == "No known defect of this Megatron affects these flags."


def test_a_script_that_a_wheel_lacks_counts_as_that_of_the_release(defects, release, tmp_path, monkeypatch):
    flags = f"{SMALL} --use-rope-scaling --rope-scaling-factor 32"
    (finding,) = defects(flags)["pass-rope-scaling-factor"]
    if release == "0.19.2":  # its wheel has the function that the script calls
        assert not finding["only_if"]
        return
    assert finding["only_if"] == "its gpt_builders.py, which is not on PYTHONPATH here, is that of the release"
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "gpt_builders.py").write_text("def gpt_builder(args):\n    return args.rope_scaling_factor\n")
    assert not defects(flags)


@pytest.mark.parametrize("version, is_met", [("2.12.0", False), ("2.13", True), ("2.17.1", True)])
def test_experts_are_missing_from_the_norm_with_some_versions_of_transformer_engine(defects, release, version, is_met):
    findings = defects(EXPERTS, "--te", version)
    assert ("count-experts-in-grad-norm" in findings) is (is_met and release in UP_TO_0_18)


@pytest.mark.parametrize("tensor, expert_tensor, is_met", [(2, 1, True), (1, 2, True), (2, 2, False)])
def test_experts_that_are_split_over_other_ranks_than_dense_layers(defects, release, tensor, expert_tensor, is_met):
    flags = f"{SMALL} --num-experts 8 --disable-bias-linear --expert-tensor-parallel-size {expert_tensor}"
    findings = defects(f"{flags} --tensor-model-parallel-size {tensor}" + " --sequence-parallel" * (tensor > 1))
    texts = [finding["text"] for finding in findings.get("count-experts-in-grad-norm", ())]
    assert any("averaged over the wrong ranks" in text for text in texts) is (is_met and release in UP_TO_0_18)


def test_without_transformer_engine_it_is_the_one_that_the_release_was_made_for(doctor, release, monkeypatch):
    """Also for configurations: what depends on the version is found in both ways."""

    def absent(name):
        raise installed_megatron.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(installed_megatron.metadata, "version", absent)
    made_for = installed_megatron.TRANSFORMER_ENGINE[release]
    assert f"TransformerEngine {made_for} (not installed; this release was made for it)" in doctor(EXPERTS).out
    run = SimpleNamespace(num_moe_experts=8, tensor_model_parallel_size=2, moe_grouped_gemm=True)
    findings = [finding.patch for finding in megatron_mtp_patches.diagnose(run)]
    assert ("count-experts-in-grad-norm" in findings) is (release in ("0.17.1", "0.18.2"))


def test_a_version_that_is_none_is_wrong_usage(doctor):
    assert doctor(SMALL, "--te", "2.13junk").code == 2
    assert doctor(SMALL, "--te", "2.17.0.dev0+abc").code == 0
    done = doctor(SMALL, "--te", "newest")
    assert done.code == 2 and "--te: 'newest' is not a version of TransformerEngine: write it as '2.16.1'" in done.err


def test_megatron_refuses_flags_by_the_version_of_transformer_engine_that_is_given(doctor):
    """Whatever is installed: a machine that reads flags may have another one, or none."""
    flags = f"{SMALL} --optimizer muon --qk-clip"
    assert doctor(flags, "--te", "2.16.1").code != 2
    done = doctor(flags, "--te", "2.8.0")
    assert done.code == 2 and "Megatron refuses these flags" in done.err and "2.9.0" in done.err


def test_one_line_for_each_defect_and_the_patch_that_removes_it(doctor, release):
    done = doctor(f"{EXPERTS} --optimizer muon", "--te", "2.16.1")
    lines = [line for line in done.out.splitlines() if line.startswith("* ")]
    ids = ["count-experts-in-grad-norm"] * (release in UP_TO_0_18)
    ids += ["exempt-muon-from-clipping", "keep-newton-schulz-scale-invariant"]
    assert [line.rpartition(": removed by ")[2].partition(";")[0] for line in lines] == ids
    assert done.code == 0
    assert (
        done.out.splitlines()[-1]
        == f"Known defects that affect these flags: {len(ids)}. `import megatron_mtp_patches` removes all of them."
    )


@pytest.mark.parametrize("is_installed", [False, True], ids=["missing", "installed"])
def test_a_patch_of_a_package_that_is_not_installed_applies_later(doctor, monkeypatch, is_installed):
    monkeypatch.setattr(findings, "find_file", lambda module: module if is_installed else None)
    pending = SimpleNamespace(state=findings.State.PENDING)
    monkeypatch.setattr(findings, "ENGINE", SimpleNamespace(report=lambda patch: pending))
    done = doctor(f"{SMALL} --optimizer muon")
    later = "removed by keep-newton-schulz-scale-invariant; it applies once emerging-optimizers is installed\n"
    assert done.code == 0 and (later in done.out) is not is_installed


def test_a_patch_that_is_left_out_ends_with_1(doctor, monkeypatch):
    monkeypatch.setenv("MEGATRON_MTP_PATCHES", "-drop-unused-output-weight")
    megatron_mtp_patches.revert()
    done = doctor(f"{SMALL} --mtp-num-layers 1 --pipeline-model-parallel-size 2 --save x --save-interval 1")
    assert done.code == 1
    assert "NOT REMOVED: drop-unused-output-weight is left out by MEGATRON_MTP_PATCHES" in done.out
    assert done.out.endswith("; 1 of them the patches do not remove.\n")


def test_a_vision_language_model_is_known_by_the_flags_of_its_scripts(trainer):
    for words, is_one in (
        (["--freeze-LM"], True),
        (["--dataloader-seq-length", "8"], True),
        (["--reward-model"], False),
    ):
        line = read([*SMALL.split(), *words], None)
        settings = RunSettings(line.sources, None)
        assert is_vlm(settings) is is_one and settings.is_of_megatron_trainer
        assert line.unknown.names == words[:1]  # said to be ignored all the same: they may be misspelt


@pytest.mark.parametrize("words, ranks", [((), 8), (("--world-size", "16"), 16)])
def test_the_smallest_world_size_that_fits_or_the_one_that_is_given(doctor, words, ranks):
    done = doctor(f"{EXPERTS} --pipeline-model-parallel-size 2", "--json", *words)
    assert json.loads(done.out)["world_size"] == ranks


def test_flags_of_the_script_are_listed_and_ignored(doctor):
    assert doctor(f"{SMALL} --reward-model here").code == 0
    done = doctor(f"{SMALL} --reward-model here --min-clip-coeficient 0.1")
    told = done.out
    assert "unknown to Megatron, ignored: --reward-model --min-clip-coeficient\n" in told
    assert [line for line in told.splitlines() if "did you mean" in line] == [
        "--min-clip-coeficient: did you mean --min-clip-coefficient? Megatron's parser refuses it, unless your script "
        "adds it"
    ]
    assert done.code == 2  # as the training ends
    assert told.splitlines()[-1] == "No known defect of this Megatron affects the flags that Megatron knows."
    with_muon = doctor(f"{SMALL} --optimizer muon --min-clip-coeficient 0.1").out
    assert "Known defects that affect the flags that Megatron knows: " in with_muon


def test_flags_for_heads_have_no_effect_on_a_model_without_heads(doctor):
    flags = ["--mtp-detach-heads", "--mtp-clip-grad=0", "--mtp-acceptance-interval=2", "--no-mtp-eval"]
    flags += ["--mtp-acceptance-length-interval=3", "--mtp-logits-chunk-size=8", "--mtp-init=random"]
    names = [flag.partition("=")[0] for flag in flags]
    text = f"{SMALL} {' '.join(flags)} --load base"
    done = doctor(text)
    assert done.code == 0
    for name in names:
        assert f"{name} has no effect: the model has no MTP heads; add --mtp-num-layers\n" in done.out
    assert sorted(json.loads(doctor(text, "--json").out)["without_effect"]) == sorted(names)


@pytest.mark.parametrize("more", ["--mtp-num-layers 1", "--use-checkpoint-args --load nowhere"])
def test_flags_for_heads_act_where_there_are_heads_or_the_checkpoint_may_have_some(doctor, more):
    done = doctor(f"{SMALL} --freeze-base-model-for-mtp {more}")
    assert done.code == 0 and "has no effect" not in done.out


def test_the_pattern_of_a_hybrid_model_has_heads(doctor, release):
    if release == "0.16.1":
        pytest.skip("its hybrid models have no heads")
    flags = f"{SMALL} --freeze-base-model-for-mtp --hybrid-layer-pattern *-/*-".replace("--num-layers 4 ", "")
    assert doctor(flags).code == 0


def test_what_only_the_checkpoint_knows_is_said(doctor):
    flags = f"{SMALL} --use-checkpoint-args --load nowhere"
    assert "the checkpoint decides --num-experts" in doctor(flags).out
    assert "--num-experts" in json.loads(doctor(flags, "--json").out)["decided_by_checkpoint"]
    assert json.loads(doctor(SMALL, "--json").out)["decided_by_checkpoint"] == []


def test_the_sections_of_a_yaml_file_are_settings(doctor, release, tmp_path, monkeypatch):
    """Megatron's own check of the file wants a hundred more keys."""
    from megatron.training import yaml_arguments

    monkeypatch.setattr(yaml_arguments, "validate_yaml", lambda arguments, defaults: arguments)
    file = tmp_path / "run.yaml"
    sections = {
        "language_model": {"num_moe_experts": 8, "moe_grouped_gemm": True},
        "model_parallel": {
            "tensor_model_parallel_size": 2,
            "expert_model_parallel_size": 4,
            "expert_tensor_parallel_size": 1,
        },
        "enable_msc": False,
        "disable_msc_deprecated": False,
    }
    file.write_text(json.dumps(sections))  # JSON is YAML
    answer = json.loads(doctor(f"--yaml-cfg {file}", "--json", "--te", "2.16.1").out)
    assert answer["world_size"] == 4
    assert bool(answer["defects"]) is (release in UP_TO_0_18)


def test_flags_after_a_second_separator_are_read(doctor):
    assert "exempt-muon-from-clipping" in doctor(f"{SMALL} -- --optimizer muon").out


FSDP = f"{SMALL} --use-megatron-fsdp --ckpt-format fsdp_dtensor --no-gradient-accumulation-fusion"
DETERMINISTIC = f"{SMALL} --deterministic-mode --attention-backend fused"
OFFLOADING = f"{SMALL} --fine-grained-activation-offloading --offload-modules attn_norm"


@pytest.mark.parametrize(
    "flags, expected",
    [
        (SMALL, {}),
        (DETERMINISTIC, {"NCCL_ALGO": "Ring"}),
        (OFFLOADING, {"NVTE_CPU_OFFLOAD_V1": "1"}),
        (f"{DETERMINISTIC} --context-parallel-size 2", {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_ALGO": "Ring"}),
        (FSDP, {}),
    ],
    ids=["none", "deterministic", "offloading", "split", "FSDP"],
)  # fmt: skip
def test_what_validate_args_wants_of_the_environment_is_assumed_and_named(doctor, monkeypatch, flags, expected):
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_ALGO", "NVTE_CPU_OFFLOAD_V1"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    done = doctor(flags)
    assert done.code in (0, 1), done.err
    assumed = " ".join(f"{name}={value}" for name, value in expected.items())
    assert (f"assumed in the environment of the run: {assumed}\n" in done.out) is bool(expected)
    assert json.loads(doctor(flags, "--json").out)["assumed_environment"] == expected
    assert dict(os.environ) == before


@pytest.mark.parametrize("value", ["Ring", "CollnetDirect"])
def test_a_variable_that_is_set_already_is_not_named(doctor, monkeypatch, value):
    monkeypatch.setenv("NCCL_ALGO", value)
    assert "assumed in the environment" not in doctor(DETERMINISTIC).out


def test_a_value_that_megatron_fsdp_refuses_is_replaced_and_named(doctor, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert "assumed in the environment of the run: CUDA_DEVICE_MAX_CONNECTIONS=8\n" in doctor(FSDP).out


def test_hybrid_context_parallelism_is_refused_for_the_heads_of_a_pattern_too(doctor, release):
    if release == "0.16.1":
        pytest.skip("its hybrid models have no heads")
    flags = f"{SMALL} --hybrid-layer-pattern *-/*- --context-parallel-size 2 --hybrid-context-parallel"
    flags = flags.replace("--num-layers 4 ", "")
    done = doctor(f"{flags} --max-seqlen-per-dp-cp-rank 64 --calculate-per-token-loss")
    assert done.code == 2 and "-count-mtp-tokens-over-ranks" in done.err


@pytest.mark.parametrize(
    "flags, hint",
    [
        ("--json", "--json, --te, --world-size go before --"),
        ("--nproc-per-node 8", "torchrun's options are ignored: give --world-size N before --"),
    ],
)
def test_words_of_other_commands_get_a_hint(doctor, flags, hint):
    assert hint in doctor(f"{SMALL} {flags}").out


def test_the_options_of_torchrun_need_no_hint_where_the_number_of_ranks_is_given(doctor):
    assert "torchrun" not in doctor(f"{SMALL} --nproc-per-node 8", "--world-size", "8").out


def test_layer_wise_muon_is_known_however_megatron_spells_it(defects, release):
    """validate_args of 0.19 reads dist_muon as muon and a setting."""
    flags = f"{SMALL} --optimizer dist_muon --mtp-num-layers 1 --mtp-detach-heads"
    texts = [finding["text"] for finding in defects(flags).get("clip-mtp-grads-separately", ())]
    assert any("by different norms" in text for text in texts) is (release in ("0.19.2", "main"))


@pytest.mark.parametrize("words", [("--json",), ("--te", "2.16.1"), ("--world-size", "2")])
def test_options_without_flags_are_wrong_usage(command, words):
    done = command("doctor", *words)
    assert done.code == 2 and "need the flags of a training: doctor ... -- FLAGS" in done.err


def test_without_megatron_it_says_what_to_install_as_status_does(command, monkeypatch):
    for module in (megatron_trainer, installed_megatron):
        monkeypatch.setattr(module, "find_file", lambda name: None)
    done = command("doctor", "--", "--num-layers", "4")
    assert done.code == 1 and "megatron-core is not installed (pip install megatron-core, or" in done.err
