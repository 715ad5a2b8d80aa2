"""The fields of a framework's configurations: read as flags, left out, and set again."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

pytestmark = [pytest.mark.forked("patched")]
pytest.importorskip("megatron.training.arguments", reason="the 0.16.1 wheel has no megatron.training")


@dataclass
class Model:
    """A model provider, as far as it is read."""

    num_layers: int = 24
    num_moe_experts: int | None = 64
    tensor_model_parallel_size: int = 1
    sequence_parallel: bool = False
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    cp_comm_type: str | None = None
    share_embeddings_and_output_weights: bool = True
    apply_rope_fusion: bool = True
    overlap_moe_expert_parallel_comm: bool = False
    hidden_dropout: float = 0.0
    fp8: str | None = None
    moe_layer_freq: object = 1
    recompute_modules: list = field(default_factory=list)


@dataclass
class HalfModel(Model):
    """One whose framework has another default."""

    fp8: str | None = "hybrid"


LAYOUT = {
    "tensor_model_parallel_size": 8,
    "sequence_parallel": True,
    "expert_model_parallel_size": 16,
    "expert_tensor_parallel_size": 1,
    "pipeline_model_parallel_size": 4,
    "virtual_pipeline_model_parallel_size": 3,
    "context_parallel_size": 2,
    "cp_comm_type": "a2a",
    "share_embeddings_and_output_weights": False,
}


def cuts_of(flags, settings):
    from megatron_mtp_patches.parity.cuts import list_cuts
    from megatron_mtp_patches.parity.small import SmallRun

    return list(list_cuts(SmallRun(flags, {}, [], settings, "fp32"), 2))


def test_the_fields_of_a_layout_have_the_cuts_of_its_flags():
    from megatron_mtp_patches.parity.frameworks.fields import read_flags, read_settings
    from megatron_mtp_patches.parity.small import shrink

    others = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "recompute_num_layers": 1}
    sections = [Model(**LAYOUT), SimpleNamespace(**others)]
    settings = read_settings(sections)
    flags = (
        "--num-layers 24 --num-experts 64 --tensor-model-parallel-size 8 --sequence-parallel --context-parallel-size 2 "
        "--cp-comm-type a2a --expert-model-parallel-size 16 --expert-tensor-parallel-size 1 --overlap-grad-reduce "
        "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 3 --use-distributed-optimizer "
        "--untie-embeddings-and-output-weights --recompute-num-layers 1"
    )
    small = shrink(flags.split(), "fp32")
    expected, cuts = cuts_of(small.flags, small.settings), cuts_of(read_flags(sections, "fp32"), settings)
    assert [cut.name for cut in cuts] == [cut.name for cut in expected] and len(cuts) == 6
    changed = {flag.name for flag in small.changed}
    for cut, other in zip(cuts, expected, strict=True):
        assert set(cut.flags) == {flag for flag in other.flags if flag.name not in changed}


def test_every_flag_of_a_cut_has_a_field():
    from megatron_mtp_patches.parity.cuts import LAYOUT, OF_AXIS, SHARDING
    from megatron_mtp_patches.parity.frameworks.fields import FIELDS

    without = {"--ckpt-format", "--no-overlap-p2p-communication", "--no-align-param-gather"}
    assert (LAYOUT | SHARDING | OF_AXIS.keys()) - FIELDS.keys() == without


def test_flags_are_set_where_there_is_such_a_field():
    from megatron_mtp_patches.parity.flags import split
    from megatron_mtp_patches.parity.frameworks.fields import set_absent, set_flags

    model, ddp = Model(**LAYOUT), SimpleNamespace(use_distributed_optimizer=True)
    set_absent([model, ddp])
    assert model == Model() and ddp.use_distributed_optimizer is False
    words = "--tensor-model-parallel-size 2 --sequence-parallel --no-rope-fusion --num-experts 8 --ckpt-format torch"
    set_flags([model, ddp], split([*words.split(), "--moe-layer-freq", "([0]*1+[1]*3)", "--use-distributed-optimizer"]))
    expected = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "num_moe_experts": 8}
    assert model == Model(**expected, apply_rope_fusion=False, moe_layer_freq=[0, 1, 1, 1])
    assert vars(ddp) == {"use_distributed_optimizer": True}


def test_an_enum_is_set_by_its_name():
    from megatron.core.transformer.enums import AttnBackend
    from megatron_mtp_patches.parity.flags import Flag
    from megatron_mtp_patches.parity.frameworks.fields import set_flags

    model = SimpleNamespace(attention_backend=AttnBackend.flash)
    set_flags([model], [Flag("--attention-backend", ("fused",))])
    assert model.attention_backend is AttnBackend.fused


def test_what_is_left_out_has_its_default_and_a_reason():
    from megatron_mtp_patches.parity.frameworks.fields import leave_out, read_flags

    model = Model(hidden_dropout=0.1, fp8="hybrid", overlap_moe_expert_parallel_comm=True)
    assert "--overlap-moe-expert-parallel-comm" not in {flag.name for flag in read_flags([model], "fp32")}
    left_out = {flag.name: reason for reason, flag in leave_out("model", model, "fp32")}
    assert left_out == {
        "model.hidden_dropout": "it is random",
        "model.fp8": "it needs a GPU",
        "model.overlap_moe_expert_parallel_comm": "the small run computes in fp32",
    }
    assert model == Model()
    (left_out,) = leave_out("model", half := HalfModel(), "fp32")
    assert half.fp8 is None and left_out[1].name == "model.fp8"


def test_a_setting_whose_patch_is_left_out_is_refused_unless_it_is_off():
    from megatron_mtp_patches.engine import UsageError
    from megatron_mtp_patches.parity.frameworks.fields import refuse_unknown

    refuse_unknown("model", {"_target_": "Model", "num_layers": 2, "mtp_detach_heads": False, "gone": None}, Model())
    with pytest.raises(UsageError, match=r"model\.mtp_detach_heads comes with the patch detach-mtp-heads, which"):
        refuse_unknown("model", {"mtp_detach_heads": True}, Model())
    with pytest.raises(UsageError, match=r"model\.no_such_field: the Model that is installed has no such field"):
        refuse_unknown("model", {"no_such_field": 1}, Model())
