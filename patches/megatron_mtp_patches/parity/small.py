"""Makes a run small enough for a CPU, and leaves every flag that is not a size as it is."""

from __future__ import annotations

import argparse
import re
from typing import Any, NamedTuple

from ..doctor.findings import RunSettings
from ..engine import UsageError
from .flags import Flag, read_settings, split
from .left_out import UNREAD, reason_to_leave_out

VOCABULARY = 96  # padded; divisible by 8 times the ranks of any cut
LENGTH = 32  # tokens of a sample
BATCH = 4  # samples of a step
# An update that is nearly linear in the gradient, and nothing random.
_UPDATES = (
    "--weight-decay 0.01 --adam-eps 1.0 --adam-beta1 0.5 --adam-beta2 0.9 --attention-dropout 0 --hidden-dropout 0"
)
# Two steps of few samples, and no files.
_TRAINER = f"""
    --train-iters 2 --micro-batch-size 1 --global-batch-size {BATCH} --lr-decay-style constant --log-interval 1
    --eval-interval 1000 --eval-iters 0 --mock-data --split 100,0,0 --tokenizer-type NullTokenizer
    --vocab-size {VOCABULARY - 1} --make-vocab-size-divisible-by 8 --no-check-for-nan-in-loss-and-grad --num-workers 0
"""


class SmallRun(NamedTuple):
    """A run that was made small.

    Attributes:
        flags: those of the user that are left, with those that were changed or added.
        left_out: the user's flags that it does not have, by the reason.
        changed: the flags with another value than the user's, or that he did not give.
        settings: those of the user, as Megatron's parser reads them, without files and what changes no number; or those
            of a framework, by the same names.
        dtype: "fp32" or "bf16".
    """

    flags: list[Flag]
    left_out: dict[str, list[Flag]]
    changed: list[Flag]
    settings: argparse.Namespace | RunSettings
    dtype: str


def shrink(words: list[str], dtype: str) -> SmallRun:
    """Make the run of a command line small. `dtype` is "fp32" or "bf16"."""
    left_out: dict[str, list[Flag]] = {}
    for flag in split(words):
        left_out.setdefault(reason_to_leave_out(flag.name.removeprefix("--"), dtype), []).append(flag)
    settings = read_settings(flag for reason, flags in left_out.items() if reason not in UNREAD for flag in flags)
    kept = left_out.pop("", [])
    changed = [*small_values(settings), *split(_TRAINER.split())]
    if dtype == "bf16" and not settings.bf16:
        changed.append(Flag("--bf16"))
    names = {flag.name for flag in changed}
    dropped = {why: [flag for flag in flags if flag.name not in names] for why, flags in left_out.items()}
    left_out = {why: flags for why, flags in dropped.items() if flags}
    return SmallRun([flag for flag in kept if flag.name not in names] + changed, left_out, changed, settings, dtype)


def small_values(settings: Any) -> list[Flag]:
    """The flags of small sizes and of updates that a run with these settings has, whoever trains it."""
    return split((_describe_sizes(settings) + _describe_rates(settings) + _UPDATES).split())


