"""nvidia-modelopt quantizes a GPT with MTP heads and distils into it; tags, clipping and detaching still work."""

import copy

import pytest
import torch

pytest.importorskip("modelopt", reason="nvidia-modelopt is not installed")

import modelopt.torch.distill as mtd
import modelopt.torch.distill.plugins.megatron as mcore_distill
import modelopt.torch.quantization as mtq
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from modelopt.torch.quantization.extensions import get_cuda_ext
from modelopt.torch.quantization.nn import TensorQuantizer

pytestmark = pytest.mark.forked("patched")

# modelopt does not quantize them by default.
HEADS_AND_OUTPUT = ("mtp.*", "*output_layer*")


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch):
    """A rehearsal seems to have a GPU, for which modelopt would compile kernels for minutes."""
    monkeypatch.setattr(get_cuda_ext, "extension", None, raising=False)


@pytest.fixture
def make_quantized(make_model, batch):
    """make_quantized(heads, **config): a model in int8, calibrated on the batch, with or without its heads."""

    def make(heads, **settings):
        int8 = copy.deepcopy(mtq.INT8_DEFAULT_CFG)
        if heads:
            int8["quant_cfg"] = [e for e in int8["quant_cfg"] if e["quantizer_name"] not in HEADS_AND_OUTPUT]
        return mtq.quantize(make_model(**settings), int8, lambda model: model(**batch))

    return make


@pytest.fixture(params=[False, True], ids=["main model in int8", "heads in int8 too"])
def heads(request):
    return request.param


def ranges(model):
    """Return {name of each enabled quantizer: its calibrated range}."""
    quantizers = {name: module for name, module in model.named_modules() if isinstance(module, TensorQuantizer)}
    return {name: quantizer.amax for name, quantizer in quantizers.items() if quantizer.is_enabled}


def names_of_heads(model):
    return {name for name, parameter in model.named_parameters() if name.startswith("mtp.") and parameter.requires_grad}


def reached(gradients):
    return {name for name, gradient in gradients.items() if gradient.any()}


def test_calibration_finds_the_ranges_that_it_finds_without_the_patches(make_quantized, heads, unpatched):
    """Calibration runs without gradients, and without gradients heads whose output is not used are skipped."""
    with unpatched():
        expected = ranges(make_quantized(heads))
    actual = ranges(make_quantized(heads))
    assert set(actual) == set(expected) and any(name.startswith("mtp.") for name in actual) is heads
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_mtp_loss_of_a_quantized_model_trains_the_heads_alone(make_quantized, batch, gradients, heads, tied):
    model = make_quantized(heads, tied=tied, mtp_detach_heads=True)
    assert reached(gradients(model, model(**batch), weight=0.0)) == names_of_heads(model)
    attached = make_quantized(heads, tied=tied)
    assert "decoder.final_layernorm.weight" in reached(gradients(attached, attached(**batch), weight=0.0))


def test_a_step_clips_the_heads_of_a_quantized_model_separately(make_quantized, batch, heads):
    """The main model takes the same step, to the bit, however large their gradients are."""

    def train(weight):
        bare = make_quantized(heads, mtp_detach_heads=True, mtp_loss_scaling_factor=weight)
        begin = {name: parameter.clone() for name, parameter in bare.named_parameters()}
        model = DistributedDataParallel(bare.config, DistributedDataParallelConfig(), bare)
        settings = OptimizerConfig(optimizer="sgd", lr=1.0, weight_decay=0.0, clip_grad=0.01)
        optimizer = get_megatron_optimizer(settings, [model])
        model(**batch).mean().backward()
        updated, norm, _ = optimizer.step()
        assert updated
        return norm, optimizer.mtp_grad_norm, {name: (p - begin[name]).detach() for name, p in bare.named_parameters()}

    norm, norm_of_heads, steps = train(0.1)
    same_norm, larger_norm_of_heads, other_steps = train(100.0)
    assert norm == same_norm and larger_norm_of_heads == pytest.approx(1000 * norm_of_heads, rel=1e-4)
    main = {name for name in steps if not name.startswith("mtp.")}
    assert all(torch.equal(steps[name], other_steps[name]) for name in main)
    for moved in (steps, other_steps):
        for part in (main, set(steps) - main):
            assert torch.cat([moved[name].flatten() for name in part]).norm() == pytest.approx(0.01, rel=1e-2)


@pytest.fixture
def make_distilled(make_model, make_quantized):
    """make_distilled(heads, pairs=(), **config): a quantized student with its teacher in modelopt's wrapper."""

    def make(heads, pairs=(), **settings):
        student, teacher = make_quantized(heads, **settings), make_model(**settings)
        with torch.no_grad():
            for parameter in teacher.parameters():
                parameter.mul_(1.5)
        distillation = mcore_distill.DistillationConfig(intermediate_layer_pairs=list(pairs))
        distillation = mcore_distill.setup_distillation_config(distillation, student.config, teacher.config)
        mode = {
            "teacher_model": teacher,
            "criterion": distillation.criterion,
            "loss_balancer": distillation.loss_balancer,
        }
        model = mtd.convert(student, mode=[("kd_loss", mode)])
        mcore_distill.adjust_distillation_model_for_mcore(model, distillation)
        return model

    return make


def distil(model, batch):
    """Return the distillation loss, with the loss of the heads attached, as in Megatron's post-training."""
    output = model(**batch)

    def reduce(loss):
        return (loss[0] if isinstance(loss, tuple) else loss).mean()

    return model.compute_kd_loss(student_loss=output.mean(), loss_reduction_fn=reduce)["kd_loss"] + 0.0 * output.mean()


@pytest.mark.parametrize("pairs", [(), [("mtp.layers.0.final_layernorm",) * 2]], ids=["logits", "logits and a head"])
def test_the_distillation_loss_is_what_it_is_without_the_patches(make_distilled, batch, unpatched, heads, pairs):
    with unpatched():
        expected = distil(make_distilled(heads, pairs), batch)
    assert expected > 0 and torch.equal(distil(make_distilled(heads, pairs), batch), expected)


def test_a_distilled_main_model_gets_no_gradient_from_the_mtp_loss(make_distilled, batch, gradients):
    model = make_distilled(True, mtp_detach_heads=True)
    assert reached(gradients(model, 0.0 * distil(model, batch))) == names_of_heads(model)
    assert "decoder.final_layernorm.weight" in reached(gradients(model, distil(model, batch)))
