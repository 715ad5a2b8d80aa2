"""Run a Megatron command of ms-swift, as its `megatron` does: python command.py sft|pt|rlhf ARGUMENTS."""

import sys

from swift.megatron import megatron_pretrain_main, megatron_rlhf_main, megatron_sft_main

COMMANDS = {"sft": megatron_sft_main, "pt": megatron_pretrain_main, "rlhf": megatron_rlhf_main}

if __name__ == "__main__":  # what it saves with starts processes that import this file
    COMMANDS[sys.argv.pop(1)]()
