"""Train the MTP heads without training the trunk by their loss.

Upstream: NVIDIA/Megatron-LM#3456, native since 0.19.0.
Without it: the MTP loss reaches the trunk, the embedding and the output layer. In RL that is a second, unwanted
    objective for the policy; heads cannot be added to a trained model without changing it.
Adds: `config.mtp_detach_heads`, `--mtp-detach-heads`. No gradient of the MTP loss leaves the heads; deeper heads go on
    training the ones before them.
Repairs, where native: with --overlap-moe-expert-parallel-comm the trunk was trained all the same (0.19, main);
    a bias or adapter of the output layer was trained, a wrapper without `weight` failed, and FSDP2 and Megatron-FSDP
    were asked for the weight before it was gathered;
    with pipeline parallelism, --overlap-grad-reduce and no distributed optimizer, DDP asserted in the second step.
Refused at start: --mtp-detach-heads together with --defer-embedding-wgrad-compute.
Changes numbers: with the flag. It also takes the heads out of the reported grad norm (clip-mtp-grads-separately).
"""

from .engine import AddField, Patch, Probe, PullRequest, Wrap
from .shared_edits import (
    CHECK_SETTINGS,
    CHECK_TRANSFORMER_CONFIG,
    DEFAULT_IN_YAML,
    MTP,
    MTP_LOSS,
    MTP_OVERRIDES,
    SCHEDULED_MTP_LAYER,
    TRANSFORMER_CONFIG,
)

_HEADS = f"{MTP_OVERRIDES}.detached_heads"
_SCHEDULED = "megatron_overrides.core.models.common.fine_grained_callables:detach_scheduled_layer"

PATCH = Patch(
    id="detach-mtp-heads",
    doc=__doc__,
    upstream=(PullRequest(3456, native_since="0.19.0"),),
    probe=Probe(f"{TRANSFORMER_CONFIG}.mtp_detach_heads"),
    repairs=True,
    edits=(
        AddField(
            TRANSFORMER_CONFIG,
            field="mtp_detach_heads",
            type=bool,
            default=False,
            doc="Keep the gradient of the MTP loss in the MTP heads, out of trunk, embedding and output layer.",
        ),
        DEFAULT_IN_YAML,
        *CHECK_SETTINGS,
        CHECK_TRANSFORMER_CONFIG,
        *MTP_LOSS,
        Wrap(f"{MTP}:MultiTokenPredictionBlock.forward", f"{_HEADS}:detach_block"),
        Wrap(f"{MTP}:MultiTokenPredictionLayer._get_embeddings", f"{_HEADS}:detach_inputs"),
        Wrap(
            "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__",
            "megatron_overrides.core.distributed.distributed_data_parallel:mark_layers_needing_embedding_grad",
            check_source=False,
        ),
        *(Wrap(target, _SCHEDULED) for target in SCHEDULED_MTP_LAYER),
    ),
)
