"""Declares pass-padding-mask-to-routers."""

from ..engine import Patch, Probe, PullRequest, Wrap

_OVERRIDES = "megatron_overrides.moe.padding_masks"
_COUNT_TOKENS = "megatron.core.transformer.moe.router:TopKRouter._apply_expert_bias"

PATCH = Patch(
    id="pass-padding-mask-to-routers",
    summary="Give each router the padding mask of its tokens",
    upstream=(PullRequest(6114, native_since="main"),),
    problem="Where a trainer gives the model a padding mask, as verl does under dynamic context parallelism, the first "
    "step ends in an error about shapes with `--moe-router-enable-expert-bias`, and with MoE losses and "
    "`--sequence-parallel` on later pipeline stages and in hybrid models. With "
    "`--overlap-moe-expert-parallel-comm` routers get no mask at all, so padding counts in the auxiliary losses, "
    "in the z-loss and in the load of experts. Megatron's own trainer passes no mask.",
    adds=(
        "Routers get the mask of the tokens that their rank has: those of the main model, and from 0.18 on those of "
        "MTP heads.",
    ),
    repairs=(
        "Pipeline stages after the first, a stage that is given `decoder_input`, and each stage of a hybrid model did "
        "not split the mask for sequence parallelism.",
        "`--overlap-moe-expert-parallel-comm` called routers without the mask.",
    ),
    numerics="With `--overlap-moe-expert-parallel-comm` and a padding mask: the gradients of MoE losses, what is "
    "logged of them, and the expert bias are those without the overlap.",
    notes=(
        "Layers that CUDA graphs replay keep what they captured. Quantile balancing (0.19 and later) refuses a mask; "
        "with the overlap its routers get none.",
        "A microbatch of padding alone gives NaN in the gradients of the auxiliary losses also with the overlap, as it "
        "does without it.",
    ),
    is_repair=True,
    probe=Probe(_COUNT_TOKENS, contains="(~padding_mask).unsqueeze(-1)"),
    edits=(
        Wrap(
            "megatron.core.models.gpt.fine_grained_callables:build_transformer_layer_callables",
            f"{_OVERRIDES}:schedule_with_mask",
        ),
        Wrap("megatron.core.transformer.moe.moe_layer:MoELayer.route", f"{_OVERRIDES}:route_with_mask"),
        Wrap(_COUNT_TOKENS, f"{_OVERRIDES}:count_tokens_without_padding"),
    ),
)
