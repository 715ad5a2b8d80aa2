"""`doctor --batch FILES` names the defects of many runs."""

from __future__ import annotations

import importlib
import json
import re

import megatron_mtp_patches
import pytest
from megatron_mtp_patches.doctor.configuration import choice_in, read_hugging_face_sizes
from megatron_mtp_patches.doctor.findings import RunSettings
from megatron_mtp_patches.doctor.run_files import read_runs

from .training_flags import EXPERTS, SMALL

pytestmark = [pytest.mark.forked("patched"), pytest.mark.usefixtures("trainer")]


def recipe(flags: str, name: str = "MODEL_ARGS") -> str:
    """The flags as a recipe of Megatron-LM's functional tests has them."""
    lines = [f"{name}:"]
    for word in flags.split():
        lines += [f"  {word}: true"] if word.startswith("--") else []
        if not word.startswith("--"):
            lines[-1] = lines[-1].replace("true", word)
    return "\n".join(lines) + "\n"


@pytest.fixture
def diagnose(command, tmp_path, monkeypatch):
    """diagnose(**texts): {file: the ids of its defects}; a file whose name ends in _yaml or _json is one of these."""
    monkeypatch.chdir(tmp_path)

    def run(**texts):
        files = [name.replace("_yaml", ".yaml").replace("_json", ".json") for name in texts]
        for file, text in zip(files, texts.values(), strict=True):
            (tmp_path / file).write_text(text)
        done = command("doctor", "--te", "2.16.1", "--json", "--batch", *files)
        return {
            run["file"]: run["unusable"] or run["refused"] or {one["id"] for one in run["defects"]}
            for run in json.loads(done.out)["runs"]
        }

    return run


def test_flags_are_the_same_as_text_and_in_a_recipe(diagnose, release):
    flags = f"{EXPERTS} --optimizer muon"
    findings = diagnose(text=flags, recipe_yaml=recipe(flags))
    assert findings["text"] == findings["recipe.yaml"] >= {"ML-5394", "EO-238"}
    assert ("ML-5916" in findings["text"]) is (release in ("0.17.1", "0.18.2"))


def test_a_file_may_have_several_runs_and_switches_that_are_off(diagnose):
    muon = recipe(SMALL, "MODEL_ARGS_1") + "  --optimizer: muon\n  --bf16: false\n  --log-interval: null\n"
    findings = diagnose(two_yaml=muon + recipe(SMALL, "MODEL_ARGS_2"))
    assert "ML-5394" in findings["two.yaml MODEL_ARGS_1"] and findings["two.yaml MODEL_ARGS_2"] == set()


