"""Heads trained alone: the main model stays bit-identical; the heads train as over a main model that is put back.

And the other way around: the heads stay, and the main model trains as under detached heads.
"""

from functools import partial
from typing import NamedTuple

import pytest
import torch

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("freeze-base-model-for-mtp"), pytest.mark.ranks(2)]

STEPS = 3
BF16 = {"bf16": True, "params_dtype": torch.bfloat16}
MOE = {"num_moe_experts": 4, "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
MOE |= {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.01, "add_bias_linear": False}


class Layout(NamedTuple):
    """Sizes of Megatron's process groups, settings of the model and of the optimizer, and stages with an embedding."""

    sizes: dict
    model: dict = {}
    optimizer: dict = {}
    embeddings: tuple = (0, -1)

    def embedding_ranks(self, stages):
        """As pretrain_gpt.py names them to Megatron."""
        return sorted({stages[place] for place in self.embeddings})


DISTRIBUTED = {"use_distributed_optimizer": True}
LAYOUTS = {
    "DP2": Layout({}),
    "DP2, overlapped": Layout({}, optimizer={"overlap_grad_reduce": True, "overlap_param_gather": True, **DISTRIBUTED}),
    "TP2, sequence parallel": Layout({"tensor_model_parallel_size": 2}, {"sequence_parallel": True}),
    "PP2": Layout({"pipeline_model_parallel_size": 2}, {"pipeline_dtype": torch.float32}),
    "PP2, tied": Layout({"pipeline_model_parallel_size": 2}, {"pipeline_dtype": torch.float32, "tied": True}),
    "PP2, distributed optimizer, overlapped": Layout(
        {"pipeline_model_parallel_size": 2},
        {"pipeline_dtype": torch.float32},
        {"overlap_grad_reduce": True, "overlap_param_gather": True, **DISTRIBUTED},
    ),
    "PP2, interleaved": Layout(
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        {"pipeline_dtype": torch.float32, "num_layers": 4},
    ),
    # In bf16, because TransformerEngine has no context parallelism in fp32.
    "CP2": Layout({"context_parallel_size": 2}, {"transformer_engine": True, **BF16}, {"bf16": True}),
    "EP2": Layout({"expert_model_parallel_size": 2}, MOE),
}


HEADS_ON_A_STAGE = Layout(
    {"pipeline_model_parallel_size": 4},
    {
        "pipeline_dtype": torch.float32,
        "num_layers": 2,
        "pipeline_model_parallel_layout": "Et|t|mm|L",
        "deallocate_pipeline_outputs": True,  # as Megatron's trainer sets it; a view is no such output
    },
    embeddings=(0, 2),
)


@pytest.fixture(params=LAYOUTS.values(), ids=LAYOUTS)
def layout(request, parallel):
    parallel(**request.param.sizes, get_embedding_ranks=request.param.embedding_ranks)
    return request.param


@pytest.fixture
def make(layout, make_gpt, norms_for_sequence_parallel):
    """make(**config): a HeadTraining of the layout; `clip` limits the norm of the heads."""
    from tests.trainings.heads import LENGTH, VOCABULARY, HeadTraining

    def build(clip=0.0, **config):
        settings = dict(layout.optimizer, clip_grad=clip)
        if config.get("mtp_detach_heads"):
            settings |= {"clip_grad": 0.0, "mtp_clip_grad": clip}
        make_chunk = partial(
            make_gpt, VOCABULARY, LENGTH, normalization="RMSNorm", **layout.sizes, **layout.model, **config
        )
        stages = range(layout.sizes.get("virtual_pipeline_model_parallel_size", 0)) or [None]
        return HeadTraining([make_chunk(vp_stage=stage) for stage in stages], **settings)

    return build


def test_heads_train_as_detached_heads_over_a_main_model_that_is_put_back(make, clip=0.0):
    """`train_frozen` compares the bits of the main model."""
    from tests.trainings.heads import train_detached, train_frozen

    frozen, detached = make(clip, freeze_base_model_for_mtp=True), make(clip, mtp_detach_heads=True)
    actual, right = train_frozen(frozen, STEPS), train_detached(detached, STEPS)
    assert min(frozen.norms) > clip
    assert frozen.losses == detached.losses
    assert all(torch.equal(tensor, right[name]) for name, tensor in actual.items())


@pytest.mark.parametrize("layout", [LAYOUTS["DP2"]], indirect=True, ids=["DP2"])
def test_their_gradients_are_clipped_as_those_of_detached_heads(make):
    test_heads_train_as_detached_heads_over_a_main_model_that_is_put_back(make, clip=1e-3)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", [HEADS_ON_A_STAGE], indirect=True, ids=["heads alone on a stage"])
def test_heads_train_on_a_stage_without_the_main_model(make):
    """The last stage has their losses and neither a layer nor a parameter to train."""
    test_heads_train_as_detached_heads_over_a_main_model_that_is_put_back(make)


FOR_THE_MAIN_MODEL = ("DP2, overlapped", "TP2, sequence parallel", "PP2, tied", "PP2, interleaved", "CP2", "EP2")


@pytest.mark.parametrize(
    "layout", [LAYOUTS[name] for name in FOR_THE_MAIN_MODEL], indirect=True, ids=FOR_THE_MAIN_MODEL
)
def test_the_main_model_trains_and_its_heads_stay(make):
    """All of its embeddings are the same on each stage that has one, as in the first step."""
    from tests.trainings.heads import train_disabled

    disabled, detached = make(disable_mtp_loss=True), make(mtp_detach_heads=True)
    trained = train_disabled(disabled, STEPS)
    for number in range(STEPS):
        detached.step(number)
    assert [float(norm) for norm in disabled.norms] == pytest.approx([float(norm) for norm in detached.norms])
    assert all(torch.equal(tensor, trained[name]) for name, tensor in detached.main_model().items())
    copies = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(copies, [p.data for p in _embeddings(disabled)])
    embeddings = [one for embeddings_of_rank in copies for one in embeddings_of_rank]
    assert all(torch.equal(one, embeddings[0]) for one in embeddings)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", [HEADS_ON_A_STAGE], indirect=True, ids=["heads alone on a stage"])
def test_the_main_model_trains_past_a_stage_of_heads(make):
    """That stage passes on what it receives."""
    test_the_main_model_trains_and_its_heads_stay(make)


def _embeddings(training):
    params = [param for chunk in training.bare for param in chunk.parameters()]
    return [param for param in params if getattr(param, "shared_embedding", False)]
