"""Declares initialize-mtp-heads."""

from ..declarations.settings import ADD_ARGUMENTS, CHECK_SETTINGS
from ..engine import AddFlag, Patch, Wrap

_CHECKPOINTING = "megatron.training.checkpointing"
_WRAPPERS = "megatron_overrides.mtp.new_heads.loading"

PATCH = Patch(
    id="initialize-mtp-heads",
    summary="Load a checkpoint without MTP heads into a model that has some, and initialize them",
    problem="A checkpoint without MTP heads (Megatron's MTP layers) cannot be loaded into a model that has some. In "
    "the format torch_dist Megatron stops at the first tensor that is missing. In the format torch it loads what is "
    "there and continues, whatever is missing; a pipeline stage's copy of the embedding, which only the heads use, "
    "then keeps its random values.",
    adds=(
        "`--mtp-init random|last-layer`: a checkpoint in which exactly the heads are missing is loaded as with "
        "`--finetune`, without iteration, random state and optimizer. Then the heads are initialized: `random` leaves "
        "them as they were built; `last-layer` copies the last decoder layer and the final norm of the main model into "
        "each head.",
        "A checkpoint that has the heads is loaded as before, so the same command line resumes.",
        "The copy of the embedding on the stage of the heads gets the values of the first stage.",
        "With `--use-checkpoint-args`, settings of the heads come from the command line if the checkpoint has none.",
    ),
    undetected="It adds a way to start; no number is wrong without it.",
    refuses=(
        "`--mtp-init` without `--load` or `--pretrained-checkpoint`, or if there is no checkpoint.",
        "`--mtp-init` for a checkpoint with some of the heads, or, in the format torch, without another part of the "
        "model.",
        "`--mtp-init last-layer` where a head has another kind of layer than the end of the main model, as in hybrid "
        "models.",
        "`--mtp-init` with `--use-megatron-fsdp` or `--use-torch-fsdp2`, whose checkpoints have other formats, with "
        "`--non-persistent-ckpt-type`, `--moe-use-upcycling`, `--load-main-params-from-ckpt` or `--no-initialization`.",
    ),
    numerics="Only with the flag: it decides with which values the heads start.",
    notes=(
        "`last-layer` sends the layer to the pipeline stage of the heads; the checkpoint is not read a second time.",
    ),
    edits=(
        AddFlag(
            ADD_ARGUMENTS,
            flag="--mtp-init",
            type=str,
            default=None,
            help="How to initialize the MTP heads that a checkpoint lacks: random or last-layer.",
            metavar="START",
        ),
        *CHECK_SETTINGS,
        Wrap(f"{_CHECKPOINTING}:load_checkpoint", f"{_WRAPPERS}:load_main_model", check_source=False),
        Wrap(
            f"{_CHECKPOINTING}:load_args_from_checkpoint", f"{_WRAPPERS}:keep_settings_of_new_heads", check_source=False
        ),
    ),
)
