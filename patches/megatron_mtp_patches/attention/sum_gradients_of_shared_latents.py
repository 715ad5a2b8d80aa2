"""Declares sum-gradients-of-shared-latents."""

from ..engine import Patch, PullRequest, Wrap

_MLA = "megatron.core.transformer.multi_latent_attention"
_ABSORBED = "megatron.core.transformer.experimental_attention_variant.absorbed_mla"
_OVERRIDES = "megatron_overrides.attention.shared_latents"

PATCH = Patch(
    id="sum-gradients-of-shared-latents",
    summary="Train the latents of MLA on the heads of all tensor-parallel ranks",
    upstream=(PullRequest(6839),),
    problem="In multi-latent attention all heads share one positional key. With tensor parallelism each rank has some "
    "of the heads, and nothing adds up the gradients that their heads give this key. So the down projection, the "
    "norm before it and all earlier layers learn from a part of the heads. Without `--sequence-parallel` the copies "
    "of the down projection and of the norm drift apart. With `--mla-down-proj-fusion` on 0.19, or a layer spec of "
    "your own, the down projection is split over the ranks: there is no drift, and the gradients are wrong with "
    "`--sequence-parallel` as well (NVIDIA/Megatron-LM#1699).",
    adds=("The gradient of the positional key is added up over the tensor-parallel ranks.",),
    numerics="With `--multi-latent-attention` and tensor parallelism, where the down projection is split or "
    "`--sequence-parallel` is left out: the gradients of the down projections and of all that comes before the "
    "last of them, and the gradient norm. The losses of the first step, and inference, stay as they are.",
    notes=(
        "In backward each layer reduces the gradient of the positional key, [tokens, batch, qk_pos_emb_head_dim], over "
        "the tensor-parallel ranks. A split down projection with `--sequence-parallel` gathers the key once more in "
        "forward.",
        "Copies that have drifted apart stay apart. A resume from a distributed checkpoint makes them the same.",
    ),
    is_repair=True,
    edits=(
        Wrap(f"{_MLA}:MLASelfAttention.get_query_key_value_tensors", f"{_OVERRIDES}:sum_gradients_of_shared_latents"),
        Wrap(f"{_MLA}:FusedMLASelfAttention._qkv_down_projection", f"{_OVERRIDES}:sum_gradients_of_fused_latents"),
        Wrap(
            f"{_ABSORBED}:AbsorbedMLASelfAttention.get_query_key_value_tensors",
            f"{_OVERRIDES}:sum_gradients_of_shared_latents",
        ),
    ),
)
