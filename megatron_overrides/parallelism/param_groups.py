"""The wrapper that puts the parameter groups of an optimizer into the same order on all ranks."""

from __future__ import annotations

import itertools
import operator
from typing import Any

from megatron_overrides.call import Call


def order_groups_alike(call: Call) -> list[dict[str, Any]]:
    """Wraps _get_param_groups, which sorts groups by their overrides, and leaves others as this rank has met them.

    NVIDIA/Megatron-LM#6616: of two groups with the same overrides, that of dense parameters comes before that of
    experts, on all ranks.
    """
    not_overrides = ("params", "is_expert_parallel")
    alike = itertools.groupby(
        call.proceed(), lambda group: {name: group[name] for name in group if name not in not_overrides}
    )
    return [group for _, groups in alike for group in sorted(groups, key=operator.itemgetter("is_expert_parallel"))]
