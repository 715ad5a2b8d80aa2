"""Declares drop-unused-output-weight."""

from __future__ import annotations

from ..defects.conditions import has_heads_on_last_stage
from ..engine import Defect, Patch, Wrap

TYPE_CHECKING = False  # as in engine/engine.py: typing itself is not imported
if TYPE_CHECKING:
    from typing import Any

_RELEASES = ("0.16.1", "0.17.1", "0.18.2", "0.19.2", "main")


def _has_unused_weight(run: Any) -> bool:
    """Whether the last pipeline stage has MTP heads and takes the word embedding for the output layer."""
    return bool(
        has_heads_on_last_stage(run)
        and (run.pipeline_model_parallel_size or 1) > 1
        and not run.untie_embeddings_and_output_weights
    )


PATCH = Patch(
    id="drop-unused-output-weight",
    summary="Save MTP models with tied embeddings over several pipeline stages",
    problem=(
        "With tied embeddings the stage of the MTP heads (Megatron's MTP layers) computes logits with its copy of the "
        "word embedding. Its output layer has a weight nevertheless, which nothing uses. Saving a checkpoint in the "
        "format torch_dist fails, because an assertion expects no such weight. With `--overlap-grad-reduce` and no "
        "distributed optimizer an assertion of DDP fails in the second step, because the weight gets no gradient. "
        "Otherwise it takes memory for its gradient and its optimizer state."
    ),
    adds=("On that stage `output_layer.weight` is None, as it is on a first stage that is the last one as well.",),
    defects=(
        Defect(
            "Saving a checkpoint fails with an AssertionError, because the stage of the heads has an output weight "
            "that nothing uses",
            releases=_RELEASES,
            affects=lambda run: (
                _has_unused_weight(run) and run.save and (run.ckpt_format or "torch_dist") == "torch_dist"
            ),
        ),
        Defect(
            "An assertion of DDP fails in the second step, because an output weight that nothing uses has no gradient",
            releases=_RELEASES,
            affects=lambda run: (
                _has_unused_weight(run) and run.overlap_grad_reduce and not run.use_distributed_optimizer
            ),
        ),
    ),
    numerics="None: the weight takes part in no computation.",
    notes=(
        "Checkpoints in the format torch that were saved without the patch hold the weight. Megatron says that it is "
        "unexpected and loads the rest; their optimizer state does not fit.",
    ),
    edits=(
        Wrap(
            "megatron.core.models.common.language_module.language_module:LanguageModule.setup_embeddings_and_output_layer",
            "megatron_overrides.mtp.heads.wrappers:drop_unused_output_weight",
        ),
    ),
)
