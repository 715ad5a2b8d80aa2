"""Run verl's SFT trainer, as `python -m verl.trainer.sft_trainer` does: python sft.py OVERRIDES."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "stand_ins" / "nvrx"))

from verl.trainer.sft_trainer import main

if __name__ == "__main__":
    main()
