"""Declares recompute-quantized-mtp-heads."""

from ..declarations.shared_edits import MTP
from ..engine import Patch, PullRequest, Wrap

PATCH = Patch(
    id="recompute-quantized-mtp-heads",
    summary="Train MTP heads with full recomputation in fp8 and with packed sequences",
    upstream=(
        PullRequest(
            6760,
            part="Of #6760 the patch brings the tensor-parallel group of heads that are recomputed. It does not bring "
            "the arguments `mtp_on_this_rank(pp_group=)` and `process_mtp_loss(dp_cp_group=)`: a model that is "
            "built with other groups still asks Megatron's global ones which stage has the heads, and over which "
            "ranks their logged metrics are averaged.",
        ),
        PullRequest(4593, native_since="0.18.0"),
    ),
    problem="With full activation recomputation in fp8, 0.16 and 0.17 do not train the MTP heads (Megatron's MTP "
    "layers): they pass their tensors to TransformerEngine's checkpoint by keyword, which gets no gradient that way. "
    "The loss of the heads is logged all the same. With packed sequences they raise a TypeError. In every release "
    "the checkpoint of a head in fp8 or fp4 gets Megatron's global tensor-parallel group, also if the model was "
    "built with other groups: it fails if there is no global group, and with `distribute_saved_activations` it puts "
    "the saved hidden states together from the wrong ranks.",
    adds=(
        "In fp8 and fp4 heads are recomputed over the tensor-parallel group of their layer, and all tensors get their "
        "gradient.",
        "Packed sequences can be recomputed (0.16, 0.17).",
    ),
    numerics="With fp8 and full recomputation on 0.16 and 0.17, the heads get a gradient, and the main model gets one "
    "through them. With other groups than Megatron's global ones and `distribute_saved_activations`, the "
    "gradients of the heads and of what is before them change. Nothing else changes.",
    is_repair=True,
    edits=(
        Wrap(
            f"{MTP}:MultiTokenPredictionLayer._checkpointed_forward",
            "megatron_overrides.mtp.heads.recomputed_layers:checkpoint_layer",
        ),
    ),
)
