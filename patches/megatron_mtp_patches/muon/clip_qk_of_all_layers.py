"""Declares clip-qk-of-all-layers."""

from ..engine import Override, Patch, Wrap

_QK_CLIP = "megatron_overrides.muon.qk_clip.clipping"

PATCH = Patch(
    id="clip-qk-of-all-layers",
    summary="Let --qk-clip reach every attention layer, with each optimizer and under tensor parallelism",
    problem="`--qk-clip` (MuonClip) visits `decoder.layers` of a GPT model, so the attention of MTP heads is never "
    "clipped. A head whose largest logit is negative gets NaN weights as soon as another head of its layer is over "
    "the threshold. In the first step that clips, the run ends in an error with the distributed optimizer, with a "
    "precision-aware one, with tensor parallelism (except MLA) and with an output gate; models with Mamba "
    "layers and those in fp32 fail at once. Validation raises the maximum of the next step, the logged one is that of "
    "the last rank, and up to 0.18 `--log-max-attention-logit` alone logs the maximum of all steps so far and keeps "
    "the graph of each microbatch alive.",
    adds=(
        "Every attention layer is clipped: of the main model and of MTP heads, in GPT and hybrid models, in any "
        "wrappers; multi-head, grouped-query (also with an output gate) and multi-head latent attention, absorbed as "
        "well; also where tensor-parallel ranks share a query group.",
        "Main weights are scaled with the model's: those of Float16 and layer-wise optimizers, shards of the "
        "distributed optimizer, the states of a precision-aware one (also with remainders), copies on the CPU.",
        "Weights that are frozen stay as they are. Biases are scaled with their rows, because they are part of the "
        "queries and keys.",
        "The maximum that is logged, and that clips, is that of the training microbatches of this step. "
        "The log has that of all ranks.",
    ),
    refuses=(
        "`--qk-clip` with Megatron-FSDP or FSDP2, with `--overlap-param-gather-with-optimizer-step`, with "
        "`--transformer-impl local`, and with CUDA graphs of attention; the last two report no logits.",
    ),
    numerics="With `--qk-clip`: the weights of MTP heads, and biases of queries and keys, in the steps in which a "
    "layer is over the threshold. With `--log-max-attention-logit`: the logged maximum, up to 0.18, after a "
    "validation, or with tensor or pipeline parallelism.",
    notes=(
        "The first step ends in an error, before a weight is scaled, where attention is not TransformerEngine's or the "
        "rows of a weight are not those of the heads of this rank.",
        "A step has one all-reduce over replicas and one transfer to the host for all layers of a rank, where Megatron "
        "has one of each for each layer; one all-reduce of a number over tensor-parallel and pipeline ranks; and one "
        "all-gather for each layer whose query groups tensor-parallel ranks share.",
        "With query and key layer norms the norms undo what the clip does, as in Megatron.",
    ),
    is_repair=True,
    edits=(
        Override("megatron.core.optimizer.qk_clip:clip_qk", f"{_QK_CLIP}:clip_qk"),
        Wrap("megatron.training.arguments:validate_args", f"{_QK_CLIP}:refuse_at_start", check_source=False),
        Wrap(
            "megatron.core.extensions.transformer_engine:TEDotProductAttention.forward",
            f"{_QK_CLIP}:keep_logits_of_training",
        ),
        Wrap("megatron.core.optimizer.optimizer:MixedPrecisionOptimizer.__init__", f"{_QK_CLIP}:remember_optimizer"),
    ),
)
