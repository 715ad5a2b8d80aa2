"""Declares quantize-weights-of-each-step."""

from ..engine import Patch, Probe, PullRequest, Wrap

_METHOD = "megatron.core.transformer.module:MegatronModule.set_is_first_microbatch"

PATCH = Patch(
    id="quantize-weights-of-each-step",
    summary="Quantize weights again in each step where only --te-precision-config-file quantizes layers",
    upstream=(PullRequest(5642, native_since="0.19.0"),),
    problem="With `--te-precision-config-file` and without `--fp8-format` and `--fp4-format`, nothing tells layers of "
    "0.16 to 0.18 that a step begins. They quantize their weights in the first microbatch of the run and compute "
    "with these until it ends, while the weights that are trained go on. The layers learn nothing in effect.",
    adds=("Layers quantize their weights in the first microbatch of each step.",),
    numerics="Only with `--te-precision-config-file` alone: all, from the second step on.",
    notes=("Each step quantizes the weights of these layers once, as with `--fp8-format`.",),
    is_repair=True,
    probe=Probe(_METHOD, contains="getattr(self.config, 'quant_recipe', None)"),
    edits=(Wrap(_METHOD, "megatron_overrides.quantization.first_microbatch:begin_step_of_quantized_layers"),),
)
