"""What a process that a rehearsal has spawned sees. It imports no patches itself."""

import sys
from typing import Any


def tell(pipe: Any) -> None:
    import transformer_engine.pytorch  # noqa: F401 - which brings the extension
    import transformer_engine_torch

    rehearsal = sys.modules["megatron_mtp_patches.rehearsal"]
    patched = "megatron_mtp_patches" in sys.modules
    pipe.send((rehearsal.with_transformer_engine(), transformer_engine_torch.get_cudnn_version(), patched))
