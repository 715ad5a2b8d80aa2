"""Declares freeze-base-model-for-mtp."""

from ..declarations.settings import TRANSFORMER_CONFIG, Setting, model_setting
from ..declarations.shared_edits import (
    DETACHED_HEADS,
    FROZEN_PARAMETERS,
    MTP,
    MTP_FORWARD_PASS,
    divide_aux_losses,
    wrap_data_parallel,
)
from ..engine import Patch, Probe, PullRequest, Wrap

_WRAPPERS = "megatron_overrides.mtp.frozen.frozen_main_model"
_MODELS = ("gpt.gpt_model:GPTModel", "hybrid.hybrid_model:HybridModel", "mamba.mamba_model:MambaModel")

PATCH = Patch(
    id="freeze-base-model-for-mtp",
    summary="Train the MTP heads alone; the main model runs without gradients and stays bit-identical",
    upstream=(PullRequest(7021, ended="merged after 2026-08-22"), PullRequest(4785, native_since="0.19.0")),
    problem="To add MTP heads (Megatron's MTP layers) to a trained model, or to train them again, only the heads have "
    "to train. With `--mtp-detach-heads` the main model trains as well, or, with a learning rate of zero, still pays "
    "for its backward pass, its gradients and its optimizer state. `--freeze-base-for-mtp` of 0.19 belongs to "
    "megatron.post_training; by its source, the backward pass goes through the output layer of the main model and, "
    "on later pipeline stages, through its layers.",
    adds=(
        "`config.freeze_base_model_for_mtp`: only the parameters of the MTP heads train. The main model runs without "
        "gradients and keeps no activations. Its parameters get no gradient buffer, no optimizer state and no part in "
        "the gradient norm; embedding, output layer, biases of routers and running statistics stay as they are, to the "
        "bit.",
        "Pipeline stages without heads take part: they send gradients of zero, and their optimizers are empty.",
        "TFLOP/s count one forward pass of the main model; the logged auxiliary losses are those of the heads.",
    ),
    undetected="It adds a way to train; no number is wrong without it.",
    refuses=(
        "`--freeze-base-model-for-mtp` for a model without MTP heads, such as any MambaModel of 0.16.",
        "`--freeze-base-model-for-mtp` together with `--freeze-base-for-mtp`, `--qad-train-target`, "
        "`--freeze-all-layers`, `--overlap-moe-expert-parallel-comm`, `--cuda-graph-impl`, `--qk-clip`, "
        "`--cpu-offloading-num-layers`, `--fine-grained-activation-offloading`, `--moe-paged-stash` or "
        "`--defer-embedding-wgrad-compute`.",
        "`--freeze-base-model-for-mtp` with a layer-wise optimizer (dist_muon) over several pipeline stages.",
        "A checkpoint of a run with `--freeze-base-model-for-mtp` in a run without it, and the other way around, "
        "unless `--finetune` or `--no-load-optim` leaves the optimizer state out.",
    ),
    numerics="Only with the flag. The heads then train to the bit as `--mtp-detach-heads` trains them over a main "
    "model that does not change. Without `--mtp-detach-heads` beside it, `grad norm` and `--clip-grad` are those of "
    "the heads.",
    notes=(
        "#7021 was merged after the newest release. Its description and a later HybridModel were read: only "
        "`mtp.layers.*` trains (all parameters of an MTP block are there), the decoder runs under `no_grad`, the "
        "biases of the main model's routers stay and those of the heads' routers move, MTP heads are required, and "
        "`--freeze-all-layers` is refused. There the output layer and the main loss run with gradients; here they run "
        "without. In a Megatron that has the setting by itself the patch is refused: the two were never run side by "
        "side.",
        "To train the heads of a checkpoint that has them again, or its main model after its heads, add `--finetune`: "
        "its optimizer state is that of other parameters.",
        "Dropout of the main model is as in training: set `--hidden-dropout 0 --attention-dropout 0` for a teacher "
        "without noise.",
        "The scaling history of fp8 is that of activations, which the frozen main model keeps recording. That was not "
        "run.",
    ),
    probe=Probe(f"{TRANSFORMER_CONFIG}.freeze_base_model_for_mtp"),
    edits=(
        *model_setting(
            Setting(
                "freeze_base_model_for_mtp",
                bool,
                False,
                "Train only the MTP heads; the main model runs without gradients and stays as it is.",
                check="megatron_overrides.mtp.frozen.checks:check_frozen_main_model",
                named_in=7021,
                in_ms_swift=True,
            )
        ),
        *DETACHED_HEADS,
        *MTP_FORWARD_PASS,
        *(
            Wrap(f"megatron.core.models.{model}.{method}", f"{_WRAPPERS}:{wrapper}", check_source="gpt" not in model)
            for method, wrapper in (("__init__", "freeze_new_model"), ("forward", "run_main_model_without_gradients"))
            for model in _MODELS
        ),
        Wrap(f"{MTP}:MultiTokenPredictionBlock.forward", f"{_WRAPPERS}:run_heads_with_gradients"),
        *wrap_data_parallel(f"{_WRAPPERS}:freeze_what_is_wrapped"),
        *FROZEN_PARAMETERS,
        *(
            Wrap(f"megatron.core.distributed.finalize_model_grads:{update}", f"{_WRAPPERS}:update_routers_of_heads")
            for update in ("_update_router_expert_bias", "_update_router_qb_beta")
        ),
        Wrap("megatron.core.pipeline_parallel.schedules:backward_step", f"{_WRAPPERS}:return_zero_gradient"),
        Wrap(
            "megatron.training.training:num_floating_point_operations",
            f"{_WRAPPERS}:count_no_backward_of_main_model",
            check_source=False,
        ),
        Wrap(
            "megatron.training.checkpointing:generate_state_dict",
            "megatron_overrides.mtp.frozen.optimizer_state:share_state_of_heads",
            check_source=False,
        ),
        *divide_aux_losses("average_over_layers_with_losses"),
    ),
)
