"""The gradient of a repeated head is the sum over its depths, also where TransformerEngine fuses it into main_grad."""

import dataclasses

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron_mtp_patches import rehearsal

pytestmark = [
    pytest.mark.forked("patched"),
    pytest.mark.guards("sum-gradients-of-repeated-weights"),
    pytest.mark.skipif(not rehearsal.with_transformer_engine(), reason="TransformerEngine is not installed"),
    pytest.mark.skipif(
        "mtp_use_repeated_layer" not in {field.name for field in dataclasses.fields(TransformerConfig)},
        reason="0.16 has no repeated heads",
    ),
]

REPEATED = {"mtp_num_layers": 3, "mtp_use_repeated_layer": True, "bf16": True, "params_dtype": torch.bfloat16}
EXPERTS = {"num_moe_experts": 2, "moe_grouped_gemm": True, "moe_router_topk": 2, "add_bias_linear": False}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.fixture
def gradients_of_step(make_model, batch):
    """gradients_of_step(fused, set_flags=False, **settings): {name: gradient of the heads over two microbatches}.

    `set_flags` is what Megatron does before the first microbatch of each step with fp8.
    """

    def run(fused, set_flags=False, **settings):
        model = make_model(
            transformer_engine=True, gradient_accumulation_fusion=fused, **REPEATED, **settings
        ).bfloat16()
        heads = dict(model.mtp.named_parameters())
        for parameter in model.parameters():
            parameter.main_grad = torch.zeros(parameter.shape)
            parameter.grad_added_to_main_grad = False
        for microbatch in range(2):
            if set_flags:
                for module in model.modules():
                    if hasattr(module, "is_first_microbatch"):
                        module.is_first_microbatch = microbatch == 0
            model(**batch).float().mean().backward()
            for parameter in model.parameters():
                if parameter.grad is not None and not parameter.grad_added_to_main_grad:
                    parameter.main_grad += parameter.grad
                parameter.grad, parameter.grad_added_to_main_grad = None, False
        return {name: parameter.main_grad for name, parameter in heads.items()}

    return run


@pytest.mark.parametrize("recompute", [{}, RECOMPUTE], ids=["", "full recomputation"])
@pytest.mark.parametrize("experts", [{}, EXPERTS], ids=["dense", "grouped experts"])
@pytest.mark.parametrize("set_flags", [False, True], ids=["first step", "flags of fp8"])
def test_the_gradients_of_all_depths_are_added(gradients_of_step, experts, recompute, set_flags):
    right = gradients_of_step(False, **experts, **recompute)
    actual = gradients_of_step(True, set_flags, **experts, **recompute)
    assert actual.keys() == right.keys()
    for name, gradient in right.items():
        assert gradient.any(), name
        torch.testing.assert_close(actual[name], gradient, rtol=2e-2, atol=2e-2 * float(gradient.abs().max()))
