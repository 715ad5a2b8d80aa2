"""verl: our metrics beside its grad_norm, skipped updates, and which MTP heads train."""

from __future__ import annotations

import logging
from typing import Any

from megatron.core.utils import get_model_config
from verl.utils import tensordict_utils

from megatron_overrides.call import Call
from megatron_overrides.mtp.frozen.trained_parts import UNTRAINED_HEADS, are_heads_disabled
from megatron_overrides.norms.step_state import step_state_of
from megatron_overrides.report.metrics import step_scalars

logger = logging.getLogger(__name__)


def report_metrics(call: Call) -> Any:
    """Wraps TrainingWorker._postprocess_output(output): `metrics` gets `megatron/mtp_grad_norm` and the like.

    It gathers the metrics of all data-parallel ranks in lists, which verl's loops chain or reduce, but leaves
    `grad_norm`, which is the same on all ranks, a number. Ours are numbers as well, and are added to its result. The
    metrics of MTP heads reach verl with their losses, as `mtp_losses/mtp_1_acceptance_rate`. Passes that have updated
    nothing and engines of other backends are left alone.
    """
    output = call["output"]
    optimizer = getattr(call.instance.engine, "optimizer", None)
    if "grad_norm" not in output["metrics"] or not hasattr(optimizer, "get_grad_norm"):
        return call.proceed()
    result = call.proceed()
    scalars = {f"megatron/{tag.replace('-', '_')}": value for tag, value in step_scalars(optimizer).items()}
    if getattr(get_model_config(call.instance.engine.module[0]), UNTRAINED_HEADS, False):
        scalars.pop("megatron/mtp_grad_norm", None)
    tensordict_utils.get(result, "metrics").update(scalars)
    return result


def return_from_skipped_update(call: Call) -> Any:
    """Wraps MegatronEngine.optimizer_step, which raises NotImplementedError where the optimizer made no update.

    Returns:
        The gradient norm; None if none was measured, because the loss scaler found inf or NaN.
    """
    try:
        return call.proceed()
    except NotImplementedError:
        state = step_state_of(call.instance.optimizer)
        if not state.decision.skips_update:
            raise
        return None if state.norms is None else state.norms.total[None]


def trains_heads(model: Any, mtp: Any) -> bool:
    """True if the heads of `model`, a GPTModel or HybridModel that trains, train under verl.

    With mtp.enable_train=false verl gives its models no labels. A GPTModel, whose method verl has replaced, runs no
    head then. Another one (HybridModel) derives the labels from its tokens (derive-mtp-labels).
    """
    from megatron.core.models.gpt.gpt_model import GPTModel

    if are_heads_disabled(model.config):
        return False
    return bool(mtp.enable_train) or not isinstance(model, GPTModel)


def name_trained_heads(call: Call) -> None:
    """Wraps patch_engine_mtp(module, model_config), which verl's engine calls when it has built a model with heads.

    The configuration then says whether they train; heads that train where verl knows none are said so.
    """
    call.proceed()
    from megatron.core.utils import log_single_rank, unwrap_model

    chunk = call["module"][-1] if isinstance(call["module"], list) else call["module"]
    model, mtp = unwrap_model(chunk), call["model_config"].mtp
    is_trained = hasattr(chunk, "ddp_config")  # only a model that trains has it
    setattr(model.config, UNTRAINED_HEADS, not trains_heads(model, mtp))
    if mtp.enable_train or not is_trained or not trains_heads(model, mtp):
        return
    text = (
        f"The MTP heads of this {type(model).__name__} train, although mtp.enable_train is false: verl knows the heads "
        f"of GPTModel alone, and without labels heads learn the tokens of prompts and responses. Leave them as they "
        f"are with disable_mtp_loss in verl's override_transformer_config, or keep their loss from the main model with "
        f"mtp_detach_heads"
    )
    log_single_rank(logger, logging.WARNING, text)
