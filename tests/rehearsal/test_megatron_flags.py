"""A rehearsal changes the defaults of some flags, and refuses command lines that need a GPU."""

import argparse
import enum

import pytest
from megatron_mtp_patches.engine.call import Call
from megatron_mtp_patches.megatrons import installed as installed_megatron
from megatron_mtp_patches.rehearsal import megatron_flags, transformer_engine
from megatron_mtp_patches.rehearsal.megatron_flags import (
    RehearsalRefusal,
    refuse,
    refuse_gpu_flags,
    set_cpu_defaults,
)

Backend = enum.Enum("Backend", "flash unfused auto")


@pytest.fixture(autouse=True, params=[False], ids=["without TransformerEngine"])
def with_transformer_engine(request, monkeypatch):
    """Whether a rehearsal has TransformerEngine's Python; parametrize it indirectly."""
    monkeypatch.setattr(megatron_flags, "with_transformer_engine", lambda: request.param)
    if not request.param:
        monkeypatch.setattr(transformer_engine, "has_python", lambda: False)
    return request.param


with_its_python = pytest.mark.parametrize("with_transformer_engine", [True], ids=["TransformerEngine"], indirect=True)


def add_megatron_arguments(parser):
    parser.add_argument("--attention-backend", type=Backend.__getitem__, default=Backend.auto)
    parser.add_argument("--no-rope-fusion", action="store_false", dest="apply_rope_fusion")
    parser.add_argument("--hidden-size", type=int, default=64)
    return parser


def parse(*words):
    parser = argparse.ArgumentParser()
    assert set_cpu_defaults(Call(add_megatron_arguments, None, (parser,), {})) is parser
    return parser.parse_args(words)


def test_defaults_change_for_the_flags_that_exist():
    assert vars(parse()) == {"attention_backend": Backend.unfused, "apply_rope_fusion": False, "hidden_size": 64}


@with_its_python
def test_with_transformer_engine_megatrons_defaults_stay():
    assert vars(parse()) == {"attention_backend": Backend.auto, "apply_rope_fusion": True, "hidden_size": 64}


def test_explicit_flags_take_precedence():
    assert parse("--attention-backend", "auto").attention_backend is Backend.auto


@pytest.mark.parametrize("by_name", [False, True], ids=["positional", "by name"])
def test_rank_0_prints_the_changed_defaults_in_one_line(monkeypatch, capsys, by_name):
    def validate_args(args, defaults):
        return args.hidden_size, defaults

    def validate():
        arguments = ((), {"args": parse(), "defaults": {"seed": 1}}) if by_name else ((parse(), {"seed": 1}), {})
        return refuse_gpu_flags(Call(validate_args, None, *arguments))

    monkeypatch.setenv("RANK", "0")
    assert validate() == (64, {"seed": 1})
    assert capsys.readouterr().out == (
        "rehearsal on the CPU over gloo: attention_backend=unfused, apply_rope_fusion=False\n"
    )
    monkeypatch.setenv("RANK", "1")
    assert validate() == (64, {"seed": 1})
    assert capsys.readouterr().out == ""


def test_a_refusal_comes_before_megatrons_own_checks():
    def validate_args(args):
        raise AssertionError("Megatron's own check")

    with pytest.raises(RehearsalRefusal, match="--attention-backend flash"):
        refuse_gpu_flags(Call(validate_args, None, (parse("--attention-backend", "flash"),), {}))


HARMLESS = {
    "transformer_impl": "local",
    "attention_backend": Backend.unfused,
    "fp8": None,
    "fp4": None,
    "cuda_graph_impl": "none",
    "enable_cuda_graph": False,
    "moe_token_dispatcher_type": "alltoall",
    "refit_method": "gloo",
    "nccl_ub": False,
    "high_priority_stream_groups": [],
    "sequence_parallel": True,
    "tensor_model_parallel_size": 1,
}


def test_a_plain_command_line_is_not_refused():
    refuse(argparse.Namespace(**HARMLESS))
    refuse(argparse.Namespace())


