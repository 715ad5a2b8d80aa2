"""Declares mask-prompts-of-identity-format."""

from ..engine import Patch, Probe, PullRequest, Wrap

_CONVERSATION = "megatron.core.tokenizers.text.libraries.sft_tokenizer:SFTTokenizer.tokenize_conversation"

PATCH = Patch(
    id="mask-prompts-of-identity-format",
    summary="Leave prompts out of the loss with the identity format of --sft",
    upstream=(PullRequest(6682, native_since="main", also_in=("0.17.1",)),),
    problem="With `--sft-tokenizer-prompt-format identity` the loss of 0.18 and 0.19 counts all tokens of a "
    "conversation, also those of its system, user and tool turns, which 0.17 left out. A run that moves from 0.17 to "
    "0.18 trains on its prompts from then on, and no message says so.",
    adds=(
        "The targets of system, user and tool turns are -100 with the identity format, as with the other formats that "
        "mask prompts, so the loss leaves them out.",
    ),
    numerics="With `--sft` and `--sft-tokenizer-prompt-format identity`: the loss and the gradients, which are those "
    "of the assistant's tokens alone.",
    notes=(
        "The default format counts all tokens in every release, as upstream means it to.",
        "As with the other formats, a conversation in which an assistant's turn is empty, or follows neither a user's "
        "nor a tool's, ends in upstream's error.",
    ),
    is_repair=True,
    probe=Probe(_CONVERSATION, contains="self._prompt_format == 'default'"),
    edits=(Wrap(_CONVERSATION, "megatron_overrides.data.prompts:mask_prompts_of_identity_format"),),
)
