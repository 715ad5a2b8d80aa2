"""`python -m megatron_mtp_patches` is the command `megatron-mtp-patches`; under torchrun use `-m`."""

import sys

from .cli import main

sys.exit(main())
