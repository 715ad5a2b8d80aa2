"""Declares save-own-state-of-each-param."""

from ..engine import Patch, Probe, PullRequest, Wrap

_METHOD = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.sharded_param_state_fully_reshardable"

PATCH = Patch(
    id="save-own-state-of-each-param",
    summary="Save each parameter's own optimizer state in fully reshardable checkpoints",
    upstream=(PullRequest(5077, native_since="main"),),
    problem="With `--dist-ckpt-optim-fully-reshardable` and several buckets (`--overlap-grad-reduce`), the fp32 "
    "weights and the moments of all parameters behind the first padded bucket are saved shifted by its padding: they "
    "are their neighbours'. Those at the end are filled up with zeros. Model weights are right, so a resumed run "
    "starts well, and its first step writes the shifted fp32 weights into the model. Buckets are padded where their "
    "size is no multiple of the data-parallel size and 128.",
    adds=("A checkpoint has each parameter's own state. Its format is the same.",),
    numerics="Only what such a checkpoint has. One that was saved without the patch stays as it is: resume it with "
    "`--no-load-optim`.",
    is_repair=True,
    probe=Probe(_METHOD, contains="cumulative_padding_stripped"),
    edits=(Wrap(_METHOD, "megatron_overrides.resume.bucket_padding:save_own_state_of_each_param"),),
)
