"""verl: MTP heads that it would train and could not save, because its base has none."""

from __future__ import annotations

from typing import Any

from megatron.core.utils import get_model_config, unwrap_model

from megatron_overrides.call import Call
from megatron_overrides.frameworks.bridge_heads import listed_here, split_heads
from megatron_overrides.frameworks.verl import trains_heads
from megatron_overrides.model_ranks import is_on_any_rank


def refuse_heads_that_are_not_saved(call: Call) -> Any:
    """Wraps MegatronEngine._build_megatron_module(), which builds a model and loads the base into it.

    verl builds the model initialized, so heads that the base lacks are random. Megatron-Bridge exports only tensors
    whose names the base has. `use_dist_checkpointing` saves all of them.

    Raises:
        ValueError: on all ranks of the model, if heads train whose weights the base lacks.
    """
    result = call.proceed()
    engine = call.instance
    if engine.engine_config.forward_only or engine.engine_config.use_dist_checkpointing or engine.vanilla_bridge:
        return result
    chunks = unwrap_model(result)
    if not getattr(get_model_config(chunks[0]), "mtp_num_layers", None):
        return result
    if not trains_heads(chunks[0], engine.model_config.mtp):
        return result
    lacking, _ = split_heads(engine.bridge.get_conversion_tasks(result), chunks)
    if is_on_any_rank(bool(lacking), getattr(chunks[0], "pg_collection", None)):
        raise ValueError(
            f"The checkpoint {engine.model_config.local_path} lacks weights of the MTP heads that its config.json "
            f"declares: {listed_here(lacking)}. verl saves, and sends to rollouts, only tensors that this checkpoint "
            f"has, so these heads would train and be lost, and a resume would start them again. Add the heads first "
            f"(docs/add-heads-to-a-hugging-face-model.md) and give verl the exported folder, or leave them out with "
            f"mtp.enable=false"
        )
    return result
