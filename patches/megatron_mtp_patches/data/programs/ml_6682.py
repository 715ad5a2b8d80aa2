"""A conversation of a system, a user and an assistant turn in the identity format: the targets of its tokens.

The tokenizer of Hugging Face, which a CPU need not have, is replaced by one with a token for each character.
"""

WITHOUT_CUDA = True
CONVERSATION = (("system", "ab"), ("user", "cde"), ("assistant", "fg"))
IGNORED = -100  # of Megatron's dataset, which gives such targets no loss


class Characters:
    """A tokenizer whose tokens are the codes of characters, with the identity template: turns as they are."""

    def apply_chat_template(self, turns, return_tensors=None, **_):
        import numpy

        codes = [ord(letter) for turn in turns for letter in turn["content"]]
        return codes if return_tensors is None else numpy.array([codes])


def make_tokenizer(prompt_format):
    from megatron.core.tokenizers.text.libraries import sft_tokenizer

    tokenizer = object.__new__(sft_tokenizer.SFTTokenizer)
    tokenizer._tokenizer, tokenizer._prompt_format = Characters(), prompt_format
    tokenizer._prompt_config = sft_tokenizer.PromptConfig(
        assistant_prefix_len=0, pad_token_id=0, custom_chat_template="", has_bos=False, has_system_role=True
    )
    return tokenizer


def reproduce():
    import numpy

    tokenizer = make_tokenizer("identity")
    turns = [{"role": role, "content": text} for role, text in CONVERSATION]
    _, targets = tokenizer.tokenize_conversation(turns, return_target=True, add_generation_prompt=False)
    expected = [ord(letter) if role == "assistant" else IGNORED for role, text in CONVERSATION for letter in text]
    return expected, numpy.asarray(targets).tolist()
