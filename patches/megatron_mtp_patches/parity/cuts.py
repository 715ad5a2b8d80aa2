"""The cuts of a run's layout: each of its axes alone on two ranks, pairs of them on four."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from math import prod
from typing import NamedTuple

from .flags import Flag
from .small import SmallRun

# The flags that say how a run is cut; the reference has none of them.
LAYOUT = {
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
    "--expert-model-parallel-size",
    "--expert-tensor-parallel-size",
    "--sequence-parallel",
    "--cp-comm-type",
}
ONE_RANK = "one rank"  # the name of the layout without any of these
# How data-parallel ranks share gradients and states; one rank alone has Megatron's DDP and a whole optimizer.
SHARDING = {
    "--use-distributed-optimizer",
    "--overlap-grad-reduce",
    "--overlap-param-gather",
    "--use-megatron-fsdp",
    "--use-torch-fsdp2",
    "--data-parallel-sharding-strategy",
    "--outer-dp-sharding-strategy",
    "--ckpt-format",
    "--num-distributed-optimizer-instances",
    "--use-tp-pp-dp-mapping",
    "--ddp-average-in-collective",
    "--moe-shared-expert-overlap",
}
VIRTUAL = "PP2 VPP2"
# What Megatron accepts only with one kind of axis, or with virtual stages.
OF_AXIS = {
    "--distribute-saved-activations": "TP",
    "--overlap-moe-expert-parallel-comm": "EP",
    "--delay-wgrad-compute": "EP",
    "--defer-embedding-wgrad-compute": "PP",
    "--overlap-p2p-communication-warmup-flush": VIRTUAL,
    "--no-overlap-p2p-communication": VIRTUAL,
    "--overlap-param-gather-with-optimizer-step": VIRTUAL,
    "--no-align-grad-reduce": VIRTUAL,
    "--no-align-param-gather": VIRTUAL,
}


class Cut(NamedTuple):
    """A layout of ranks.

    Attributes:
        name: as "TP2 PP2".
        ranks: how many it has.
        flags: of the whole run.
    """

    name: str
    ranks: int
    flags: tuple[Flag, ...]


class Axis(NamedTuple):
    """A way to divide a run over two ranks.

    Attributes:
        name: of the cut that has this axis alone.
        kind: axes of one kind do not combine.
        flags: what it adds to the reference.
        ranks: by how much it multiplies the ranks.
    """

    name: str
    kind: str
    flags: tuple[Flag, ...]
    ranks: int = 2


def reference_flags(run: SmallRun) -> tuple[Flag, ...]:
    """The flags of the run on one rank, with the whole batch."""
    names = {flag.name for flag in run.flags}
    kept = {"--use-distributed-optimizer"} if "--use-precision-aware-optimizer" in names else set()  # which needs it
    return tuple(flag for flag in run.flags if flag.name not in (LAYOUT | SHARDING | OF_AXIS.keys()) - kept)


def sharded_reference(run: SmallRun) -> tuple[Flag, ...]:
    """The flags of the run on one rank with the optimizer and the checkpoints that its data-parallel ranks have."""
    sharding = (flag for flag in _sharding(run) if flag.name != "--num-distributed-optimizer-instances")
    return tuple(dict.fromkeys((*reference_flags(run), *sharding)))


def list_cuts(run: SmallRun, most_ranks: int) -> Iterator[Cut]:
    """Yield each axis of the layout alone, then pairs of axes, then the whole layout; each axis has a size of 2."""
    axes = list(_axes(run))
    for chosen in (*((axis,) for axis in axes), *combinations(axes, 2)):
        ranks = prod(axis.ranks for axis in chosen)
        if len({axis.kind for axis in chosen}) == len(chosen) and ranks <= most_ranks:
            yield _cut(run, chosen, ranks)
    whole = tuple({axis.kind: axis for axis in axes if axis.kind != "DP"}.values())
    apart, ranks = prod(axis.ranks for axis in whole), _ranks_with_experts_inside(whole)
    if ranks <= most_ranks and (len(whole) > 2 or ranks < apart):
        cut = _cut(run, whole, ranks)
        yield cut._replace(name=f"{cut.name} on {ranks} ranks") if ranks < apart else cut


def _cut(run: SmallRun, axes: tuple[Axis, ...], ranks: int) -> Cut:
    flags = [flag for axis in axes for flag in axis.flags]
    if not any(axis.kind == "DP" for axis in axes):
        flags += [flag for flag in _sharding(run) if flag.name != "--num-distributed-optimizer-instances"]
    axis_names = {one for axis in axes for one in (axis.kind, axis.name)}
    flags += [flag for flag in run.flags if OF_AXIS.get(flag.name) in axis_names]
    name = " ".join(axis.name for axis in axes)
    return Cut(name, ranks, (*reference_flags(run), *dict.fromkeys(flags)))


def _sharding(run: SmallRun) -> tuple[Flag, ...]:
    return tuple(flag for flag in run.flags if flag.name in SHARDING)


def _ranks_with_experts_inside(axes: tuple[Axis, ...]) -> int:
    """How many ranks these axes need if expert parallelism divides the ranks that the others have."""
    sizes = {axis.kind: axis.ranks for axis in axes}
    dense = sizes.get("TP", 1) * sizes.get("CP", 1)
    flags = {flag for axis in axes for flag in axis.flags}
    expert_tensor = 1 if Flag("--expert-tensor-parallel-size", ("1",)) in flags else sizes.get("TP", 1)
    return sizes.get("PP", 1) * max(dense, sizes.get("EP", 1) * expert_tensor)


def _axes(run: SmallRun) -> Iterator[Axis]:
    """Yield the axes of the user's layout."""
    settings, sharding = run.settings, _sharding(run)
    experts = settings.num_experts
    if settings.tensor_model_parallel_size > 1:
        flags = [Flag("--tensor-model-parallel-size", ("2",))]
        if settings.sequence_parallel:
            flags.append(Flag("--sequence-parallel"))
        if experts and settings.expert_tensor_parallel_size == 1:
            flags.append(Flag("--expert-tensor-parallel-size", ("1",)))
        yield Axis("TP2 with SP" if settings.sequence_parallel else "TP2", "TP", tuple(flags))
    if settings.context_parallel_size > 1:
        kinds = settings.cp_comm_type or ["p2p"]
        for kind in dict.fromkeys("p2p" if "+" in one else one for one in kinds):
            flags = [Flag("--context-parallel-size", ("2",)), Flag("--cp-comm-type", (kind,))]
            yield Axis(f"CP2 by {kind}", "CP", tuple(flags))
    if experts and settings.expert_model_parallel_size > 1:
        yield Axis("EP2", "EP", (Flag("--expert-model-parallel-size", ("2",)), *sharding))
    if settings.pipeline_model_parallel_size > 1:
        flags = [Flag("--pipeline-model-parallel-size", ("2",))]
        yield Axis("PP2", "PP", tuple(flags))
        if settings.num_layers_per_virtual_pipeline_stage or settings.num_virtual_stages_per_pipeline_rank:
            flags.append(Flag("--num-virtual-stages-per-pipeline-rank", ("2",)))
            yield Axis(VIRTUAL, "PP", tuple(flags))
    instances = settings.num_distributed_optimizer_instances
    if instances > 1:
        name = "--num-distributed-optimizer-instances"
        once = tuple(Flag(name, ("1",)) if flag.name == name else flag for flag in sharding)
        twice = tuple(Flag(name, ("2",)) if flag.name == name else flag for flag in sharding)
        yield Axis("DP2", "DP", once)
        yield Axis("DP4 in two instances", "DP", twice, ranks=4)
    else:
        yield Axis("DP2", "DP", sharding)
