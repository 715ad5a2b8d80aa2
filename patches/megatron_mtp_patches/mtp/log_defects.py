"""Wrong numbers of MTP heads in the log."""

from ..defects.declare import Defect, Sign

_HELPER = "megatron.core.transformer.multi_token_prediction:MTPLossLoggingHelper"

DEFECTS = (
    Defect(
        "acceptance-after-loss",
        "The acceptance rate of the MTP heads is 0, because the fused cross entropy overwrites the logits before they "
        "are compared with the labels",
        kind="wrong log",
        severity=2,
        signs=Sign(f"{_HELPER}.save_metrics_to_tracker"),
        affects=lambda run: (
            run.mtp_num_layers and run.cross_entropy_loss_fusion and run.cross_entropy_fusion_impl == "te"
        ),
        when="--mtp-num-layers with --cross-entropy-loss-fusion and --cross-entropy-fusion-impl te",
        more_links=("NVIDIA-NeMo/Megatron-Bridge#5947",),
        introduced_by=("NVIDIA/Megatron-LM#3458",),
        state="open",
        evidence="reproduced",
        instead="--cross-entropy-fusion-impl native",
        patch="mtp-acceptance-rate",
    ),
)
