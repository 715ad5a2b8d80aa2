"""Train upstream's pretrain_gpt.py in each parallel layout, for scripts/rehearse_layouts.py."""
