"""Megatron-FSDP under a precision-aware optimizer trains as plain PyTorch does, from one copy of the main weights."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_overrides.support.norm_groups import tag_of

pytestmark = [pytest.mark.forked("patched"), pytest.mark.ranks(2)]

pytest.importorskip("einops", reason="Megatron-FSDP needs einops")
pytest.importorskip("transformer_engine", reason="a precision-aware optimizer is TransformerEngine's FusedAdam")

STRATEGIES = ("optim", "optim_grads", "optim_grads_params")
LR, WEIGHT_DECAY, CLIP = 0.05, 0.1, 1.0
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
both_overlaps = pytest.mark.parametrize("overlap", [True, False])
both_dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(5, 9)
        self.down = torch.nn.Linear(9, 5)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def make_net(dtype):
    torch.manual_seed(0)
    return torch.nn.Sequential(Block(), Block(), torch.nn.Linear(5, 1)).to(dtype)


def batch_of(step, rank, dtype):
    """The first column is zero: so are its gradients in the first layer."""
    torch.manual_seed(100 * step + rank)
    x = torch.randn(6, 5)
    x[:, 0] = 0.0
    return x.to(dtype)


def loss_of(net, x):
    return (net(x) - x.sum(dim=-1, keepdim=True)).float().square().mean()


@pytest.fixture
def make(parallel):
    """make(strategy, dtype, **config): a model (or `net`) in Megatron-FSDP, and its optimizer."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    parallel()
    model_parallel_cuda_manual_seed(1)
    fp32_gradients = {"grad_reduce_in_fp32": True}
    if hasattr(DistributedDataParallelConfig, "megatron_fsdp_main_grads_dtype"):
        fp32_gradients = {"megatron_fsdp_main_grads_dtype": torch.float32}

    def make(
        strategy="optim_grads_params", dtype=torch.bfloat16, mark=lambda net: None, overlap=True, net=None, **settings
    ):
        if strategy == "optim" and hasattr(DistributedDataParallelConfig, "preserve_fp32_weights"):
            pytest.skip("0.16.1 adds each rank's own gradient to the reduced one under this strategy")
        bf16 = dtype == torch.bfloat16
        model = FullyShardedDataParallel(
            net.config if net else TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, bf16=bf16),
            DistributedDataParallelConfig(
                use_distributed_optimizer=True,
                use_megatron_fsdp=True,
                data_parallel_sharding_strategy=strategy,
                overlap_grad_reduce=overlap,
                overlap_param_gather=overlap,
                **fp32_gradients,
            ),
            net or make_net(dtype),
            fsdp_unit_modules=None if net else [Block],
        )
        mark(model.module.module)
        config = OptimizerConfig(
            optimizer="adam",
            lr=LR,
            weight_decay=WEIGHT_DECAY,
            bf16=bf16,
            use_distributed_optimizer=True,
            **{"use_precision_aware_optimizer": True, "clip_grad": CLIP, "log_num_zeros_in_grad": True, **settings},
        )
        return SimpleNamespace(model=model, optimizer=get_megatron_optimizer(config, [model]), dtype=dtype)

    return make


def backward(made, step):
    """The loss of this rank, with gradients where the optimizer finds them."""
    made.optimizer.zero_grad()
    if made.model.ddp_config.overlap_grad_reduce:
        with made.model.no_sync():
            pass  # as Megatron's schedules leave it before the last microbatch
    loss = loss_of(made.model, batch_of(step, dist.get_rank(), made.dtype))
    loss.backward()
    made.model.finish_grad_sync()
    return float(loss)


def train(made, steps):
    """[(loss of this rank, norm, zeros)] of each step."""
    seen = []
    for step in steps:
        loss = backward(made, step)
        updated, norm, zeros = made.optimizer.step()
        seen.append((loss, float(norm), int(zeros)) if updated else None)
    return seen


def whole(made, what=lambda param: param._local_tensor):
    """{name: every rank's elements in a row} of the main weights, or of what `what` takes from each."""
    parts = {}
    for name, param in made.model.module.param_and_grad_buffer.optimizer_named_parameters:
        ranks = [None] * dist.get_world_size()
        part = what(param)
        dist.all_gather_object(ranks, None if part is None else part.detach().float().flatten())
        parts[name] = torch.cat([torch.empty(0), *(part for part in ranks if part is not None)])
    return parts


def gradient(param):
    grad = getattr(param, "decoupled_grad", None)
    return grad if grad is None else grad._local_tensor


