"""Batches that ranks share are the same, their parts join, and replicas have others; a right batch is no finding."""

from types import SimpleNamespace

import pytest
import torch

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("watch-invariants"), pytest.mark.ranks(2)]

TP = {"tensor_model_parallel_size": 2}
LENGTH = 32


@pytest.fixture
def compare(parallel, monkeypatch):
    """compare(layout, *chunks, **stage): the relations and names of the flaws of this rank, and names of losses.

    A chunk is the microbatches that a chunk of a model gets, which returns their `output`.
    """

    def run(layout, *chunks, **stage):
        from megatron.core.models.common.language_module.language_module import LanguageModule

        from megatron_overrides.watch.batches import Batches
        from megatron_overrides.watch.chunks import find_chunks

        class Stage(LanguageModule):
            def __init__(self):
                torch.nn.Module.__init__(self)
                vars(self).update({"pre_process": True, "post_process": True, **stage})

            def forward(
                self, input_ids, position_ids=None, labels=None, packed_seq_params=None, *, loss_mask=None, output=None
            ):
                return output

        parallel(**layout)
        models = [Stage() for _ in chunks]
        batches = Batches(find_chunks(models))
        batches.start()
        for model, microbatches in zip(models, chunks, strict=True):
            pass_what_is_no_training(model)
            for microbatch in microbatches:
                model(**microbatch)
        flaws = batches.compare()
        assert not any(model._forward_hooks for model in models)
        return [(flaw.relation, flaw.name) for flaw in flaws], [flaw.name for flaw in batches.check_losses()]

    def pass_what_is_no_training(model):
        tokens = torch.full((1, LENGTH), torch.distributed.get_rank())
        with torch.no_grad():
            model(tokens)
        model.eval()(tokens)
        model.train()
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            model(tokens)

    return run


