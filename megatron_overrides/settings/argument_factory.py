"""Megatron makes a command-line flag of every field of TransformerConfig; some fields are no words to type."""

from __future__ import annotations

from megatron_overrides.call import Call


def exclude_callable_fields(call: Call) -> None:
    """Wraps ArgumentGroupFactory.__init__, whose callers list what to leave out: a Callable has no argparse type."""
    call.proceed()
    call.instance.exclude.add("mtp_grad_scale_func")