class Reference:
    """The same training in plain PyTorch: fp32 weights, gradients in the model's dtype, torch's AdamW."""

    def __init__(self, dtype):
        self.net = make_net(dtype)
        self.dtype = dtype
        self.weights = {name: param.detach().float().clone() for name, param in self.net.named_parameters()}
        self.adam = torch.optim.AdamW(self.weights.values(), lr=LR, weight_decay=WEIGHT_DECAY)

    def start_from(self, weights):
        with torch.no_grad():
            for name, param in self.net.named_parameters():
                self.weights[name].copy_(weights[name])
                param.copy_(weights[name])

    def gradients(self, step):
        """The loss of this rank; the mean of all ranks' gradients is left in the weights."""
        ranks = dist.get_world_size()
        losses = []
        for rank in range(ranks):
            self.net.zero_grad()
            loss = loss_of(self.net, batch_of(step, rank, self.dtype))
            loss.backward()
            losses.append(float(loss))
            for name, param in self.net.named_parameters():
                before = self.weights[name].grad if rank else 0.0
                self.weights[name].grad = before + param.grad.float() / ranks
        return losses[dist.get_rank()]

    def clip(self):
        grads = torch.cat([weight.grad.flatten() for weight in self.weights.values()])
        norm = float(grads.norm())
        for weight in self.weights.values():
            weight.grad *= min(1.0, CLIP / (norm + 1e-6))
        return norm, int((grads == 0).sum())

    def train(self, steps):
        seen = []
        for step in steps:
            loss = self.gradients(step)
            norm, zeros = self.clip()
            self.adam.step()
            for name, param in self.net.named_parameters():
                param.data.copy_(self.weights[name])
            seen.append((loss, norm, zeros))
        return seen


def about(steps):
    """The tolerance is CLOSE's, and for its reason."""
    return [(pytest.approx(loss, rel=1e-5), pytest.approx(norm, rel=1e-5), zeros) for loss, norm, zeros in steps]


def assert_same(found, right, **tolerance):
    found, right = ({name.removeprefix("module."): v for name, v in which.items()} for which in (found, right))
    assert found.keys() == right.keys()
    for name, value in right.items():
        torch.testing.assert_close(found[name], value.float().flatten(), **tolerance)


# The order in which gradients are summed and norms are taken differs: the last bits of fp32.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@every_strategy
@both_dtypes
@both_overlaps
def test_ten_steps_are_those_of_plain_pytorch(make, from_all_ranks, strategy, dtype, overlap):
    check_ten_steps(make, from_all_ranks, strategy, dtype, overlap)


@pytest.mark.ranks(4)
@both_dtypes
@both_overlaps
def test_ten_steps_on_four_ranks_are_those_of_plain_pytorch(make, from_all_ranks, dtype, overlap):
    """More ranks shard further, in the same way under each strategy."""
    check_ten_steps(make, from_all_ranks, "optim_grads_params", dtype, overlap)


def check_ten_steps(make, from_all_ranks, strategy, dtype, overlap):
    made, reference = make(strategy, dtype, overlap=overlap), Reference(dtype)
    right = reference.train(range(10))
    first, last = (sum(from_all_ranks(right[step][0])) for step in (0, -1))
    assert last < first / 2 and all(norm > CLIP for _, norm, _ in right[:3])  # it learns, and is clipped
    found = train(made, range(10))
    assert found == about(right)
    assert_same(whole(made), reference.weights, **CLOSE)


def test_without_the_patch_nothing_trains(make, unpatched):
    """From 0.18 on so it is where the model is built without megatron_fsdp_use_decoupled_grad, as here."""
    with unpatched():
        made = make()
        before = whole(made)
        assert len(train(made, range(3))) == 3
        assert_same(whole(made), before, rtol=0, atol=0)
        backward(made, 3)
        assert not any(len(elements) for elements in whole(made, gradient).values())


@every_strategy
def test_gradients_are_clipped_by_the_norm_of_all_ranks(make, strategy, monkeypatch):
    made, reference = make(strategy), Reference(torch.bfloat16)
    reference.gradients(0)
    norm, _ = reference.clip()
    backward(made, 0)
    monkeypatch.setattr(made.optimizer, "step_with_ready_grads", lambda: True)
    assert made.optimizer.step()[1] == pytest.approx(norm, rel=1e-6) and norm > 2 * CLIP
    assert_same(whole(made, gradient), {name: w.grad for name, w in reference.weights.items()}, **CLOSE)


