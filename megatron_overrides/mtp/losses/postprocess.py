"""The loss of the heads in a GPTModel whose `_postprocess` does not call process_mtp_loss, as that of 0.16."""

from __future__ import annotations

import copy
import sys
from typing import Any

from megatron_overrides.call import Call


def _attach_mtp_loss(call: Call) -> None:
    """Replace the hidden states of the call by those of the main model, with the losses of the heads attached."""
    from megatron_overrides.mtp.losses.process_mtp_loss import process_mtp_loss

    model = call.instance
    if call["mtp_in_postprocess"]:
        passed_on = (
            "input_ids position_ids hidden_states attention_mask inference_params rotary_pos_emb rotary_pos_cos "
            "rotary_pos_sin packed_seq_params sequence_len_offset"
        )
        call["hidden_states"] = model.mtp(
            **{name: call[name] for name in passed_on.split()},
            embedding=model.embedding,
            **(call["extra_block_kwargs"] or {}),
        )
    call["hidden_states"] = process_mtp_loss(
        call["hidden_states"],
        call["labels"],
        call["loss_mask"],
        model.output_layer,
        model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None,
        call["runtime_gather_output"],
        model.training,
        model.compute_language_model_loss,
        model.config,
        cp_group=model.cp_group,
        tp_group=model.pg_collection.tp,
        packed_seq_params=call["packed_seq_params"],
        rescale_per_token=False,
    )


def call_process_mtp_loss(call: Call) -> Any:
    """Wraps GPTModel._postprocess: runs the MTP block and its loss, then the rest as for a model without heads."""
    if hasattr(sys.modules["megatron.core.models.gpt.gpt_model"], "process_mtp_loss"):
        return call.proceed()
    if call.instance.config.mtp_num_layers is None or not call.instance.post_process:
        return call.proceed()
    if call["inference_context"] is None or call.instance.training:
        _attach_mtp_loss(call)
    elif not call["mtp_in_postprocess"]:  # the stage before ran the block; inference drops its output
        call["hidden_states"] = call["hidden_states"].chunk(1 + call.instance.config.mtp_num_layers)[0]
    call["mtp_in_postprocess"] = False
    rest = copy.copy(call.instance)
    rest.config = copy.copy(call.instance.config)
    rest.config.mtp_num_layers = None
    return call.proceed(rest)
