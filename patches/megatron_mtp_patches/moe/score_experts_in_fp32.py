"""Declares score-experts-in-fp32."""

from ..engine import Patch, Probe, PullRequest, Wrap

_UTILS = "megatron.core.transformer.moe.moe_utils"
_SCORES = "megatron_overrides.moe.routing_scores"

PATCH = Patch(
    id="score-experts-in-fp32",
    summary="Choose experts by scores in fp32",
    upstream=(PullRequest(3673, native_since="0.18.0"), PullRequest(2765, native_since="0.17.0")),
    problem="With bf16 or fp16 and no `--moe-router-dtype`, routers of 0.16 and 0.17 round the sigmoid of the logits, "
    "or their softmax with `--moe-router-pre-softmax`, to 16 bits before they choose. Among experts with almost the "
    "same score the expert bias then decides, or their order without one, and not the score. On 0.16.1 the auxiliary "
    "losses take the sigmoid in 16 bits as well.",
    adds=("Scores are computed, compared and normalized in fp32. Probabilities have the dtype that they had.",),
    numerics="With a sigmoid or `--moe-router-pre-softmax`, and logits of 16 bits: which experts tokens choose, and "
    "the last bit of their probabilities. A checkpoint's expert bias was trained with rounded scores and adapts.",
    is_repair=True,
    probe=Probe(f"{_UTILS}:topk_routing_with_score_function", contains="score_function in ('sigmoid', 'sqrtsoftplus')"),
    edits=(
        Wrap(f"{_UTILS}:topk_routing_with_score_function", f"{_SCORES}:choose_by_scores_in_fp32"),
        Wrap(f"{_UTILS}:compute_routing_scores_for_aux_loss", f"{_SCORES}:score_in_fp32"),
    ),
)
