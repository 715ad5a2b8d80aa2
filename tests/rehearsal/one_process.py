"""Runs inside a rehearsal, see test_replayed.py."""

import copy
import os
import time

import pytest
import torch
from megatron_mtp_patches import rehearsal

SPELLINGS = ["cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 0), 0]


@pytest.mark.parametrize("device", SPELLINGS, ids=str)
def test_factories_make_cpu_tensors(device):
    made = [
        torch.tensor([1.0], device=device),
        torch.as_tensor([1.0], device=device),
        torch.empty(2, device=device, pin_memory=False),
        torch.arange(3, device=device),
        torch.zeros_like(torch.ones(2), device=device),
        torch.randint(0, 3, (2,), device=device),
        torch.nn.Linear(2, 2, device=device).weight,
        torch.ones(1).to(device=device, dtype=torch.bfloat16),
    ]
    assert {tensor.device.type for tensor in made} == {"cpu"}


def test_the_dispatcher_serves_callers_that_no_wrapper_sees():
    cuda = torch.device("cuda", 0)
    assert torch.ops.aten.zeros.default([2], device=cuda).device.type == "cpu"
    assert torch.ops.aten.empty_strided.default([2], [1], device=cuda).device.type == "cpu"
    assert torch.ones(1).new_zeros(2, device=cuda).device.type == "cpu"


def test_moving_to_the_gpu_is_the_identity():
    tensor = torch.ones(3)
    assert all(moved is tensor for moved in (tensor.cuda(), tensor.to("cuda"), tensor.to(0), tensor.pin_memory()))


def test_other_devices_stay():
    assert torch.empty(2, device="meta").device.type == "meta"
    assert torch.ones(2).to("meta").device.type == "meta"
    assert not torch.empty(2, device="meta").is_cuda


def test_tensors_answer_as_on_a_gpu():
    tensor = torch.ones(2, dtype=torch.bfloat16)
    assert tensor.is_cuda
    assert tensor.type() == "torch.cuda.BFloat16Tensor"
    assert tensor.type("torch.cuda.FloatTensor").dtype == torch.float32
    assert tensor.type(torch.float64).dtype == torch.float64
    assert torch.nn.Linear(2, 2).cuda().weight.is_cuda


def test_a_checkpoint_from_a_gpu_loads(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:1")
    torch.save({"weight": torch.arange(3)}, tmp_path / "gpu.pt")
    assert torch.load(tmp_path / "gpu.pt")["weight"].tolist() == [0, 1, 2]


def test_one_imaginary_device():
    assert torch.cuda.is_available() and torch.cuda.is_initialized()
    assert torch.cuda.device_count() == 1
    torch.cuda.set_device("cuda:0")
    torch.cuda.set_device(torch.device("cuda", 0))
    assert torch.cuda.current_device() == 0 and type(torch.cuda.current_device()) is int
    assert torch.cuda.get_device_capability() == (8, 0)
    assert torch.cuda.get_device_properties(0).total_memory == torch.cuda.mem_get_info()[1]
    with torch.cuda.device(0):
        torch.cuda.synchronize()


def test_the_real_gpu_is_hidden():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert not torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() is None


def test_memory_figures_are_zero():
    assert torch.cuda.memory_allocated() == torch.cuda.memory.max_memory_reserved() == 0
    assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == 0


def test_streams_run_in_program_order():
    outer, side = torch.cuda.current_stream(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() is side
        with torch.cuda.stream(None):
            assert torch.cuda.current_stream() is side
    assert torch.cuda.current_stream() is outer
    side.wait_stream(outer)
    outer.wait_event(side.record_event())
    torch.ones(1).record_stream(side)


def test_events_measure_wall_clock_time():
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    time.sleep(0.02)
    end.record()
    assert 20 <= start.elapsed_time(end) < 2000


@pytest.mark.parametrize("name", ["CUDAGraph", "graph", "MemPool", "use_mem_pool", "graph_pool_handle"])
def test_what_needs_a_gpu_is_refused_by_name(name):
    with pytest.raises(NotImplementedError, match=rf"torch\.cuda\.{name}.*rehearsal"):
        getattr(torch.cuda, name)()


def test_recording_memory_is_refused_by_name():
    with pytest.raises(NotImplementedError, match="_record_memory_history"):
        torch.cuda.memory._record_memory_history()


def test_drawing_on_the_gpu_leaves_the_cpu_stream_alone():
    torch.manual_seed(1)
    cpu, gpu = torch.get_rng_state(), torch.cuda.get_rng_state()
    first = torch.rand(3, device="cuda")
    assert torch.equal(torch.get_rng_state(), cpu)
    assert not torch.equal(torch.cuda.get_rng_state(), gpu)
    torch.cuda.set_rng_state(gpu)
    assert torch.equal(torch.rand(3, device="cuda"), first)


def test_seeding():
    torch.manual_seed(5)
    assert torch.initial_seed() == torch.cuda.initial_seed() == 5
    torch.cuda.manual_seed(6)
    assert (torch.initial_seed(), torch.cuda.initial_seed()) == (5, 6)
    assert torch.cuda.default_generators[torch.cuda.current_device()].initial_seed() == 6
    assert torch.rand(1, generator=torch.Generator(device="cuda").manual_seed(1)).device.type == "cpu"


def test_the_data_loader_draws_on_the_cpu():
    torch.manual_seed(1)
    cpu, gpu = torch.get_rng_state(), torch.cuda.get_rng_state()
    loader = torch.utils.data.DataLoader([1, 2], pin_memory=True)
    assert [int(batch) for batch in loader] == [1, 2]
    assert torch.equal(torch.cuda.get_rng_state(), gpu)
    assert not torch.equal(torch.get_rng_state(), cpu)


def test_nothing_is_compiled():
    def double(x):
        return 2 * x

    assert torch.compile(double) is double
    assert torch.compile(mode="max-autotune")(double) is double
    assert torch._dynamo.config.disable


def test_no_kernels_are_built(tmp_path, monkeypatch):
    """0.16.1's checkout builds them as it starts, with nvcc."""
    folder = tmp_path / "megatron" / "legacy"
    folder.mkdir(parents=True)
    (folder / "fused_kernels.py").write_text("def load(args):\n    raise FileNotFoundError('nvcc')\n")
    monkeypatch.syspath_prepend(tmp_path)
    from megatron.legacy import fused_kernels

    fused_kernels.load(None)


def test_a_second_install_does_nothing():
    before = torch.Tensor.to, torch.zeros, torch.distributed.all_gather
    rehearsal.install()
    assert rehearsal.installed()
    assert (torch.Tensor.to, torch.zeros, torch.distributed.all_gather) == before


@pytest.fixture(scope="module")
def one_rank():
    parallel_state = pytest.importorskip("megatron.core.parallel_state")
    torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", 0))
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def test_megatron_keeps_its_two_random_streams_apart(one_rank, recwarn):
    from megatron.core import tensor_parallel

    tensor_parallel.model_parallel_cuda_manual_seed(7)
    with tensor_parallel.get_cuda_rng_tracker().fork():
        torch.rand(3, device="cuda")
    assert not [warning for warning in recwarn if "RNG state changed" in str(warning.message)]


def _distributed_optimizer():
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(3)
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).bfloat16().cuda()
    settings = DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = DistributedDataParallel(config, settings, model)
    kind = OptimizerConfig(optimizer="adam", lr=0.1, bf16=True, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(kind, [model])
    return model, optimizer, optimizer.chained_optimizers[0]


def _train(model, optimizer, steps):
    for _ in range(steps):
        model.zero_grad_buffer()
        model(torch.ones(2, 8, dtype=torch.bfloat16)).float().square().sum().backward()
        model.finish_grad_sync()
        optimizer.step()


def _steps(optimizer):
    return [state["step"] for state in optimizer.optimizer.state.values()]


def test_the_distributed_optimizer_resumes_with_torch_adam(one_rank):
    model, chain, trained = _distributed_optimizer()
    _train(model, chain, 3)
    saved = copy.deepcopy(trained.state_dict())
    model, chain, resumed = _distributed_optimizer()
    resumed.state_dict()  # what a resume asks for first
    assert {float(step) for step in _steps(resumed)} == {0.0}
    resumed.load_state_dict(saved)
    parameter = next(iter(resumed.model_param_group_index_map))
    shapes = resumed._get_main_param_and_optimizer_states(parameter)
    resumed._set_main_param_and_optimizer_states(
        parameter, {name: torch.zeros_like(value) for name, value in shapes.items() if name != "step"}
    )
    assert {float(step) for step in _steps(resumed)} == {3.0}
    _train(model, chain, 1)
    assert {float(step) for step in _steps(resumed)} == {4.0}
