"""Declares detach-mtp-heads."""

from ..declarations.settings import TRANSFORMER_CONFIG, Setting, model_setting
from ..declarations.shared_edits import DETACHED_HEADS, SCHEDULED_MTP_LAYER
from ..engine import Patch, Probe, PullRequest, Wrap

_SCHEDULED = "megatron_overrides.mtp.heads.detached_heads:detach_scheduled_layer"

PATCH = Patch(
    id="detach-mtp-heads",
    summary="Train the MTP heads without training the main model with their loss",
    upstream=(PullRequest(3456, native_since="0.19.0"),),
    problem="The loss of the MTP heads (Megatron's MTP layers) also trains the main model, the embedding and the "
    "output layer. In RL that is a second, unwanted objective of the policy; and heads cannot be added to a trained "
    "model without changing it. In a small GPT whose MTP loss weighs three times the main loss, the main model's "
    "validation loss is 3.72 bits per byte instead of 3.42.",
    adds=(
        "`config.mtp_detach_heads`: no gradient of the MTP loss leaves the heads. The main model, the shared "
        "embedding and the output layer train as if there were no heads. A deeper head still trains the heads before "
        "it.",
    ),
    repairs=(
        "With `--overlap-moe-expert-parallel-comm` the main model was trained with the MTP loss nevertheless (0.19, "
        "main).",
        "A bias of the output layer, or a LoRA adapter in it, was trained. A wrapper without `.weight` raised an "
        "AttributeError. With FSDP2 and Megatron-FSDP the weight was taken before it was gathered.",
        "With pipeline parallelism, `--overlap-grad-reduce` and no distributed optimizer, an assertion of DDP failed "
        "in the second step, because the MTP stage's copy of the embedding got no gradient. Now it gets a gradient of "
        "zero.",
    ),
    refuses=("`--mtp-detach-heads` together with `--defer-embedding-wgrad-compute`.",),
    numerics="Only with the flag. The gradients of the main model then equal, to the bit, those of a model without "
    "heads, and the gradients of the heads equal those of heads that are not detached. Detached heads are also "
    "clipped separately, and the reported grad norm leaves them out: see `clip-mtp-grads-separately`.",
    probe=Probe(f"{TRANSFORMER_CONFIG}.mtp_detach_heads"),
    edits=(
        *model_setting(
            Setting(
                "mtp_detach_heads",
                bool,
                False,
                "Train only the MTP heads with the MTP loss: not the main model, the embedding or the output layer.",
                check="megatron_overrides.mtp.heads.checks:check_detached_heads",
                is_upstream=True,
                in_ms_swift=True,
            )
        ),
        *DETACHED_HEADS,
        Wrap(
            "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__",
            "megatron_overrides.mtp.frozen.data_parallelism:mark_layers_needing_embedding_grad",
            check_source=False,
        ),
        *(Wrap(target, _SCHEDULED) for target in SCHEDULED_MTP_LAYER),
    ),
)