@pytest.mark.parametrize(
    "dest, value, named",
    [
        ("transformer_impl", "transformer_engine", "--transformer-impl transformer_engine: use `local`, or install"),
        ("use_precision_aware_optimizer", True, "--use-precision-aware-optimizer: leave it out, or install"),
        ("attention_backend", Backend.flash, "--attention-backend flash: "),
        ("fp8", "hybrid", "--fp8-format hybrid: "),
        ("fp4", "e2m1", "--fp4-format e2m1: "),
        ("cuda_graph_impl", "local", "--cuda-graph-impl local: CUDA graphs"),
        ("enable_cuda_graph", True, "--enable-cuda-graph: CUDA graphs"),
        ("nccl_ub", True, "--use-nccl-ub: there is no NCCL"),
        ("high_priority_stream_groups", ["dp_cp"], "--high-priority-stream-groups"),
        ("moe_token_dispatcher_type", "flex", "--moe-token-dispatcher-type flex: "),
        ("refit_method", "nvshmem", "--refit-method nvshmem: "),
        ("tensor_model_parallel_size", 2, "--sequence-parallel: "),
    ],
)
def test_the_error_names_the_flag_that_needs_a_gpu(dest, value, named, monkeypatch):
    monkeypatch.setattr(megatron_flags.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RehearsalRefusal) as refusal:
        refuse(argparse.Namespace(**{**HARMLESS, dest: value}))
    assert str(refusal.value).count("\n") == 1
    assert named in str(refusal.value)


@pytest.mark.parametrize("version, pin", [("2.16.1", "==2.16.1"), (None, "")])
def test_the_advice_names_the_transformer_engine_that_the_release_was_made_for(monkeypatch, version, pin):
    monkeypatch.setattr(installed_megatron, "find_transformer_engine", lambda releases: (version, False))
    with pytest.raises(RehearsalRefusal) as refusal:
        refuse(argparse.Namespace(transformer_impl="transformer_engine"))
    assert str(refusal.value).endswith(
        f"use `local`, or install its Python in an environment for rehearsals alone: `pip install --no-deps "
        f"transformer-engine{pin}`, and `pip install '.[te]'` in a clone of megatron_mtp_patches."
    )


@with_its_python
def test_with_transformer_engine_its_layers_and_optimizer_are_accepted():
    fields = {"transformer_impl": "transformer_engine", "tensor_model_parallel_size": 2}
    refuse(argparse.Namespace(**{**HARMLESS, **fields, "use_precision_aware_optimizer": True}))


@with_its_python
@pytest.mark.parametrize(
    "fields, named",
    [
        (
            {"transformer_impl": "inference_optimized"},
            "--transformer-impl inference_optimized: use `transformer_engine`",
        ),
        ({"attention_backend": Backend.flash}, "--attention-backend flash: use `auto`, `fused` or `unfused`"),
        ({"tensor_model_parallel_size": 2}, "leave it out, or use `--transformer-impl transformer_engine"),
    ],
)
def test_with_transformer_engine_flags_that_need_a_gpu_are_still_refused(fields, named, monkeypatch):
    monkeypatch.setattr(megatron_flags.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RehearsalRefusal) as refusal:
        refuse(argparse.Namespace(**{**HARMLESS, **fields}))
    assert str(refusal.value).count("\n") == 1
    assert named in str(refusal.value)


def test_sequence_parallel_is_accepted_with_apex(monkeypatch):
    monkeypatch.setattr(megatron_flags.importlib.util, "find_spec", lambda name: object())
    refuse(argparse.Namespace(**{**HARMLESS, "tensor_model_parallel_size": 2}))


def test_one_error_names_all_reasons():
    with pytest.raises(RehearsalRefusal, match="(?s)--fp8-format.*--use-sharp"):
        refuse(argparse.Namespace(**{**HARMLESS, "fp8": "e4m3", "use_sharp": True}))