def _describe_sizes(settings: Any) -> str:
    """The flags of small sizes, for each size that the run has."""
    text = f"--hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --seq-length {LENGTH} "
    text += f"--max-position-embeddings {LENGTH} "
    if pattern := _shorten_pattern(settings):
        is_old = not getattr(settings, "hybrid_layer_pattern", None)
        text += f"--hybrid-override-pattern {pattern} --num-layers {len(pattern)} " if is_old else ""
        text += "" if is_old else f"--hybrid-layer-pattern {pattern} "
    else:
        text += f"--num-layers {_count_layers(settings)} "
    if settings.group_query_attention:
        text += f"--num-query-groups {1 if settings.num_query_groups == 1 else 2} "
    if settings.multi_latent_attention:  # Megatron's fused rotation is a Triton kernel, which takes minutes here
        text += "--kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 8 --no-rope-fusion "
    text += _sizes_that_it_has(settings, kv_channels=16, q_lora_rank=16, moe_latent_size=16)
    if pattern or getattr(settings, "experimental_attention_variant", None):
        text += _sizes_that_it_has(settings, linear_key_head_dim=8, linear_value_head_dim=8)
        text += _sizes_that_it_has(settings, linear_num_key_heads=2, linear_num_value_heads=4)
        text += _sizes_that_it_has(settings, mamba_state_dim=16, mamba_head_dim=16, mamba_num_groups=2)
        text += _sizes_that_it_has(settings, mamba_num_heads=4)
    text += _sizes_that_it_has(settings, dsa_indexer_n_heads=4, dsa_indexer_head_dim=16, dsa_indexer_topk=8)
    if getattr(settings.attention_backend, "name", "") == "flash":  # whose kernels have no stand-in
        text += "--attention-backend fused "
    if getattr(settings, "window_size", None):
        text += "--window-size (8,0) "
    return text + (_describe_experts(settings) if settings.num_experts else "")


def _describe_rates(settings: Any) -> str:
    """The learning rates that the run has.

    That of Muon and SOAP, whose updates are as large whatever the gradient is, leaves the second step steady in bf16.
    """
    rate = 0.02 if "muon" in settings.optimizer or settings.optimizer == "soap" else 0.3
    text = f"--lr {rate} --min-lr {rate} "
    for kind in ("decoupled", "mtp"):  # their smallest rates would be those of the run
        if getattr(settings, f"{kind}_lr", None) is not None:
            text += f"--{kind}-lr {rate / 4} --{kind}-min-lr {rate / 4} "
    return text


def _sizes_that_it_has(settings: Any, **sizes: int) -> str:
    present = {name: size for name, size in sizes.items() if getattr(settings, name, None)}
    return "".join(f"--{name.replace('_', '-')} {size} " for name, size in present.items())


def _describe_experts(settings: Any) -> str:
    """Four experts; eight where a token goes to more than two, or where they are in groups, of which there are two."""
    is_grouped, chosen = bool(settings.moe_router_num_groups), settings.moe_router_topk
    text = f"--num-experts {8 if is_grouped or chosen > 2 else 4} --moe-ffn-hidden-size 32 "
    text += f"--moe-router-topk {min(chosen, 2 if is_grouped else 4)} "
    text += "--moe-router-num-groups 2 --moe-router-group-topk 1 " if is_grouped else ""
    text += _sizes_that_it_has(settings, moe_shared_expert_intermediate_size=32)
    text += "--moe-token-dispatcher-type alltoall " if settings.moe_token_dispatcher_type == "flex" else ""  # of DeepEP
    if isinstance(settings.moe_layer_freq, list):
        dense, layers = int(0 in settings.moe_layer_freq), _count_layers(settings)
        text += f"--moe-layer-freq ([0]*{dense}+[1]*{layers - dense}) "
    return text


def _count_layers(settings: Any) -> int:
    """Two; four where two pipeline stages have two virtual ones each, or layers are of several kinds."""
    has_kinds = isinstance(settings.moe_layer_freq, list) or getattr(settings, "linear_attention_freq", None)
    is_virtual = settings.num_layers_per_virtual_pipeline_stage or settings.num_virtual_stages_per_pipeline_rank
    return 4 if has_kinds or is_virtual else 2


def _shorten_pattern(settings: Any) -> str:
    """Two layers of each kind, in the order in which the kinds appear; '' where the run is no hybrid."""
    pattern = getattr(settings, "hybrid_layer_pattern", None) or getattr(settings, "hybrid_override_pattern", None)
    if not pattern:
        return ""
    main, slash, heads = pattern.partition("/")
    kinds = "".join(dict.fromkeys(re.sub(r"[|]", "", main)))
    if not kinds:
        raise UsageError(f"--hybrid-layer-pattern {pattern!r} names no layer")
    return kinds * 2 + slash + heads
