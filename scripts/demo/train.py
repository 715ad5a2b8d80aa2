"""Train a small GPT with MTP heads with Megatron's own trainer, on text some of whose batches arrive compressed.

    python -m megatron_mtp_patches run --device cpu scripts/demo/train.py MEGATRON'S_FLAGS [--corrupt-iterations N ...]

Needs megatron-core 0.17.1 or later: the wheel of 0.16.1 has no megatron.training. The repository's root must be on
PYTHONPATH.
"""

if __name__ == "__main__":
    # Saving a checkpoint starts a process that imports this file, and that needs no trainer.
    from scripts.demo.trainer import main

    main()
