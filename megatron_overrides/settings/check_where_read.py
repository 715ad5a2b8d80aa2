"""The wrappers that check settings where Megatron reads them: arguments, configurations, and the optimizer's start.

What a setting refuses, its declaration names (`check`). Called here is only what that cannot tell: what a flag without
a field, a repair, a number of heads that Megatron reads late, and an optimizer that is named late refuse.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from megatron.core.utils import log_single_rank

from megatron_overrides.call import Call
from megatron_overrides.model_chunks import as_list
from megatron_overrides.mtp.frozen.checks import check_heads_to_train
from megatron_overrides.mtp.loss_weight.checks import check_heads_to_schedule, warn_of_normalized_updates
from megatron_overrides.mtp.losses.checks import check_token_counts
from megatron_overrides.mtp.new_heads.checks import check_new_heads
from megatron_overrides.muon.fused_weights.checks import check_muon_splits
from megatron_overrides.settings.absent_heads import warn_of_absent_heads_in_verl, warn_of_untrained_heads
from megatron_overrides.settings.checks import (
    all_settings,
    changed_settings,
    check,
    declared_settings,
)

logger = logging.getLogger(__name__)


def check_new_model_configuration(call: Call) -> None:
    """Wraps TransformerConfig.__post_init__: also checks a configuration that does not come from Megatron's parser."""
    call.proceed()
    _check_model(call.instance, declared_settings(type(call.instance)))


def check_new_optimizer_configuration(call: Call) -> None:
    """Wraps OptimizerConfig.__post_init__: a configuration made without Megatron's parser is checked too."""
    call.proceed()
    check(call.instance, declared_settings(type(call.instance)))


def check_arguments(call: Call) -> Any:
    """Wraps validate_args(args, defaults)."""
    settings = call["args"]
    _check_model(settings, all_settings())
    check_muon_splits(settings)
    check_new_heads(settings)
    validated = call.proceed()
    # Now it has read the heads of a hybrid model's pattern; only a checkpoint may still add some.
    if not getattr(settings, "use_checkpoint_args", False):
        check_heads_to_train(settings)
        check_heads_to_schedule(settings)
    check_token_counts(settings)
    return validated


def check_configs(call: Call) -> Any:
    """Wraps _get_param_groups(model_chunks, config, ...): the first place where both configurations are known.

    A trainer without Megatron's command line may also have changed them since they were created.
    """
    settings = call["config"]
    declared = list(declared_settings(type(settings)))
    check(settings, declared)
    check_muon_splits(settings)
    model_config = next((chunk.config for chunk in as_list(call["model_chunks"]) if hasattr(chunk, "config")), None)
    if changed := changed_settings(settings, model_config):
        _log_settings(", ".join(f"{name}={value}" for name, value in sorted(changed.items())))
    warn_of_untrained_heads(settings, model_config)
    if getattr(model_config, "mtp_num_layers", None):
        both = SimpleNamespace(**{**vars(settings), **vars(model_config)})
        _check_model(both, [*declared_settings(type(model_config)), *declared])
        warn_of_normalized_updates(both)
    return call.proceed()


@functools.cache  # Megatron also asks for the groups of the experts
def _log_settings(text: str) -> None:
    """Say on rank 0 which settings a run has: frameworks bury them in the fields of Megatron's configurations."""
    log_single_rank(logger, logging.WARNING, f"settings of the patches: {text}")


def _check_model(settings: Any, declarations: Iterable[Any]) -> None:
    check(settings, declarations)
    warn_of_absent_heads_in_verl(settings)
    check_token_counts(settings)


def default_added_fields(call: Call) -> dict[str, Any]:
    """Wraps core_config_from_args(args, dataclass), to which a field that the YAML does not name is an error."""
    arguments, config_class = call.args
    for field in dataclasses.fields(config_class):
        if field.metadata.get("added_in_place") and not hasattr(arguments, field.name):
            setattr(arguments, field.name, field.default)
    return call.proceed()
