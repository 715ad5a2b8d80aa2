"""Declares train-mtp-heads-for-acceptance."""

from ..declarations.settings import TRANSFORMER_CONFIG, Setting, model_setting
from ..declarations.shared_edits import MTP_LOSS
from ..engine import Patch, Probe, PullRequest, Wrap

LOSS_TYPE = Setting(
    "mtp_loss_type",
    str,
    "cross_entropy",
    "The loss that trains the MTP heads: cross_entropy, kl, tv, lk or e2e_tv.",
    choices=("cross_entropy", "kl", "tv", "lk", "e2e_tv"),
    check="megatron_overrides.mtp.losses.checks:check_losses",
    example="cross_entropy",
    named_in=6473,
    in_ms_swift=True,
)
POSITION_WEIGHTS = Setting(
    "mtp_position_weights",
    str,
    "equal",
    "Weights of the positions of each MTP head in cross entropy: equal or dpace.",
    choices=("equal", "dpace"),
    check="megatron_overrides.mtp.losses.checks:check_position_weights",
    example="equal",
    in_ms_swift=True,
)
DPACE_ALPHA = Setting(
    "mtp_dpace_alpha",
    float,
    0.5,
    "Smoothing of the probabilities of which dpace makes weights, above 0, up to 1.",
    example=0.5,
    in_ms_swift=True,
)

PATCH = Patch(
    id="train-mtp-heads-for-acceptance",
    summary="Train the MTP heads to be accepted: total variation, KL, LK and end-to-end losses, D-PACE weights",
    upstream=(PullRequest(6473), PullRequest(6875, twin_of=6473)),
    problem="Speculative decoding accepts a draft token with the probability sum over v of min(p, q), where p is the "
    "main model's distribution and q that of the MTP head (one of Megatron's MTP layers). Megatron trains the heads "
    "by cross entropy with the data, which is not that.",
    adds=(
        "`--mtp-loss-type` (`config.mtp_loss_type`): `cross_entropy` (default), `tv` (one minus the acceptance), `kl` "
        "(KL divergence of the head from the main model), `lk` (the negative logarithm of the acceptance) or `e2e_tv` "
        "(one minus the mean over the heads of the product of the acceptances up to that head, which is the accepted "
        "length). The main model's distribution is always detached, whether or not the heads are.",
        "`--mtp-depth-weights W1,W2,...` (`config.mtp_depth_weights`): the weight of each head's loss, divided by the "
        "mean of all weights. For `e2e_tv` they weigh the products.",
        "`--mtp-position-weights dpace` (`config.mtp_position_weights`) weighs the cross entropy of each position and "
        "head by what the head adds to the expected length of the accepted draft that starts there, as estimated from "
        "the probabilities that the heads themselves give their labels (D-PACE, arXiv 2605.18810). "
        "`--mtp-dpace-alpha` (0.5) smooths these probabilities.",
        "No more than `--mtp-logits-chunk-size` rows of logits exist at a time (1024 without that flag), and the main "
        "model's logits are computed once for all heads.",
        "The FLOPs that Megatron reports count the main model's logits once more.",
    ),
    repairs=(
        "The pull requests need detached heads. Here they may be attached.",
        "The pull requests keep the logits of the main model and of every head. Here they are chunked.",
    ),
    undetected="A release without these losses computes no wrong number; it cannot train by them.",
    refuses=(
        "`--mtp-loss-type` other than `cross_entropy` without MTP heads, or with `--defer-embedding-wgrad-compute`.",
        "`--mtp-depth-weights` that are not one weight for each head.",
        "`--mtp-position-weights dpace` without MTP heads or with another loss than cross entropy, and "
        "`--mtp-dpace-alpha` that is not above 0 and up to 1 or that has no effect.",
    ),
    numerics="Only with the flags. Cross entropy without weights is computed as before, to the bit. The other losses "
    "are computed in float32 and agree with float64 autograd on full logits to 1e-6 (value) and 1e-5 (gradient); "
    "another chunk size changes them by rounding only. With bfloat16 hidden states and weights the loss is within "
    "0.5 % and the gradient within 3 % of float64, as long as the logits of a head differ from those of the main "
    "model by much more than the rounding of a logit to bfloat16, 1/256 of it. Nearer to the main model the "
    "rounding decides, with detached and with attached heads (see Limits).",
    notes=(
        "Columns of the output layer that only pad the vocabulary are left out of both distributions. Their number is "
        "known from the tokenizer of megatron.training or from `config.vocab_size` (Megatron-Bridge); elsewhere all "
        "columns count.",
        "A loss mask with weights weighs cross_entropy, kl, tv and lk. In e2e_tv, in D-PACE's weights and in the "
        "accepted lengths a position counts or does not. Where none counts (in e2e_tv: sequences no longer than the "
        "number of heads), nothing is trained, the loss is logged as 0 and the accepted length as 1.",
    ),
    probe=Probe(f"{TRANSFORMER_CONFIG}.mtp_loss_type"),
    edits=(
        *model_setting(LOSS_TYPE),
        *model_setting(
            Setting(
                "mtp_depth_weights",
                str | None,
                None,
                "Weights of the losses of the MTP heads, W1,W2,..., divided by their mean.",
                in_ms_swift=True,
            )
        ),
        *model_setting(POSITION_WEIGHTS),
        *model_setting(DPACE_ALPHA),
        *MTP_LOSS,
        Wrap(
            "megatron.training.training:num_floating_point_operations",
            "megatron_overrides.mtp.losses.flops:count_main_model_logits",
            check_source=False,
        ),
    ),
)
