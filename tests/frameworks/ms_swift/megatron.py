"""Run ms-swift's `megatron sft`, as its command does: python megatron_sft.py ARGUMENTS."""

from swift.megatron import megatron_sft_main

if __name__ == "__main__":  # what it saves with starts processes that import this file
    megatron_sft_main()
