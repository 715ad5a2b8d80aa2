"""Megatron's own code in a rehearsal: random streams, layer specs, and resuming with the distributed optimizer."""

import copy

import pytest
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron_mtp_patches import rehearsal

pytestmark = pytest.mark.forked("megatron")


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", 0))
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def test_megatron_does_not_warn_about_random_numbers_of_the_gpu(recwarn):
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    with tensor_parallel.get_cuda_rng_tracker().fork():
        torch.rand(3, device="cuda")
    assert not [warning for warning in recwarn if "RNG state changed" in str(warning.message)]


def make_distributed_optimizer():
    torch.manual_seed(3)
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).bfloat16().cuda()
    settings = DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = DistributedDataParallel(config, settings, model)
    kind = OptimizerConfig(optimizer="adam", lr=0.1, bf16=True, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(kind, [model])
    return model, optimizer, optimizer.chained_optimizers[0]


def train(model, optimizer, steps):
    for _ in range(steps):
        model.zero_grad_buffer()
        model(torch.ones(2, 8, dtype=torch.bfloat16)).float().square().sum().backward()
        model.finish_grad_sync()
        optimizer.step()


def steps_of(optimizer):
    return [state["step"] for state in optimizer.optimizer.state.values()]


@pytest.mark.skipif(rehearsal.with_transformer_engine(), reason="TransformerEngine's layers are there")
def test_layer_specs_that_ask_for_transformer_engine_without_it_are_local():
    """Megatron-Bridge asks for them for the MTP block, whatever layers the model has."""
    config = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=1, mtp_num_layers=1)
    spec = gpt_layer_specs.get_gpt_layer_local_spec()
    asked, local = (gpt_layer_specs.get_gpt_mtp_block_spec(config, spec, wish) for wish in (True, False))
    assert asked == local and asked.layer_specs
    (first, *_) = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=True).layer_specs
    assert first.submodules.self_attention.submodules.core_attention is DotProductAttention


@pytest.mark.skipif(rehearsal.with_transformer_engine(), reason="Adam is TransformerEngine's FusedAdam here")
def test_the_distributed_optimizer_resumes_with_torch_adam():
    model, chain, trained = make_distributed_optimizer()
    train(model, chain, 3)
    saved = copy.deepcopy(trained.state_dict())
    model, chain, resumed = make_distributed_optimizer()
    resumed.state_dict()  # a resume calls this first
    assert {float(step) for step in steps_of(resumed)} == {0.0}
    resumed.load_state_dict(saved)
    parameter = next(iter(resumed.model_param_group_index_map))
    shapes = resumed._get_main_param_and_optimizer_states(parameter)
    resumed._set_main_param_and_optimizer_states(
        parameter, {name: torch.zeros_like(value) for name, value in shapes.items() if name != "step"}
    )
    assert {float(step) for step in steps_of(resumed)} == {3.0}
    train(model, chain, 1)
    assert {float(step) for step in steps_of(resumed)} == {4.0}


def test_the_results_of_a_checkpoint_s_writers_are_collected_in_a_fork(monkeypatch):
    from megatron.core.dist_checkpointing.strategies import filesystem_async as module

    monkeypatch.setattr(module, "_results_queue", None)
    get_queue = getattr(module, "get_write_results_queue", None) or module._get_write_results_queue
    queue = get_queue()
    assert get_queue() is queue and type(queue._manager._process).__name__ == "ForkProcess"
    queue.put(("written", torch.Size([2])))
    assert queue.get(timeout=60) == ("written", torch.Size([2]))
    queue._manager.shutdown()
