"""Declares disable-mtp-loss."""

from ..declarations.settings import TRANSFORMER_CONFIG, Setting, model_setting
from ..declarations.shared_edits import (
    FROZEN_PARAMETERS,
    MTP,
    MTP_FORWARD_PASS,
    MTP_LOSS,
    divide_aux_losses,
    wrap_data_parallel,
)
from ..engine import Patch, Probe, PullRequest, Wrap

_WRAPPERS = "megatron_overrides.mtp.frozen.disabled_heads"

PATCH = Patch(
    id="disable-mtp-loss",
    summary="Train the main model without its MTP heads, which stay in the model and in checkpoints",
    upstream=(PullRequest(7384, ended="closed"),),
    problem="In RL and SFT of the main model its MTP heads (Megatron's MTP layers) are not to train. Without "
    "`--mtp-num-layers` the model and its checkpoints have none. With `--mtp-loss-scaling-factor 0` they run, take "
    "gradients and optimizer state, and weight decay changes them.",
    adds=(
        "`config.disable_mtp_loss`: in training the heads do not run. They get no gradient and no optimizer state, and "
        "stay as they are, to the bit, with the biases of their routers. The main model trains as one without heads.",
        "Evaluation, an `mtp_pass` without gradients and speculative decoding use the heads as before.",
        "TFLOP/s count the main model alone, the logged auxiliary losses are its own, and the log has no MTP losses.",
    ),
    undetected="It adds a way to train; no number is wrong without it.",
    refuses=(
        "`--disable-mtp-loss` together with `--freeze-base-model-for-mtp`, `--freeze-base-for-mtp`, "
        "`--qad-train-target`, `--overlap-moe-expert-parallel-comm`, `--cuda-graph-impl` or `--moe-paged-stash`.",
        "A checkpoint of a run with `--disable-mtp-loss` in a run that trains the heads, and the other way around, "
        "unless `--finetune` or `--no-load-optim` leaves the optimizer state out.",
    ),
    numerics="Only with the flag: the main model gets no gradient of the MTP loss.",
    notes=(
        "No Megatron has the flag: #7384, of which the description and the tests were read, was closed in favour of "
        "NeMo RL, which freezes the heads itself and passes `compute_mtp_loss=False` in each call of HybridModel. That "
        "argument, which main has, skips the heads of one call; their gradients and their optimizer state stay, so the "
        "setting does not use it.",
        "Over several pipeline stages the stage of the heads has a copy of the word embedding, which keeps its "
        "optimizer state: it is updated as the first stage updates its own, with the same gradient.",
        "A model whose GPTModel._postprocess verl has replaced raises an error if it runs the heads in "
        "training; with `mtp.enable_train=false` verl does not run them.",
    ),
    probe=Probe(f"{TRANSFORMER_CONFIG}.disable_mtp_loss"),
    edits=(
        *model_setting(
            Setting(
                "disable_mtp_loss",
                bool,
                False,
                "Train without the MTP heads: they stay in the model and in checkpoints as they are.",
                check="megatron_overrides.mtp.frozen.checks:check_disabled_heads",
                named_in=7384,
            )
        ),
        *MTP_LOSS,
        *MTP_FORWARD_PASS,
        Wrap(f"{MTP}:MultiTokenPredictionBlock.__init__", f"{_WRAPPERS}:disable_new_heads", check_source=False),
        Wrap(f"{MTP}:MultiTokenPredictionBlock.forward", f"{_WRAPPERS}:skip_disabled_block"),
        *wrap_data_parallel(f"{_WRAPPERS}:disable_wrapped_heads"),
        *FROZEN_PARAMETERS,
        Wrap(
            "megatron.core.distributed.finalize_model_grads:_update_router_qb_beta",
            f"{_WRAPPERS}:update_routers_of_main_model",
        ),
        Wrap(
            "megatron.training.training:num_floating_point_operations",
            f"{_WRAPPERS}:count_no_heads",
            check_source=False,
        ),
        *divide_aux_losses("average_over_layers_with_losses"),
    ),
)
