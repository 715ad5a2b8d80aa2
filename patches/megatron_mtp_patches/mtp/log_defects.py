"""Wrong numbers of MTP heads in the log."""

from ..defects.declare import Defect, Sign

_HELPER = "megatron.core.transformer.multi_token_prediction:MTPLossLoggingHelper"

DEFECTS = (
    Defect(
        "acceptance-after-loss",
        "The acceptance rate of the MTP heads is 0, because the fused cross entropy of TransformerEngine before 2.18 "
        "overwrites the logits before they are compared with the labels",
        kind="wrong log",
        severity=2,
        signs=Sign(f"{_HELPER}.save_metrics_to_tracker"),
        affects=lambda run: (
            run.mtp_num_layers
            and run.cross_entropy_loss_fusion
            and run.cross_entropy_fusion_impl == "te"
            and run.transformer_engine < (2, 18)
        ),
        when="--mtp-num-layers with --cross-entropy-loss-fusion, --cross-entropy-fusion-impl te and TransformerEngine "
        "before 2.18, in trainers other than Megatron's, which refuses te",
        more_links=("NVIDIA-NeMo/Megatron-Bridge#5947", "NVIDIA/TransformerEngine#3193"),
        introduced_by=("NVIDIA/Megatron-LM#3458",),
        state="fixed in TransformerEngine 2.18",
        evidence="reproduced",
        instead="--cross-entropy-fusion-impl native",
        patch="mtp-acceptance-rate",
        second_reading="sources of 0.19.0 and what its trainer refuses; TransformerEngine#3193; predicate just "
        "outside; its program",
    ),
)
