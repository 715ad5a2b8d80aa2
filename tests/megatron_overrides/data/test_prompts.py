"""What the loss counts of a conversation in the identity format of --sft."""

import numpy
import pytest
from megatron_mtp_patches.data.programs.ml_6682 import make_tokenizer

IGNORED = -100
TURNS = [
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "cd"},
    {"role": "tool", "content": "e"},
    {"role": "assistant", "content": "f"},
]


pytest.importorskip(
    "megatron.core.tokenizers.text.libraries.sft_tokenizer", reason="0.16 has the tokenizer in its trainer"
)
pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("mask-prompts-of-identity-format")]


def test_only_the_turns_of_the_assistant_are_targets():
    tokenizer = make_tokenizer("identity")
    tokens, targets = tokenizer.tokenize_conversation(TURNS, True, False)
    assert numpy.asarray(tokens).tolist() == list(map(ord, "abcdef"))
    assert numpy.asarray(targets).tolist() == [IGNORED, IGNORED, ord("c"), ord("d"), IGNORED, ord("f")]
    assert tokenizer._prompt_format == "identity"


def test_the_default_format_and_prompts_for_inference_are_as_they_were():
    _, targets = make_tokenizer("default").tokenize_conversation(TURNS, True, False)
    assert numpy.asarray(targets).tolist() == list(map(ord, "abcdef"))
    tokens = make_tokenizer("identity").tokenize_conversation(TURNS, False, True)
    assert numpy.asarray(tokens).tolist() == list(map(ord, "abcdef"))
