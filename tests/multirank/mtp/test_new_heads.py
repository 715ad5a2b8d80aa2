"""Heads for a model whose checkpoint has none, over pipeline stages."""

import pytest
import torch

from megatron_overrides.mtp.new_heads import initialization as new_heads

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("initialize-mtp-heads"), pytest.mark.ranks(2)]

VOCABULARY, LENGTH = 32, 16
STAGES = {"pipeline_model_parallel_size": 2}


@pytest.fixture
def make_stage(make_gpt, parallel):
    """make_stage(**config): this rank's stage of a GPT with two heads on the second stage."""
    parallel(**STAGES)

    def make(**settings):
        return make_gpt(VOCABULARY, LENGTH, pipeline_dtype=torch.float32, **{**STAGES, **settings})

    return make


def layer_of(head):
    return getattr(head, "mtp_model_layer", None) or head.transformer_layer


@pytest.mark.parametrize("tied", [False, True])
def test_hidden_heads_leave_the_names_of_a_model_without_heads(make_stage, tied):
    with_heads, without = make_stage(tied=tied), make_stage(tied=tied, mtp_num_layers=None)
    before = list(with_heads.state_dict())
    with new_heads.hidden_heads([with_heads]):
        assert list(with_heads.state_dict()) == list(without.state_dict())
        assert set(with_heads.sharded_state_dict()) == set(without.sharded_state_dict())
    assert set(with_heads.state_dict()) == set(before)


def test_heads_are_shown_again_after_an_error(make_stage):
    model = make_stage()
    before = set(model.state_dict())
    with pytest.raises(RuntimeError), new_heads.hidden_heads([model]):
        raise RuntimeError
    assert set(model.state_dict()) == before and model.mtp_process is (not model.pre_process)


@pytest.mark.parametrize("tied", [False, True])
def test_the_copy_of_the_embedding_gets_the_values_of_the_first_stage(make_stage, from_all_ranks, rank, tied):
    model = make_stage(tied=tied)
    with torch.no_grad():
        model.embedding.word_embeddings.weight.fill_(rank + 1.0)
    new_heads.copy_embedding_to_heads([model])
    first, last = from_all_ranks(model.embedding.word_embeddings.weight.detach())
    assert torch.equal(last, first) and (first == 1.0).all()


@pytest.mark.parametrize("owner", [0, 1], ids=["last layer on the first stage", "last layer on the stage of the heads"])
def test_heads_are_copies_of_the_last_layer(make_stage, from_all_ranks, rank, owner):
    model = make_stage()
    if rank != owner:
        model.decoder.layers = torch.nn.ModuleList()
    elif not getattr(model.decoder, "final_layernorm", None):
        model.decoder.final_layernorm = torch.nn.LayerNorm(16)
    if rank == owner:
        with torch.no_grad():
            model.decoder.final_layernorm.weight.fill_(3.0)
    end = (model.decoder.layers[-1].state_dict(), model.decoder.final_layernorm.state_dict()) if rank == owner else None
    random = [head.eh_proj.weight.clone() for head in model.mtp.layers] if rank else []
    new_heads.initialize_from_last_layer([model])
    layer, norm = from_all_ranks(end)[owner]
    for head, projection in zip(model.mtp.layers if rank else [], random, strict=True):
        for module, state in ((layer_of(head), layer), (head.final_layernorm, norm)):
            actual = module.state_dict()
            names = [name for name in state if not name.endswith("_extra_state")]
            assert names and all(torch.equal(actual[name], state[name]) for name in names)
        assert torch.equal(head.eh_proj.weight, projection)
        assert (head.enorm.weight == 1).all() and (head.hnorm.weight == 1).all()


def test_all_ranks_refuse_heads_of_another_kind(make_stage, rank):
    model = make_stage()
    if rank == 0:
        model.decoder.layers[-1].layer_number = 99
        model.decoder.layers[-1].mlp.linear_fc1 = torch.nn.Linear(16, 32)
        model.decoder.final_layernorm = torch.nn.LayerNorm(16)
    with pytest.raises(ValueError, match=r"decoder layer 99 .* mlp.linear_fc1.weight has shape .* --mtp-init random"):
        new_heads.initialize_from_last_layer([model])
