"""A tied embedding gets the gradients of its look-ups and of the output layer on each pipeline stage that has it."""

import pytest
import torch
from megatron_mtp_patches import rehearsal

pytestmark = [
    pytest.mark.forked("patched"),
    pytest.mark.guards("keep-gradients-of-tied-embeddings"),
    pytest.mark.ranks(2),
    pytest.mark.skipif(not rehearsal.with_transformer_engine(), reason="nothing stands for Apex's fused gradients"),
]

PP2 = {"pipeline_model_parallel_size": 2, "num_layers": 4}
INTERLEAVED = {**PP2, "virtual_pipeline_model_parallel_size": 2}
PLACED = {**PP2, "pipeline_model_parallel_layout": "Etttt|mmL"}  # the last stage has no layer of the main model
ALONE = {**PP2, "pipeline_model_parallel_size": 4, "num_layers": 2, "pipeline_model_parallel_layout": "Et|t|mm|L"}
SIZES = ("pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size")


@pytest.fixture
def make_stage(make_gpt):
    """make_stage(**config): this rank's chunks of a GPT with tied embeddings."""
    from tests.trainings.heads import LENGTH, VOCABULARY

    def make(**config):
        stages = range(config.get(SIZES[1], 0)) or [None]
        return [make_gpt(VOCABULARY, LENGTH, tied=True, vp_stage=stage, **config) for stage in stages]

    return make


@pytest.fixture
def gradients(parallel, make_stage, from_all_ranks):
    """gradients(layout, embedding_ranks, **config): of each stage's copy of the embedding, fused, and on one rank."""
    from tests.trainings.heads import HeadTraining, run_schedule

    def compute(layout, embedding_ranks, **config):
        sizes = {name: layout[name] for name in SIZES if name in layout}
        parallel(**sizes, get_embedding_ranks=embedding_ranks)
        chunks = make_stage(gradient_accumulation_fusion=True, pipeline_dtype=torch.float32, **layout, **config)
        run_schedule(HeadTraining(chunks).model, 0)
        copies = [chunk.shared_embedding_or_output_weight() for chunk in chunks]
        by_rank = from_all_ranks([copy.main_grad for copy in copies if copy is not None])
        weights = from_all_ranks([each for chunk in chunks for each in _of_whole_model(chunk)])
        parallel()
        (whole,) = make_stage(num_layers=layout["num_layers"], **config)
        _, unexpected = whole.load_state_dict(dict(sum(weights, [])), strict=False)
        assert set(unexpected) <= {"output_layer.weight"}
        run_schedule([whole], 0)
        (right, *_) = from_all_ranks(whole.embedding.word_embeddings.weight.grad)
        return sum(by_rank, []), right

    return compute


def _of_whole_model(chunk):
    """The parameters of a chunk as the whole model calls them; of the embedding those of the first stage."""
    numbers = {f"decoder.layers.{i}.": layer.layer_number - 1 for i, layer in enumerate(chunk.decoder.layers)}
    for name, param in chunk.named_parameters():
        if name.startswith("embedding.") and not chunk.pre_process:
            continue
        place = next((prefix for prefix in numbers if name.startswith(prefix)), "")
        yield name.replace(place, f"decoder.layers.{numbers[place]}.") if place else name, param.detach()


def check(gradients, layout, embedding_ranks=None, number=2, **config):
    """Compare the gradients of so many copies; of the first and the last stage's, without `embedding_ranks`."""
    copies, right = gradients(layout, embedding_ranks, **config)
    assert len(copies) == number
    for gradient in copies:
        torch.testing.assert_close(gradient, right, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("layout", [PP2, INTERLEAVED, PLACED], ids=["PP2", "interleaved", "beside the loss alone"])
def test_the_stage_of_the_heads_gets_the_gradients_of_one_rank(gradients, layout):
    check(gradients, layout)


@pytest.mark.parametrize(
    "config", [{"mtp_logits_chunk_size": 5}, {"mtp_detach_heads": True}], ids=["chunks", "detached"]
)
def test_so_it_does_whatever_the_heads_give_to_the_weight(gradients, config):
    check(gradients, PP2, **config)


@pytest.mark.ranks(4)
def test_so_do_stages_that_have_one_of_the_uses(gradients):
    check(gradients, ALONE, _all_but_the_second, number=3)


def _all_but_the_second(stages):
    return [stages[0], *stages[2:]]


def test_a_weight_that_gtp_shards_is_left_alone(parallel, make_stage):
    """GTP adds its gradients up itself, and in 0.19 gives autograd placeholders that are not zero."""
    parallel(pipeline_model_parallel_size=2)
    (stage,) = make_stage(pipeline_dtype=torch.float32, **PP2)
    weight = stage.shared_embedding_or_output_weight()
    assert getattr(weight, "zero_out_wgrad", False) is stage.mtp_process
    weight.zero_out_wgrad, weight.is_gtp_weight_remat = False, True
    stage.setup_embeddings_and_output_layer()
    assert not weight.zero_out_wgrad