def test_words_in_brackets_are_several(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text('MODEL_ARGS:\n  --cuda-graph-scope: "[attn mlp]"\n  --spec: "[megatron.core.models layers_spec]"\n')
    ((_, command),) = read_runs(file)
    assert command.flags == ["--cuda-graph-scope", "attn", "mlp", "--spec", "megatron.core.models", "layers_spec"]


def test_the_configuration_of_a_run_of_bridge(diagnose):
    sections = (
        "model:\n  _target_: x.GPTProvider\n  mtp_num_layers: 2\n  context_parallel_size: 2\noptimizer:\n  lr: 1.0\n"
    )
    sections += "logger:\n  log_interval: 1\ncheckpoint:\n  save: x\n  dist_ckpt_optim_fully_reshardable: true\n"
    sections += "ddp:\n  use_distributed_optimizer: true\n  overlap_grad_reduce: true\n"
    defects = diagnose(run_config_yaml=sections)["run_config.yaml"]
    assert {"ML-7513b", "ML-5077"} <= defects and "ML-6238" not in defects  # which Megatron's own trainer has
    without_optimizer = sections.replace("  save: x\n", "  save: x\n  save_optim: false\n")
    assert "ML-5077" not in diagnose(run_config_yaml=without_optimizer)["run_config.yaml"]


@pytest.mark.parametrize("section", ["packed_sequence_specs", "offline_packing_specs"])
@pytest.mark.parametrize("multiple", [1, 4])
def test_a_run_of_bridge_whose_packed_sequences_are_padded(diagnose, section, multiple):
    text = f"model:\n  mtp_num_layers: 1\ndataset:\n  {section}:\n    pad_seq_to_mult: {multiple}\n"
    assert ("ML-4494" in diagnose(run_config_yaml=text)["run_config.yaml"]) is (multiple > 1)


def test_a_run_of_bridge_is_repaired_of_what_only_two_trainers_are(doctor_of_file):
    sizes = "num_layers: 2, num_moe_experts: 2, mtp_num_layers: 2, moe_layer_freq: [1, 0], moe_z_loss_coeff: 0.1"
    record = megatron_mtp_patches.record()
    text = f"model: {{{sizes}, context_parallel_size: 2}}\nlogger: {{megatron_mtp_patches: {record}}}\n"
    printed = " ".join(doctor_of_file(text, name="run_config.yaml").out.split())
    assert re.search(r"ML-6748, [^*]*: removed by average-aux-loss-over-moe-layers", printed)


def test_a_run_of_bridge_has_the_patches_of_its_record(doctor_of_file, monkeypatch):
    """Or none that counts, where it has no record and the command is not told."""
    text = "model: {mtp_num_layers: 1, context_parallel_size: 2}\nlogger: {megatron_mtp_patches: %s}\n"
    record = megatron_mtp_patches.record()
    removed = "removed by count-mtp-tokens-over-ranks"

    def told(record):
        return " ".join(doctor_of_file(text % record, name="run_config.yaml").out.split())

    assert removed in told(record) and "NOT REMOVED" not in told(record)
    left_out = re.sub("count-mtp-tokens-over-ranks=[a-z]+", "count-mtp-tokens-over-ranks=disabled", record)
    assert "NOT REMOVED: count-mtp-tokens-over-ranks is left out by MEGATRON_MTP_PATCHES" in told(left_out)
    assert "nothing in this file shows" in told("''") and removed not in told("''")
    monkeypatch.setenv("MEGATRON_MTP_PATCHES", "all")
    assert removed in told("''") and "nothing in this file shows" not in told("''")


@pytest.mark.parametrize(
    "choice", ["all", "none", "repairs", "-detach-mtp-heads", "repairs,-keep-outputs-until-sent,detach-mtp-heads"]
)
def test_the_choice_of_a_run_is_that_of_its_record(choice):
    states = []
    for _ in range(2):
        megatron_mtp_patches.revert()
        megatron_mtp_patches.apply(choice)
        states.append([report.state for report in megatron_mtp_patches.status()])
        choice = choice_in(megatron_mtp_patches.record())
    assert states[0] == states[1]


def test_many_configurations_are_read_without_megatron_s_trainer(command, tmp_path, monkeypatch):
    """Its import is most of the time; only flags need it."""
    monkeypatch.setattr(importlib.import_module("megatron_mtp_patches.parity.trainer"), "import_targets", None)
    folders = [tmp_path / str(number) for number in range(5)]
    for folder in folders:
        folder.mkdir()
        (folder / "run_config.yaml").write_text("model: {mtp_num_layers: 1, context_parallel_size: 2}\noptimizer: {}\n")
    done = command("doctor", "--batch", *(str(folder / "run_config.yaml") for folder in folders))
    assert done.code in (0, 1) and "Runs: 5;" in done.out and done.out.count("ML-7513b") == 5


ACTOR = """
actor_rollout_ref:
  actor:
    strategy: megatron
    optim: {optimizer: muon, clip_grad: 1.0}
    megatron:
      context_parallel_size: 2
      dtype: bfloat16
      entropy_from_logits_chunk_size: ${oc.select:actor.entropy_from_logits_chunk_size,2048}
      override_transformer_config: {mtp_num_layers: 1, mtp_detach_head: true, mtp_clip_grad: 0.1}
trainer: {nnodes: 1, n_gpus_per_node: 8}
"""
CRITIC = "critic: {strategy: megatron, optim: {optimizer: adam}, megatron: {tensor_model_parallel_size: 2}}\n"


def test_the_actor_and_the_critic_of_verl(diagnose):
    defects = diagnose(verl_yaml=ACTOR + CRITIC)
    assert {"ML-5394", "ML-7513b"} <= defects["verl.yaml actor"] and defects["verl.yaml critic"] == set()


@pytest.mark.parametrize(
    "critic, roles",
    [
        (f"{CRITIC}algorithm: {{adv_estimator: grpo}}\n", ["actor"]),
        (f"{CRITIC.replace('{', '{enable: true, ', 1)}algorithm: {{adv_estimator: grpo}}\n", ["actor", "critic"]),
        (CRITIC.replace("{", "{enable: false, ", 1), ["actor"]),
    ],
)
def test_the_critic_of_verl_is_a_run_where_verl_trains_it(diagnose, critic, roles):
    assert list(diagnose(verl_yaml=ACTOR + critic)) == [f"verl.yaml {role}" for role in roles]


def test_which_trainers_give_muon_the_gradients_of_the_distributed_optimizer(diagnose, release):
    """By default verl does, and Bridge if it is asked to; the arguments of Megatron and of ms-swift do not."""
    verl = ACTOR.replace("megatron:\n", "megatron:\n      use_distributed_optimizer: true\n")
    settings = "optimizer: muon\nuse_distributed_optimizer: true\n"
    findings = diagnose(
        verl_yaml=verl,
        layer_wise_yaml=verl.replace("muon,", "muon, use_layer_wise_distributed_optimizer: true,"),
        one_replica_yaml=verl.replace("n_gpus_per_node: 8", "n_gpus_per_node: 2").replace("context", "tensor_model"),
        bridge_yaml="model: {}\noptimizer: {optimizer: muon}\nddp: {use_distributed_optimizer: true}\n",
        ms_swift_yaml=f"model: x\ntensor_model_parallel_size: 1\n{settings}",
        script=f"torchrun --nproc-per-node 2 train.py {SMALL} --optimizer muon --use-distributed-optimizer --bf16\n",
    )
    is_refused = release in ("0.16.1", "0.17.1")
    affected = {name for name, ids in findings.items() if "ML-4113" in ids}
    assert affected == (set() if is_refused else {"verl.yaml actor", "bridge.yaml"})
    assert ("ML-5394" in findings["script"]) is not is_refused  # otherwise Megatron has read the flags


def test_what_megatron_refuses_is_said_and_the_others_are_diagnosed(diagnose):
    findings = diagnose(bad=f"{SMALL} --num-layers x", good=f"{SMALL} --optimizer muon")
    assert "invalid int value: 'x'" in findings["bad"] and "ML-5394" in findings["good"]


def test_what_no_patch_removes_ends_with_1_from_severity_3_on(doctor_of_file, monkeypatch):
    from megatron_mtp_patches.cli import doctor_of_files
    from megatron_mtp_patches.doctor.findings import Finding

    for severity in (2, 3):
        finding = Finding("ML-1", "It fails", "crash", severity, "read", "", "0.18.2", None, False, "no patch")
        monkeypatch.setattr(doctor_of_files, "find_defects", lambda settings, finding=finding: [finding])
        done = doctor_of_file(SMALL)
        assert done.code == (severity >= 3)
        severe = int(severity >= 3)
        assert (
            f"Runs: 1; 1 with a defect that is not removed, {severe} with one of severity 3 or more, 0 with settings "
            f"that do not act or are refused, 0 that cannot be checked." in done.out
        )


@pytest.mark.parametrize(
    "text, problem",
    [
        ("a: [", "it is not YAML"),
        ("num_layers: 1", "it has neither MODEL_ARGS"),
        ("MODE: inference\nMODEL_ARGS: {}", "MODE is inference, so it trains nothing"),
        ("actor_rollout_ref: {actor: {strategy: fsdp}}", "verl trains this by fsdp, not by Megatron"),
        ("{model: {}, engine: {_target_: verl.FSDPEngineConfig}, optim: {}}", "compose it with engine=megatron"),
        (None, "it cannot be read: Is a directory"),
    ],
)
def test_a_file_that_has_no_run_is_listed_and_the_others_are_diagnosed(command, tmp_path, text, problem):
    bad, good = tmp_path / "file.yaml", tmp_path / "run"
    bad.mkdir() if text is None else bad.write_text(text)
    good.write_text(f"{SMALL} --optimizer muon")
    done = command("doctor", "--batch", str(bad), str(good))
    assert done.code == 2 and f"{bad}: " in done.out and problem in done.out
    assert f"{good}: known defects: " in done.out and "ML-5394" in done.out
    assert done.out.splitlines()[-1].startswith("Runs: 1; ")
    assert done.out.endswith(" Files without a run: 1.\n")


def test_files_and_flags_are_not_both_given(command, tmp_path):
    (tmp_path / "run").write_text(SMALL)
    done = command("doctor", "--batch", str(tmp_path / "run"), "--", "--optimizer", "muon")
    assert (done.code, done.out) == (2, "") and "give --batch or -- FLAGS, not both" in done.err


VARIABLES = "ray_kwargs: {ray_init: {runtime_env: {env_vars: {VERL_USE_EXTERNAL_MODULES: megatron_mtp_patches%s}}}}\n"


def test_the_patches_are_those_that_verl_s_workers_get(doctor_of_file):
    def ask(choice):
        text = ACTOR.replace("mtp_detach_head: true, mtp_clip_grad: 0.1", "mtp_loss_type: tv") + VARIABLES % choice
        return doctor_of_file(text, name="verl.yaml")

    removed = "removed by exempt-muon-from-clipping"
    assert removed in ask("").out and ask("").code == 0
    for choice in ("none", "repairs"):
        told = ask(f", MEGATRON_MTP_PATCHES: {choice}")
        assert removed not in told.out and told.code
        idle = "override_transformer_config.mtp_loss_type does not act without train-mtp-heads-for-acceptance, left out"
        assert idle in told.out
    wrong = ask(", MEGATRON_MTP_PATCHES: exempt-muons")
    assert wrong.code == 2 and "unknown patch 'exempt-muons'" in wrong.out


def test_experts_and_heads_of_verl_are_those_of_the_model_of_hugging_face(diagnose, doctor_of_file, tmp_path):
    text = ACTOR.replace("mtp_num_layers: 1, mtp_detach_head: true, mtp_clip_grad: 0.1", "")
    text += f"  model: {{path: {tmp_path}, mtp: {{enable: true}}}}\n" + VARIABLES % ""
    text = text.replace("trainer: {nnodes: 1, n_gpus_per_node: 8}\n", "")
    assert "ML-7513b" not in diagnose(verl_yaml=text)["verl.yaml actor"]
    note = f"there is no {tmp_path / 'config.json'} to read"
    assert note in doctor_of_file(text, name="verl.yaml").out
    (tmp_path / "config.json").write_text('{"n_routed_experts": 8, "num_nextn_predict_layers": 1}')
    assert "ML-7513b" in diagnose(verl_yaml=text)["verl.yaml actor"]
    assert note not in doctor_of_file(text, name="verl.yaml").out


def test_a_model_of_hugging_face_says_whether_it_ties_its_embeddings(tmp_path):
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": false}')
    sizes, _ = read_hugging_face_sizes(tmp_path, has_heads=False)
    assert RunSettings(sizes, None).untie_embeddings_and_output_weights is True


@pytest.mark.parametrize("text", ["model: {num_moe_experts: 8}\n", f"{ACTOR}  model: {{lora: {{rank: 0}}}}\n"])
def test_adapters_train_instead_of_what_they_adapt(tmp_path, text):
    text = text.replace("trainer: {nnodes: 1, n_gpus_per_node: 8}\n", "")
    for file, content in (("whole", text), ("adapted", text.replace("rank: 0", "rank: 8") + "peft: {dim: 8}\n")):
        (tmp_path / f"{file}.yaml").write_text(content)
        ((_, run),) = read_runs(tmp_path / f"{file}.yaml")
        assert RunSettings(run.sources, None).trains_adapters is (file == "adapted")
