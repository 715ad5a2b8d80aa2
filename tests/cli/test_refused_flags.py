"""`doctor -- FLAGS` ends with 2 where the flags are refused, and says what to change."""

import json
import sys
from types import ModuleType

import megatron_mtp_patches
import pytest
from megatron_mtp_patches.doctor import flags
from megatron_mtp_patches.parity import trainer

from .training_flags import EXPERTS, SMALL

pytestmark = pytest.mark.forked("patched")


@pytest.mark.parametrize("words", [(), ("--json",)], ids=["text", "json"])
def test_flags_whose_patch_is_left_out_are_wrong_usage(doctor, monkeypatch, words):
    monkeypatch.setenv("MEGATRON_MTP_PATCHES", "-skip-update-on-large-grad-norm,-floor-clip-coefficient")
    megatron_mtp_patches.revert()
    done = doctor(f"{SMALL} --grad-norm-skip-threshold=50 --min-clip-coefficient 0.1 --reward-model here", *words)
    assert (done.code, done.out) == (2, "")
    for flag, patch in (
        ("--grad-norm-skip-threshold", "skip-update-on-large-grad-norm"),
        ("--min-clip-coefficient", "floor-clip-coefficient"),
    ):
        assert f"{flag} comes with the patch {patch}, which is left out by MEGATRON_MTP_PATCHES\n" in done.err
    assert "--reward-model" not in done.err


def test_a_flag_that_the_profile_leaves_out_is_refused_with_the_words_that_add_it(doctor, monkeypatch):
    monkeypatch.setenv("MEGATRON_MTP_PATCHES", "repairs")
    megatron_mtp_patches.revert()
    done = doctor(f"{SMALL} --min-clip-coefficient 0.1")
    assert done.code == 2
    assert done.err.endswith(
        "--min-clip-coefficient comes with the patch floor-clip-coefficient, which is left out by "
        "MEGATRON_MTP_PATCHES=repairs; write repairs,floor-clip-coefficient to add it to the repairs\n"
    )


def test_a_main_model_frozen_for_heads_that_are_not_there_is_refused_as_the_run_refuses_it(doctor):
    done = doctor(f"{SMALL} --freeze-base-model-for-mtp --load base")
    assert (done.code, done.out) == (2, "")
    assert "trains only the MTP heads, and the model has none: add --mtp-num-layers" in done.err


@pytest.fixture
def trainer_to_be_imported(monkeypatch):
    """As where nothing has imported megatron.training.arguments yet."""
    import megatron.training.arguments

    monkeypatch.delattr(megatron.training, "arguments")
    monkeypatch.delitem(sys.modules, "megatron.training.arguments")


def test_a_trainer_that_lacks_a_package_is_no_matter_of_flags(doctor, trainer_to_be_imported, monkeypatch):
    monkeypatch.setattr(flags, "PACKAGES", {"megatron.core.rerun_state_machine": "its-package"})
    monkeypatch.setitem(sys.modules, "megatron.core.rerun_state_machine", None)  # so importing it again fails
    done = doctor("--num-layers 2")
    assert done.code == 2
    assert "does not import: megatron.training.arguments raises ModuleNotFoundError: import of megatron" in done.err
    assert " (pip install its-package; `megatron-mtp-patches doctor` names the packages" in done.err


def test_the_library_that_keeps_a_trainer_from_importing_is_named(doctor, trainer_to_be_imported, monkeypatch):
    broken = ModuleType("broken_library")
    exec("def __getattr__(name): raise OSError('libbroken.so: no such file')", vars(broken))
    monkeypatch.setitem(sys.modules, "megatron.core.rerun_state_machine", broken)
    done = doctor("--num-layers 2")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "does not import: broken_library raises OSError: libbroken.so: no such file (install the pack" in done.err


@pytest.mark.parametrize(
    "words, part",
    [
        (("--world-size", "0"), "--world-size 0: give a number of ranks"),
        (("--world-size", "6"), "6 ranks: the layers of these flags are split over 4 ranks"),
    ],
)
def test_a_number_of_ranks_that_cannot_be_is_wrong_usage(doctor, words, part):
    done = doctor(EXPERTS, *words)
    assert done.code == 2 and part in done.err


def test_the_smallest_world_size_has_room_for_weight_shards(doctor, release):
    if release not in ("0.19.2", "main"):
        pytest.skip("it has no weight shards (GTP)")
    shards = "--tensor-parallel-num-weight-shards 4"
    assert json.loads(doctor(f"{SMALL} {shards}", "--json").out)["world_size"] == 4
    more = f"{EXPERTS} {shards} --expert-tensor-parallel-num-weight-shards 2"
    assert json.loads(doctor(more, "--json").out)["world_size"] == 8


@pytest.mark.parametrize("flag", ["--num-layer 8", "--num-layer=8"])
def test_a_mistyped_flag_is_named_where_validate_args_refuses(doctor, flag):
    done = doctor(f"{SMALL} {flag} --reward-model here".replace("--num-layers 4", ""))
    first, *others = done.err.splitlines()
    assert done.code == 2 and "Megatron refuses these flags: " in first
    assert others == [
        "unknown to Megatron, ignored: --num-layer --reward-model",
        "--num-layer: did you mean --num-layers? Megatron's parser refuses it, unless your script adds it",
    ]


@pytest.mark.parametrize(
    "flags, part",
    [
        ("--num-layers four", "Megatron's parser: argument --num-layers: invalid int value: 'four'"),
        ("--num-layers 2", "Megatron refuses these flags: add --micro-batch-size"),
        (
            f"{SMALL} --tensor-model-parallel-size 0",
            "Megatron refuses these flags: ZeroDivisionError: integer modulo by zero, at `",
        ),
        (f"{SMALL} --cuda-graph-scope [attn", "Megatron refuses these flags: KeyError: '[attn', at `"),
        (f"{SMALL} --help", "listed by your training script with --help"),
    ],
)
def test_flags_that_megatron_refuses_are_wrong_usage(doctor, flags, part):
    done = doctor(flags)
    assert done.code == 2 and part in done.err


def test_a_refusal_of_a_patch_is_not_called_megatron_s(doctor):
    flags = f"{SMALL} --qk-clip --transformer-impl transformer_engine --cuda-graph-impl transformer_engine"
    assert "A patch refuses these flags: --qk-clip reads the largest logits" in doctor(flags).err
    done = doctor(f"{flags} --cuda-graph-scope mlp".replace("--num-layers 4", ""))
    assert "Megatron refuses these flags: " in done.err and "--qk-clip" not in done.err


def test_without_the_trainer_flags_cannot_be_read(command, monkeypatch):
    monkeypatch.setattr(trainer, "find_file", lambda module: module if module == "megatron.core" else None)
    done = command("doctor", "--", "--num-layers", "4")
    assert done.code == 2 and "put a Megatron-LM checkout of this release on PYTHONPATH" in done.err
