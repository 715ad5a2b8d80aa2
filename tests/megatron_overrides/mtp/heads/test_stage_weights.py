"""The MTP stage's copy of the word embedding is tagged as an embedding, on every release."""

import pytest
import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer import TransformerConfig

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("tag-mtp-stage-embedding")]


class MiddleStage(LanguageModule):
    """A pipeline stage that is neither the first nor the last."""

    def __init__(self, mtp_process):
        super().__init__(TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1))
        self.pre_process = self.post_process = self.share_embeddings_and_output_weights = False
        self.mtp_process = mtp_process
        self.embedding = torch.nn.Module()
        self.embedding.word_embeddings = torch.nn.Embedding(4, 8)


@pytest.mark.parametrize("mtp_process", [True, False])
def test_only_a_stage_with_mtp_heads_tags_its_embedding(mtp_process):
    stage = MiddleStage(mtp_process)
    stage.setup_embeddings_and_output_layer()
    weight = stage.embedding.word_embeddings.weight
    assert getattr(weight, "is_embedding_or_output_parameter", False) is mtp_process


def test_a_stage_without_an_embedding_is_left_alone():
    stage = MiddleStage(mtp_process=True)
    del stage.embedding
    stage.setup_embeddings_and_output_layer()
