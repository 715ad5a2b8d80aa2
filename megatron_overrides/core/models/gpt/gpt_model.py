"""Make GPTModel of 0.16, which computes the MTP loss in the middle of its _postprocess, call process_mtp_loss."""

from __future__ import annotations

import copy
import inspect
import sys
from typing import Any

from megatron_overrides.core.transformer.multi_token_prediction.loss import process_mtp_loss


def call_process_mtp_loss(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps GPTModel._postprocess: runs the MTP block and its loss, then the rest as for a model without heads."""
    if hasattr(sys.modules["megatron.core.models.gpt.gpt_model"], "process_mtp_loss"):
        return wrapped(*args, **kwargs)
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    if instance.config.mtp_num_layers is None or not instance.post_process:
        return wrapped(*args, **kwargs)
    if given["inference_context"] is None or instance.training:
        _attach_mtp_loss(instance, given)
    elif not given["mtp_in_postprocess"]:  # the stage before ran the block; inference drops its output
        given["hidden_states"] = given["hidden_states"].chunk(1 + instance.config.mtp_num_layers)[0]
    given["mtp_in_postprocess"] = False
    rest = copy.copy(instance)
    rest.config = copy.copy(instance.config)
    rest.config.mtp_num_layers = None
    return wrapped.__func__(rest, *call.args, **call.kwargs)


def _attach_mtp_loss(model: Any, given: dict[str, Any]) -> None:
    """Replace the hidden states in `given` by those of the main model, with the losses of the heads attached."""
    if given["mtp_in_postprocess"]:
        passed_on = (
            "input_ids position_ids hidden_states attention_mask inference_params rotary_pos_emb rotary_pos_cos "
            "rotary_pos_sin packed_seq_params sequence_len_offset"
        )
        given["hidden_states"] = model.mtp(
            **{name: given[name] for name in passed_on.split()},
            embedding=model.embedding,
            **(given["extra_block_kwargs"] or {}),
        )
    given["hidden_states"] = process_mtp_loss(
        given["hidden_states"],
        given["labels"],
        given["loss_mask"],
        model.output_layer,
        model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None,
        given["runtime_gather_output"],
        model.training,
        model.compute_language_model_loss,
        model.config,
        cp_group=model.cp_group,
        tp_group=model.pg_collection.tp,
        packed_seq_params=given["packed_seq_params"],
        rescale_per_token=False,
    )
