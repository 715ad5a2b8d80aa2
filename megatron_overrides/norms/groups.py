"""Norm groups: parameters whose gradients have a separate norm, by which they are clipped.

NVIDIA/Megatron-LM#4116 has one such group, "mtp", and the names in capitals here: a parameter tagged
`grad_norm_group = "mtp"` is left out of the main norm. `--grad-norm-group NAME=REGEX:LIMIT` adds more groups
(NVIDIA/Megatron-LM#5431, NVIDIA-NeMo/RL#3698). The main group, of all untagged parameters, is None.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from megatron_overrides.settings.checks import spell

MTP_GRAD_NORM_GROUP = "mtp"
MTP_GROUP_SETTINGS = ("mtp_clip_grad", "mtp_grad_norm_skip_threshold")
GRAD_NORM_GROUP_ATTR = "grad_norm_group"
SEPARATE_GRAD_NORM_GROUPS = (MTP_GRAD_NORM_GROUP,)

Group: TypeAlias = "str | None"


class NamedGroup(NamedTuple):
    """A group of --grad-norm-group NAME=REGEX:LIMIT; LIMIT 0 measures the group and does not clip it."""

    name: str
    pattern: re.Pattern[str]
    limit: float


@functools.cache
def parse_group(text: str) -> NamedGroup:
    """Read NAME=REGEX:LIMIT, split at the first `=` and the last `:`.

    Raises:
        ValueError: with the part that cannot be read and what to write instead.
    """
    name, is_assigned, rest = text.partition("=")
    regex, is_limited, limit = rest.rpartition(":")
    if not (name and is_assigned and regex and is_limited):
        raise ValueError(f"{spell('grad_norm_group')} {text!r}: write NAME=REGEX:LIMIT, as in router=mlp\\.router:1.0")
    if name in SEPARATE_GRAD_NORM_GROUPS:
        raise ValueError(
            f"{spell('grad_norm_group')} {text!r}: the name {name!r} is taken by the MTP heads; choose another one"
        )
    try:
        pattern = re.compile(regex)
    except re.error as error:
        raise ValueError(
            f"{spell('grad_norm_group')} {text!r}: {regex!r} is not a valid regular expression ({error})"
        ) from error
    try:
        norm = float(limit)
    except ValueError:
        norm = -1.0
    if not norm >= 0.0:
        raise ValueError(
            f"{spell('grad_norm_group')} {text!r}: the limit {limit!r} must be a number, 0 (no clipping) or larger"
        )
    return NamedGroup(name, pattern, norm)


def named_groups(config: Any) -> list[NamedGroup]:
    """The groups that `config` (an OptimizerConfig or Megatron's args) adds to upstream's.

    Raises:
        ValueError: a group that cannot be read, or one name for two groups.
    """
    texts = getattr(config, "grad_norm_group", None) or ()
    if isinstance(texts, str) or not isinstance(texts, Sequence):  # an OmegaConf list is one
        raise ValueError(f"{spell('grad_norm_group')} {texts!r} must be a list of NAME=REGEX:LIMIT")
    groups = [parse_group(text) for text in texts]
    names = [group.name for group in groups]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{spell('grad_norm_group')}: the name {name!r} is given to {names.count(name)} groups")
    return groups


def separate_groups(config: Any) -> tuple[str, ...]:
    """The names of all groups but the main one, in the order in which every rank reduces them.

    Upstream's tuple is read where Megatron has it, because other libraries add to it (NeMo-RL: "draft").
    """
    from megatron.core.optimizer import optimizer as upstream

    groups = tuple(getattr(upstream, "SEPARATE_GRAD_NORM_GROUPS", SEPARATE_GRAD_NORM_GROUPS))
    if not getattr(config, "grad_norm_group", None):
        return groups
    return (*groups, *(group.name for group in named_groups(config) if group.name not in groups))


def clip_limit(config: Any, group: Group) -> float:
    """The norm to which the gradients of `group` are clipped; 0 for no clipping."""
    if group == MTP_GRAD_NORM_GROUP:
        limit = getattr(config, "mtp_clip_grad", None)
        return config.clip_grad if limit is None else limit
    for named in named_groups(config) if group is not None else ():
        if named.name == group:
            return named.limit
    return config.clip_grad


def tagged_group(param: Any) -> Group:
    """The group that `param` is tagged with; Megatron-FSDP's shards refer to the parameter that carries the tag."""
    group = getattr(param, GRAD_NORM_GROUP_ATTR, None)
    if group is None:
        original = getattr(param, "orig_param", None)
        if original is not None:  # it is asked of every parameter in every step, and most have neither
            group = getattr(original, GRAD_NORM_GROUP_ATTR, None)
    return group


def measured_group(param: Any, groups: Collection[str]) -> Group:
    """The same for a parameter of an optimizer that measures these `groups`.

    Raises:
        ValueError: the group is not among them, so the gradient of `param` would enter no norm.
    """
    group = tagged_group(param)
    if group is not None:
        check_group(group, groups)
    return group


def check_group(group: str, groups: Collection[str]) -> None:
    if group not in groups:
        raise ValueError(f"Unknown grad_norm_group {group!r}; known: {', '.join(groups)}")


def tag(param: Any, group: str) -> None:
    """Put `param` into `group`; `is_mtp_param` is the name in the original pull request of #4116."""
    setattr(param, GRAD_NORM_GROUP_ATTR, group)
    if group == MTP_GRAD_NORM_GROUP:
        param.is_mtp_param = True


def copy_optimizer_param_metadata(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Copy what the optimizer reads off a parameter to its shard or its main copy."""
    for name in ("allreduce", "shared", GRAD_NORM_GROUP_ATTR, "is_mtp_param"):
        if hasattr(source, name):
            setattr(destination, name, getattr(source, name))
