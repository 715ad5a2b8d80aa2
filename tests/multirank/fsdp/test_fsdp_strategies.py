"""`no_shard` and `optim` of older Megatron-FSDP do what `doctor` says of them."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron_mtp_patches import diagnose

from tests.trainings.fsdp import Reference, backward

pytestmark = [
    pytest.mark.forked("patched"),
    pytest.mark.guards("reduce-fsdp-gradients-of-replicas"),
    pytest.mark.ranks(2),
]

pytest.importorskip("einops", reason="Megatron-FSDP needs einops")
param_and_grad_buffer = pytest.importorskip("megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer")


@pytest.mark.parametrize("reduce, gather", [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
def test_what_doctor_says_of_the_strategy_happens(make_fsdp, strategy, reduce, gather):
    run = SimpleNamespace(
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy=strategy,
        overlap_grad_reduce=reduce,
        overlap_param_gather=gather,
    )
    defects = [finding.text for finding in diagnose(run) if not finding.is_removed]
    reference = Reference(torch.float32)
    ((_, right, _),) = reference.train([0])
    settings = {"use_precision_aware_optimizer": False, "log_num_zeros_in_grad": False}
    training = make_fsdp(strategy, torch.float32, overlap=reduce, gather=gather, **settings)
    backward(training, 0)
    if any("AttributeError" in text for text in defects):
        with pytest.raises(AttributeError, match="fetch_bucket"):
            training.optimizer.step()
        return
    ratio = float(training.optimizer.step()[1]) / right
    assert (ratio == pytest.approx(1.0, rel=1e-5)) is not bool(defects)


@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
def test_a_layer_of_megatron_s_own_fuses_no_gradient(make_fsdp, strategy):
    net = torch.nn.Sequential(torch.nn.Linear(5, 1))
    net[0].gradient_accumulation_fusion = True
    net.config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    make_fsdp(strategy, torch.float32, net=net, use_precision_aware_optimizer=False)
    assert not net[0].gradient_accumulation_fusion


def test_gradients_of_replicas_are_checked_for_nan(parallel):
    """Megatron's own function does, where it reduces them."""
    parallel()
    if not hasattr(param_and_grad_buffer, "_check_nan_in_grad"):
        pytest.skip("this Megatron-FSDP checks no gradient")
    group = torch.distributed.group.WORLD
    gradients = SimpleNamespace(
        data=torch.full((4,), torch.nan),
        gradient_scaling_factor=1.0,
        data_parallel_group=group,
        is_data_distributed=False,
    )
    buffer = SimpleNamespace(
        parameter_groups=[SimpleNamespace(main_grad_buffer=gradients)],
        ddp_config=SimpleNamespace(
            check_for_nan_in_grad=True,
            outer_dp_sharding_strategy="no_shard",
            average_in_collective=False,
            gradient_reduce_div_fusion=False,
        ),
    )
    with pytest.raises(ValueError, match="NaN or Inf"):
        param_and_grad_buffer.ParamAndGradBuffer.all_reduce_gradients(buffer)
