"""verl: MTP heads of which its checkpoints would lack weights, or whose base keeps all weights out of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from megatron.core.utils import get_model_config, unwrap_model

from megatron_overrides.call import Call
from megatron_overrides.frameworks.bridge_heads import listed_here, split_heads
from megatron_overrides.frameworks.verl import trains_heads
from megatron_overrides.model_ranks import is_on_any_rank
from megatron_overrides.mtp.heads.finite_heads import listed


def refuse_heads_that_are_not_saved(call: Call) -> Any:
    """Wraps MegatronEngine._build_megatron_module(), which builds a model and loads the base into it.

    verl builds the model initialized, so heads that the base lacks are random. Megatron-Bridge exports only tensors
    whose names the base has. `use_dist_checkpointing` saves all of them.

    Raises:
        ValueError: on all ranks of the model, if heads train whose weights the base lacks, or if the base has tensors
            of heads without which verl would save no weights.
    """
    result = call.proceed()
    engine = call.instance
    if engine.engine_config.forward_only or engine.vanilla_bridge:
        return result
    chunks = unwrap_model(result)
    has_heads = getattr(get_model_config(chunks[0]), "mtp_num_layers", None)
    is_saved_by_name = has_heads and not engine.engine_config.use_dist_checkpointing
    if is_saved_by_name and trains_heads(chunks[0], engine.model_config.mtp):
        lacking, _ = split_heads(engine.bridge.get_conversion_tasks(result), chunks)
        if is_on_any_rank(bool(lacking), getattr(chunks[0], "pg_collection", None)):
            raise ValueError(
                f"The checkpoint {engine.model_config.local_path} lacks weights of the MTP heads that its config.json "
                f"declares: {listed_here(lacking)}. verl saves, and sends to rollouts, only tensors that this "
                f"checkpoint has, so these heads would train and be lost, and a resume would start them again. Add the "
                f"heads first (docs/add-heads-to-a-hugging-face-model.md) and give verl the exported folder, or leave "
                f"them out with mtp.enable=false"
            )
    if saves_whole_files_alone(engine):
        unsaved, lost = head_tensors_beside_weights(
            engine.bridge.hf_pretrained, engine.bridge.get_conversion_tasks(result)
        )
        if lost:
            raise ValueError(
                f"verl's checkpoints would lack {len(lost)} weights of this model: with checkpoint.strict=true "
                f"Megatron-Bridge leaves out each file in which {engine.model_config.local_path} has a tensor that it "
                f"does not save. It does not save {listed(unsaved)}: heads that the model does not have, or copies of "
                f"the embedding and the output layer. Set actor_rollout_ref.actor.checkpoint.strict=false (critic: "
                f"+critic.checkpoint.strict=false, SFT trainer: +checkpoint.strict=false), or save neither model nor "
                f"hf_model (checkpoint.save_contents)"
            )
    return result


def saves_whole_files_alone(engine: Any) -> bool:
    """True if this engine saves the weights by Megatron-Bridge, without files that lack a tensor of the base."""
    contents = engine.checkpoint_config.save_contents
    by_bridge = "hf_model" in contents or ("model" in contents and not engine.engine_config.use_dist_checkpointing)
    return by_bridge and engine.checkpoint_config.strict and engine.peft_cls is None


def head_tensors_beside_weights(base: Any, tasks: Iterable[Any]) -> tuple[list[str], set[str]]:
    """(the tensors of MTP heads in a checkpoint of Hugging Face that Megatron-Bridge does not export, the exported
    ones in the same files).

    Heads are the layers behind the last one of the main model. Bridge itself leaves out those in `mtp.` where the model
    has none. Experts are on other ranks; a head that is left out has more than its experts.

    Args:
        base: Bridge's PreTrainedCausalLM or the like, whose `state.source` names the tensors and their files.
        tasks: Bridge's conversion tasks for this checkpoint and the model; None where it lacks a tensor.
    """
    names = [task.mapping.hf_param for task in tasks if task is not None]
    exported = {name for one in names for name in ([one] if isinstance(one, str) else one.values())}
    layers = base.config.get_text_config().num_hidden_layers
    files = base.state.source.key_to_filename_map
    unsaved = sorted(
        name
        for name in files.keys() - exported
        if ".experts." not in name
        and (number := re.match(r"(?!mtp\.).*?\blayers\.(\d+)\.", name))
        and int(number[1]) >= layers
    )
    left_out = {files[name] for name in unsaved}
    return unsaved, {name for name in exported & files.keys() if files[name] in left_out}
