"""Pipeline parallelism and the schedules of a step."""

from __future__ import annotations

from typing import Any

from ..defects.conditions import expert_parallel, is_layer_wise, pipeline_parallel
from ..defects.declare import Defect, Diff, Sign


def _frees_what_it_sends(run: Any) -> bool:
    """True if interleaved stages send asynchronously and free what they sent."""
    is_overlapped = run.virtual_pipeline_model_parallel_size and run.overlap_p2p_comm
    return bool(is_overlapped and run.deallocate_pipeline_outputs is not False)  # no argument: Megatron sets it


DEFECTS = (
    Defect(
        id="ML-4047",
        effect="A pipeline stage frees its output while it is still sending it, so the next stage may compute on other "
        "data: wrong losses and gradients, up to NaN",
        severity=5,
        signs=Sign(
            "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving",
            has="deallocate_output_tensor(output_tensor, config.deallocate_pipeline_outputs)",
            lacks="if send_next_wait_handle is not None and config.deallocate_pipeline_outputs:",
        ),
        affects=_frees_what_it_sends,
        when="--num-virtual-stages-per-pipeline-rank (or another interleaved layout) without "
        "--no-overlap-p2p-communication",
        only_if="PyTorch gives the memory of a tensor back while it is being sent (a race: with NCCL it depends on "
        "PyTorch's version and on TORCH_NCCL_AVOID_RECORD_STREAMS)",
        instead="--no-overlap-p2p-communication with more than two pipeline stages; with two, train without virtual "
        "stages",
        state="fixed in 0.18.0",
        evidence="reproduced",
        patch="keep-outputs-until-sent",
        diff=Diff(
            "megatron.core.pipeline_parallel.p2p_communication:_p2p_ops",
            """
            if tensor_send_next is not None:  # an alias keeps the memory when the schedule frees the output
                tensor_send_next = tensor_send_next.detach()
            """,
        ),
        seen_by="finite",
        second_reading="sources of 0.16.1 to 0.18.2; its program on 0.16.1 to 0.19.2; doctor with and without "
        "interleaved stages",
    ),
    Defect(
        "ML-6616",
        "Pipeline stages order the optimizers of dense weights and of experts differently, so ranks wait for each "
        "other in different collectives when the gradient norm is measured",
        kind="hang",
        severity=3,
        signs=Sign(
            "megatron.core.optimizer:_get_param_groups",
            has="sorted(params_key, key=lambda x: (x[0] is not None, x[0]))",
        ),
        # up to 0.17 Muon's optimizers are made in an order of their own
        fixed_by=Sign(
            "megatron.core.optimizer.muon:get_megatron_muon_optimizer", has="config.use_distributed_optimizer"
        ),
        affects=lambda run: (
            run.optimizer in ("muon", "adaptive_muon", "soap", "lion")
            and not is_layer_wise(run)
            and run.num_experts
            and expert_parallel(run) > 1
            and pipeline_parallel(run) > 1
        ),
        when="--optimizer muon, adaptive_muon, soap or lion without --use-distributed-optimizer, with --num-experts, "
        "--expert-model-parallel-size > 1 and --pipeline-model-parallel-size > 1",
        more_links=("NVIDIA/Megatron-LM#1515",),
        state="open",
        evidence="reproduced",
        only_if="a pipeline stage meets experts before dense weights with the same settings, as where these are frozen",
        patch="order-param-groups-alike",
        diff=Diff(
            "megatron.core.optimizer:_get_param_groups",
            "(x[0] is not None, x[0], x[1])",
            "instead of",
            "(x[0] is not None, x[0])",
        ),
        second_reading="optimizers of all releases, with the layer-wise one of 0.18.2 and 0.19.0; the threads of #6616 "
        "and #1515; doctor with experts and stages and with each optimizer; its program",
    ),
)