def draw(seed, sequences=2):
    """A microbatch of random tokens, with a loss everywhere."""
    text = torch.randint(1000, (sequences, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": text[:, :-1], "labels": text[:, 1:].clone(), "loss_mask": torch.ones(sequences, LENGTH)}


def test_tensor_parallel_ranks_have_the_same_fields(compare, rank):
    packing = SimpleNamespace(cu_seqlens_q=torch.tensor([0, 8, LENGTH]), cu_seqlens_kv=None)
    other = draw(0)
    other["labels"][1, 3] += rank
    batches = [draw(1), draw(2) | {"packed_seq_params": packing if rank == 0 else None}, other]
    names = ["cu_seqlens_q of microbatch 1", "labels of microbatch 2"]
    found, _ = compare(TP, batches)
    assert found == [("ranks of one replica have different batches", name) for name in names if rank == 1]


def test_stages_have_the_same_of_what_both_use(compare, rank):
    tokens = draw(rank)["input_ids"]
    batch = draw(5) | {"input_ids": tokens}
    layout = {"pipeline_model_parallel_size": 2}
    stage = {"pre_process": rank == 0, "post_process": rank == 1}
    assert compare(layout, [batch], **stage) == ([], [])
    found, _ = compare(layout, [batch], **stage, mtp_process=rank == 1)
    assert found == [("ranks of one replica have different batches", "input_ids of microbatch 0")] * (rank == 1)


def test_chunks_of_a_rank_have_the_same_of_what_both_use(compare, rank):
    found, _ = compare({"pipeline_model_parallel_size": 2}, [draw(1)], [draw(1) | {"labels": draw(2)["labels"]}])
    assert found == [("ranks of one replica have different batches", "labels of microbatch 0")]


def test_parts_of_a_sequence_join(compare, rank):
    joins = ("parts of a sequence do not join", "labels and input_ids")

    def split(batch, sample=None):
        """The part of this rank; that of rank 1 is of another sample, if it is given."""
        whole = sample if rank and sample is not None else batch
        return {name: torch.cat([one.chunk(4, 1)[part] for part in (rank, 3 - rank)], 1) for name, one in whole.items()}

    def find(*batches, **more):
        return compare({"context_parallel_size": 2}, [batch | more for batch in batches])[0]

    assert find(split(draw(1)), split(draw(2))) == []
    assert find(split(draw(1), draw(3)), split(draw(2), draw(4))) == [joins]
    packing = SimpleNamespace(cu_seqlens_q=torch.tensor([0, LENGTH]))
    assert find(split(draw(1), draw(3)), packed_seq_params=packing) == []
    ends_there = draw(1)
    ends_there["labels"][0, [7, 23]] = 1000  # documents of the first sequence end where parts do
    assert find(split(ends_there)) == []
    ends_once = draw(1, sequences=1)
    ends_once["labels"][0, 7] = 1000
    assert find(split(ends_once)) == []
    ends_everywhere = draw(1)
    ends_everywhere["labels"][:, [3, 7, 23]] = 1000
    assert find(split(ends_everywhere)) == []
    for places in ([7, 23], [8, 24]):
        masked = draw(1)
        masked["labels"][:, [7, 23]] = 1000
        masked["loss_mask"][:, places] = 0
        assert find(split(masked)) == []


def test_replicas_have_other_text(compare, rank):
    def find(*batches):
        return compare({}, batches)[0]

    assert find(draw(1), draw(2)) == [("replicas have the same batch", "input_ids")]
    assert find(draw(1), draw(2 + rank)) == []
    counting = {"input_ids": torch.arange(LENGTH).expand(2, -1)}  # as MockGPTDataset has it
    repeating = {"input_ids": torch.zeros(2, LENGTH, dtype=torch.long)}
    padding = draw(1) | {"loss_mask": torch.zeros(2, LENGTH)}
    assert find(counting, repeating, padding) == []
    assert find(*[draw(1)] * (1 + rank)) == []


def test_a_loss_is_finite_where_it_counts(compare, rank):
    output = torch.ones(2, LENGTH)
    output[0, 3] = torch.inf if rank == 1 else 1.0
    masked = draw(rank)
    masked["loss_mask"][0, 3] = 0
    without_mask = draw(6 + rank) | {"loss_mask": None}
    without_mask["labels"][0, 3] = -100
    batches = [draw(2 + rank), masked, without_mask]
    batches = [*[batch | {"output": output} for batch in batches], draw(4 + rank)]
    assert compare({}, batches) == ([], ["loss of microbatch 0"] * (rank == 1))


def test_it_says_once_that_it_sees_no_language_model(parallel, caplog, rank):
    from megatron_overrides.watch.batches import Batches
    from megatron_overrides.watch.chunks import find_chunks

    parallel(**TP)
    model = torch.nn.Linear(2, 2)
    batches = Batches(find_chunks([model]))
    for _ in range(2):
        batches.start()
        model(torch.ones(1, 2))
        assert batches.compare() == [] == batches.check_losses()
    said = [record.message for record in caplog.records if record.message.startswith("watch: ")]
    assert said == ["watch: compares no batches, as it has seen no forward pass of a language model"] * (rank == 0)


def test_it_looks_at_the_batches_of_the_steps_that_it_checks(parallel, make_gpt, rank):
    from megatron_overrides.watch.findings import WatchError
    from tests.trainings.heads import LENGTH, VOCABULARY, HeadTraining

    parallel(**TP)
    model = make_gpt(VOCABULARY, LENGTH, mtp_num_layers=None, **TP)
    training = HeadTraining([model], watch_invariants=2, watch_action="raise")
    (wrapped,) = training.model
    wrapped.register_forward_pre_hook(lambda model, values: (values[0] + rank * (training.number > 1), *values[1:]))
    hooks = []
    with pytest.raises(
        WatchError, match="watch, step 3: ranks of one replica have different batches: input_ids of microbatch 0"
    ):
        for training.number in (1, 2, 3):
            hooks.append(len(wrapped._forward_hooks))
            training.step(training.number)
    assert hooks == [1, 0, 1]


def test_an_infinite_loss_is_named_though_gradients_are_finite(parallel, make_gpt):
    from megatron_overrides.watch.findings import WatchError
    from tests.trainings.heads import LENGTH, VOCABULARY, HeadTraining

    parallel(**TP)
    model = make_gpt(VOCABULARY, LENGTH, mtp_num_layers=None, **TP)
    model.register_forward_hook(lambda model, values, loss: loss * 0 + torch.inf)
    training = HeadTraining([model], watch_invariants=1, watch_action="raise")
    with pytest.raises(WatchError, match="watch, step 1: not finite: loss of microbatch 0; loss of microbatch 1: "):
        training.step(1)