def test_heads_are_clipped_separately(make):
    def mark(net):
        for param in net[1].parameters():
            param.grad_norm_group = "mtp"

    reference = Reference(torch.bfloat16)
    reference.gradients(0)
    heads = torch.cat([w.grad.flatten() for name, w in reference.weights.items() if name.startswith("1.")])
    others = torch.cat([w.grad.flatten() for name, w in reference.weights.items() if not name.startswith("1.")])
    made = make(mark=mark)
    backward(made, 0)
    assert made.optimizer.step()[1] == pytest.approx(float(others.norm()), rel=1e-6)
    assert made.optimizer.mtp_grad_norm == pytest.approx(float(heads.norm()), rel=1e-6)


def test_the_mtp_heads_of_a_gpt_keep_their_tag(make, make_gpt):
    """Megatron-FSDP makes parameters of its own, on which no attribute of the model's is left."""
    made = make(net=make_gpt(32, 8, mtp_detach_heads=True).bfloat16())
    named = made.model.module.param_and_grad_buffer.optimizer_named_parameters
    groups = {name: tag_of(param) for name, param in named}
    heads = [name for name in groups if "mtp.layers." in name]
    assert heads and {name for name, group in groups.items() if group == "mtp"} == set(heads)


def test_a_norm_over_the_threshold_updates_nothing(make):
    made = make(grad_norm_skip_threshold=2.0)
    before = whole(made)
    assert train(made, range(2)) == [None, None]
    assert_same(whole(made), before, rtol=0, atol=0)


@every_strategy
def test_zeros_are_counted_once_also_by_a_rank_that_owns_none_of_a_parameter(make, from_all_ranks, strategy):
    made = make(strategy)
    ((_, _, zeros),) = train(made, [0])
    empty = [param._local_tensor.numel() == 0 for param in made.optimizer.get_parameters()]
    everyones = from_all_ranks(empty)
    assert any(map(any, everyones)) and not all(map(all, everyones))
    reference = Reference(torch.bfloat16)
    reference.gradients(0)
    assert zeros == reference.clip()[1] >= 9


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("chained", [False, True])
def test_zeros_are_counted_with_a_rank_that_owns_nothing(make, rank, chained):
    """Precision-aware with fp8 other than delayed scaling, where upstream asks the first parameter."""
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    made = make(fp8_recipe="blockwise")
    if rank == 0:
        made.optimizer.optimizer.param_groups.clear()
    backward(made, 0)
    mine = sum(int((gradient(p) == 0).sum()) for p in made.optimizer.get_parameters() if gradient(p) is not None)
    total = torch.tensor(mine)
    dist.all_reduce(total)
    optimizer = ChainedOptimizer([made.optimizer]) if chained else made.optimizer
    assert optimizer.count_zeros() == int(total)


@pytest.mark.ranks(2, 4)
def test_zeros_of_a_chain_over_different_ranks_with_a_rank_that_owns_nothing(make, rank, world_size):
    from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer

    made = make(fp8_recipe="blockwise")
    params = [torch.nn.Parameter(torch.ones(4))] if rank else []
    for param in params:
        param.grad, param.tensor_model_parallel = torch.zeros(4), True
    adam = torch.optim.AdamW([{"params": params}], lr=LR)
    other = FP32Optimizer(adam, made.optimizer.config, lambda *args: None)
    other.grad_stats_parallel_group = dist.new_group(list(range(world_size)))
    if rank == 0:
        made.optimizer.optimizer.param_groups.clear()
    backward(made, 0)
    alone = made.optimizer.count_zeros()
    assert ChainedOptimizer([made.optimizer, other]).count_zeros() == alone + 4 * (world_size - 1)


# -- memory -----------------------------------------------------------------------------------------------------------


@every_strategy
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_optimizer_s_state_is_two_moments_and_nothing_else(make, strategy, moments):
    from scripts.bench.held import shard_elements, state_bytes

    made = make(strategy, exp_avg_dtype=moments, exp_avg_sq_dtype=moments)
    train(made, range(2))
    elements = shard_elements(made.optimizer)
    assert state_bytes(made.optimizer) == 2 * moments.itemsize * elements
    total = torch.tensor(elements)
    dist.all_reduce(total)
    assert int(total) == sum(param.numel() for param in make_net(torch.float32).parameters())


def test_without_the_patch_four_bytes_more_for_each_element(make, unpatched):
    from megatron.core.distributed import DistributedDataParallelConfig

    from scripts.bench.held import shard_elements, state_bytes

    if hasattr(DistributedDataParallelConfig(), "megatron_fsdp_use_decoupled_grad"):
        pytest.skip("from 0.18 on Megatron drops the master weights itself")
    with unpatched():
        made = make()
        train(made, range(2))
    assert state_bytes(made.optimizer) == (2 * 4 + 4) * shard_elements(made.optimizer)


