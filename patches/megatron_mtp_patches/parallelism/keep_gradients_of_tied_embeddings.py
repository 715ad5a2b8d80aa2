"""Declares keep-gradients-of-tied-embeddings."""

from ..declarations.shared_edits import MEGATRON_FSDP
from ..engine import Patch, Wrap

_SETUP = "megatron.core.models.common.language_module.language_module:LanguageModule.setup_embeddings_and_output_layer"
_OVERRIDES = "megatron_overrides.parallelism.tied_embeddings"

PATCH = Patch(
    id="keep-gradients-of-tied-embeddings",
    summary="Add the gradient of the look-up to that of the output layer where embeddings are tied",
    problem="With tied embeddings, Megatron's default, the word embedding is the output weight. With fused weight "
    "gradients, the default as well, the output layer writes its gradient to `main_grad` itself. Megatron-FSDP "
    "then drops what autograd has, which is the gradient of the look-up: the embedding trains as an output weight "
    "alone. DDP does so on the pipeline stage of the MTP heads (Megatron's MTP layers), which look tokens up in "
    "its copy of the embedding: the gradient of their look-up is lost. Nothing in the log shows it.",
    adds=(
        "Under Megatron-FSDP an output layer with the weight of the embedding does not fuse its gradient: autograd "
        "adds up both, in the dtype of the weight.",
        "On the stage of the MTP heads the copy is marked as Megatron marks the embedding of one stage "
        "(`zero_out_wgrad`): DDP adds the gradient of the look-up to the fused one.",
    ),
    numerics="With tied embeddings and fused weight gradients, under Megatron-FSDP or with MTP heads on the last of "
    "several pipeline stages: the gradient of the embedding, and with it the gradient norm.",
    notes=(
        "Memory: under Megatron-FSDP the gradient of the output weight exists once more for a moment, in the dtype of "
        "the weight, beside that of the look-up.",
        "On the stage of the MTP heads each microbatch sets one placeholder of the size of the embedding to zero and "
        "adds the gradient of the look-up.",
    ),
    is_repair=True,
    edits=(
        Wrap(_SETUP, f"{_OVERRIDES}:add_look_ups_of_mtp_stage"),
        *(Wrap(f"{wrapper}.__init__", f"{_OVERRIDES}:fuse_no_gradients_of_tied_outputs") for wrapper in MEGATRON_FSDP),
    ),
)
