"""Run a Megatron command of ms-swift as its `megatron` does, on one rank or under torchrun.

python command.py sft|pt|rlhf ARGUMENTS, or a YAML or JSON file before them. What its section ENV says of the patches
and of ranks comes too late here.
"""

import sys

from swift.cli.main import parse_yaml_args
from swift.megatron import megatron_pretrain_main, megatron_rlhf_main, megatron_sft_main

COMMANDS = {"sft": megatron_sft_main, "pt": megatron_pretrain_main, "rlhf": megatron_rlhf_main}

if __name__ == "__main__":  # what it saves with starts processes that import this file
    command, *arguments = sys.argv[1:]
    parse_yaml_args(arguments)
    sys.argv[1:] = arguments
    COMMANDS[command]()