@pytest.mark.parametrize("recipe", [None, "delayed", "blockwise"])
def test_no_setting_of_fused_adam_speaks_of_master_weights(make, recipe):
    """With fp8 other than delayed scaling Megatron itself asks for none, and for gradients in `grad`."""
    made = make(fp8_recipe=recipe)
    assert train(made, range(2)) == about(Reference(torch.bfloat16).train(range(2)))
    fused_adam = made.optimizer.optimizer
    assert (fused_adam.master_weights, fused_adam.store_param_remainders) == (False, False)
    assert fused_adam.use_decoupled_grad is True


def test_an_optimizer_that_reads_grad_still_gets_it(make):
    made = make(use_precision_aware_optimizer=False)
    reference = Reference(torch.bfloat16)
    assert train(made, range(3)) == about(reference.train(range(3)))


# -- loading without the optimizer ------------------------------------------------------------------------------------


@pytest.fixture
def load():
    """load(made): weights that are no bf16 numbers, loaded as Megatron loads a checkpoint; returns them."""

    def load(made):
        state = made.model.state_dict_for_save_checkpoint()
        for value in state.values():  # what torch.distributed.checkpoint does
            value._local_tensor.mul_(-1.0).add_(1e-3)
        made.model.load_state_dict({name.removeprefix("module."): value for name, value in state.items()})
        return {name: -weight + 1e-3 for name, weight in Reference(made.dtype).weights.items()}

    return load


@every_strategy
def test_training_goes_on_from_loaded_weights_without_the_optimizer_s(make, load, strategy):
    """As with --finetune and --no-load-optim."""
    made, reference = make(strategy), Reference(torch.bfloat16)
    loaded = load(made)
    made.optimizer.reload_model_params()
    assert_same(whole(made), loaded, rtol=0, atol=0)
    assert any(not torch.equal(weight, weight.bfloat16().float()) for weight in loaded.values())
    reference.start_from(loaded)
    right = reference.train(range(4))
    assert train(made, range(4)) == about(right)


@every_strategy
@both_overlaps
def test_weights_loaded_in_place_reach_the_model(make, strategy, overlap):
    """0.19 leaves load_state_dict out where it has loaded a GPT checkpoint into a hybrid model's buffers."""
    made, reference = make(strategy, overlap=overlap), Reference(torch.bfloat16)
    change_model_weights(made, 1.0)  # also after a forward pass, which gathers weights
    made.model.state_dict_for_save_checkpoint()
    for _, param in made.model.module.param_and_grad_buffer.optimizer_named_parameters:
        param._local_tensor.mul_(-1.0)
    made.optimizer.reload_model_params()
    reference.start_from({name: -weight for name, weight in reference.weights.items()})
    ((right, _, _),) = reference.train([0])
    assert backward(made, 0) == pytest.approx(right, rel=1e-5)


def test_without_the_patch_a_load_without_the_optimizer_fails_where_newer(make, load, unpatched):
    with unpatched():
        made = make()
        load(made)
        if hasattr(made.model.ddp_config, "megatron_fsdp_use_decoupled_grad"):
            with pytest.raises(NotImplementedError):
                made.optimizer.reload_model_params()


def change_model_weights(made, factor):
    """After a forward pass the model shows the weights that it computes with; change those."""
    with torch.no_grad():
        made.model(batch_of(0, 0, made.dtype))
    for group in made.model.module.param_and_grad_buffer.parameter_groups:
        group.model_weight_buffer.data.mul_(factor)


@every_strategy
@both_overlaps
def test_changed_model_weights_are_taken_over(make, strategy, overlap):
    made, reference = make(strategy, overlap=overlap), Reference(torch.bfloat16)
    change_model_weights(made, -2.0)
    made.optimizer.reload_model_params()
    changed = {name: -2.0 * weight for name, weight in reference.weights.items()}
    assert_same(whole(made), changed, rtol=0, atol=0)
    reference.start_from(changed)
    right = reference.train(range(3))
    assert train(made, range(3)) == about(right)


@every_strategy
def test_main_weights_keep_the_bits_that_the_model_s_have_not(make, strategy):
    made = make(strategy)
    train(made, range(2))
    before = whole(made)
    change_model_weights(made, 1.0)
    made.optimizer.reload_model_params()
    assert_same(whole(made), before, rtol=0, atol=0)
    assert any(not torch.equal(value, value.bfloat16().float()) for value in before.values())
