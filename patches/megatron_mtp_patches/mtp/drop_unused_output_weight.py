"""Declares drop-unused-output-weight."""

from ..engine import Patch, PullRequest, Wrap

PATCH = Patch(
    id="drop-unused-output-weight",
    summary="Save MTP models with tied embeddings over several pipeline stages",
    upstream=(PullRequest(7577),),
    problem="With tied embeddings the stage of the MTP heads (Megatron's MTP layers) computes logits with its copy of "
    "the word embedding. Its output layer has a weight nevertheless, which nothing uses. Saving a checkpoint in the "
    "format torch_dist fails, because an assertion expects no such weight. With `--overlap-grad-reduce` an "
    "assertion of DDP fails in the second step, because the weight gets no gradient. Otherwise it "
    "takes memory for its gradient and its optimizer state.",
    adds=("On that stage `output_layer.weight` is None, as it is on a first stage that is the last one as well.",),
    numerics="None: the weight takes part in no computation.",
    notes=(
        "Checkpoints in the format torch that were saved without the patch hold the weight. Megatron says that it is "
        "unexpected and loads the rest; their optimizer state does not fit.",
    ),
    is_repair=True,
    edits=(
        Wrap(
            "megatron.core.models.common.language_module.language_module:LanguageModule.setup_embeddings_and_output_layer",
            "megatron_overrides.mtp.heads.stage_weights:drop_unused_output_weight",
        ),
    ),
)
