"""Heads that are not finite end training on all ranks before the first step, wherever they are."""

from functools import partial

import pytest
import torch

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("report-nonfinite-mtp-heads"), pytest.mark.ranks(2)]

LAYOUTS = {
    "DP2": {},  # without a distributed optimizer no norm is reduced over these ranks
    "TP2": {"tensor_model_parallel_size": 2},
    "PP2": {"pipeline_model_parallel_size": 2},
    "PP2, interleaved": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
}
ADVICE = "model.perform_initialization=True; Megatron-LM initializes none with --no-initialization"


@pytest.fixture
def make(parallel, make_gpt):
    """make(sizes, **config): a HeadTraining of a GPT in this layout."""
    from tests.trainings.heads import LENGTH, VOCABULARY, HeadTraining

    def build(sizes, **config):
        parallel(**sizes)
        settings = sizes | {"pipeline_dtype": torch.float32, "num_layers": 4, "mtp_detach_heads": True} | config
        make_chunk = partial(make_gpt, VOCABULARY, LENGTH, **settings)
        stages = range(sizes.get("virtual_pipeline_model_parallel_size", 0)) or [None]
        return HeadTraining([make_chunk(vp_stage=stage) for stage in stages])

    return build


def break_heads(chunks, rank, value):
    """Write `value` into one parameter of the heads of the last rank; return its name."""
    for chunk in chunks if rank == 1 else ():
        for name, param in chunk.named_parameters():
            if name.endswith("mtp.layers.1.eh_proj.weight"):
                with torch.no_grad():
                    param.view(-1)[-1] = value
                return name
    return None


@pytest.mark.parametrize(
    "sizes, value",
    [(sizes, float("-inf" if name == "TP2" else "nan")) for name, sizes in LAYOUTS.items()],
    ids=[f"{name}-{'-inf' if name == 'TP2' else 'nan'}" for name in LAYOUTS],
)
def test_all_ranks_raise_and_one_names_the_parameter(make, rank, sizes, value):
    training = make(sizes)
    name = break_heads(training.bare, rank, value)
    before = [tensor.clone() for tensor in training.main_model().values()]
    with pytest.raises(ValueError, match="MTP heads are not finite before the first training step") as error:
        training.step(0)
    where = f"first training step: {name}. " if rank == 1 else "the message of another rank names the parameters"
    assert where in str(error.value) and ADVICE in str(error.value)
    assert all(map(torch.equal, before, training.main_model().values()))


@pytest.mark.parametrize("heads, in_first_step", [(2, 1), (None, 0)])
def test_the_first_step_of_a_model_with_heads_alone_pays_for_it(make, count_collectives, heads, in_first_step):
    training = make(LAYOUTS["DP2"], mtp_num_layers=heads, mtp_detach_heads=heads is not None)
    in_steps = []
    for number in range(3):
        count_collectives.clear()
        training.run_schedule(number)
        in_steps.append(len(count_collectives))
    assert in_steps[0] == in_steps[1] + in_first_step and in_steps[1] == in_steps[2]


def test_evaluation_does_not_look_at_them(make, rank):
    """Validation of a model whose heads are read later, or not at all."""
    training = make(LAYOUTS["DP2"])
    break_heads(training.bare, rank, float("nan"))
    training.run_schedule(0, forward_only=True)
    with pytest.raises(ValueError, match="not finite"):
        training.run_schedule(0)


def test_a_step_that_is_captured_in_a_cuda_graph_is_not_looked_at(make, rank, monkeypatch):
    training = make(LAYOUTS["DP2"])
    break_heads(training.bare, rank, float("nan"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    training.run_schedule(0)


@pytest.mark.parametrize(
    "strategy, evaluates", [("no_shard", False), ("optim_grads", True), ("optim_grads_params", True)]
)
def test_heads_under_megatron_fsdp(make_fsdp, make_gpt, strategy, evaluates):
    """Whatever it shards, the parameters of the optimizer are there before a step, also after an evaluation."""
    pytest.importorskip("einops", reason="Megatron-FSDP needs einops")
    from tests.trainings.heads import LENGTH, VOCABULARY, run_schedule

    def train(value):
        net = make_gpt(VOCABULARY, LENGTH, mtp_detach_heads=True)
        break_heads([net], rank=1, value=value)  # on both ranks, as they have the same parameters before
        model = make_fsdp(strategy, torch.float32, net=net, use_precision_aware_optimizer=False).model
        if evaluates:
            with torch.no_grad():
                run_schedule([model], 0, forward_only=True)
        run_schedule([model], 0)

    train(0.0)
    with pytest.raises(ValueError, match="MTP heads are not finite"):
        train(float("nan"))
