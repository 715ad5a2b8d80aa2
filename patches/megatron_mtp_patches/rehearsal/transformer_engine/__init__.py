"""Layer 8: TransformerEngine. Its own Python runs; only its compiled extension is stood in for, in torch.

The wheel `transformer-engine` holds all of its Python: modules, autograd functions, optimizers, attention backends,
context parallelism. The extension `transformer_engine_torch` is kernels. They are written here in fp32 with one
rounding, so numbers agree with plain torch's and not, bit for bit, with a GPU's. fp8, fp4, userbuffers and NVSHMEM
raise NotImplementedError by name when they are called.

The layer is on where `transformer_engine` can be imported, all that its Python imports is installed, and the extension
is not: `pip install --no-deps transformer-engine==VERSION` and `pip install megatron-mtp-patches[te]`.
"""

from __future__ import annotations

import functools
import os
import sys
from importlib import metadata
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from ...engine.import_hook import when_imported

# What transformer_engine.pytorch imports at its top, and pip's name for it.
NEEDED = {
    "onnxscript": "onnxscript",
    "onnx": "onnx",
    "pydantic": "pydantic",
    "einops": "einops",
    "nvdlfw_inspect": "nvdlfw-inspect",
    "packaging": "packaging",
}


ORIGIN = f"{__name__}.extension"  # where the stand-in says that it comes from


def has_python() -> bool:
    """Whether TransformerEngine's Python is installed."""
    return find_spec("transformer_engine") is not None


def missing() -> list[str]:
    """What TransformerEngine's Python imports and this environment lacks, by pip's names."""
    return [name for module, name in NEEDED.items() if find_spec(module) is None]


def version() -> str:
    """As installed, such as "2.17.1"; empty where it is not."""
    try:
        return metadata.version("transformer_engine")
    except metadata.PackageNotFoundError:
        return ""


def how_to_have_it() -> str:
    """What to install so that this layer is on, as half a sentence."""
    if not has_python():
        return "install its Python: pip install --no-deps transformer-engine, and megatron-mtp-patches[te]"
    if missing():
        return f"install what its Python imports: pip install {' '.join(missing())}"
    return "use an environment without transformer_engine_torch, which needs a GPU"


def available() -> bool:
    """Whether this layer is on: TransformerEngine's Python is here, whole, and its extension is not."""
    return has_python() and not _has_extension() and not missing()


def _has_extension() -> bool:
    found = find_spec("transformer_engine_torch")
    return found is not None and found.origin != ORIGIN


def prepare() -> None:
    """Set what is read once, before torch, triton and transformer_engine are imported."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # TransformerEngine's own switch: load no shared library
    os.environ["NVTE_RELEASE_BUILD"] = "0"
    os.environ["TRITON_INTERPRET"] = "1"  # its Triton kernels (cross entropy) run in Triton's interpreter


def install() -> None:
    """Put the stand-ins in their places: TransformerEngine's as soon as it is imported, Apex's now."""
    # Now, not when they are needed: a process that a rehearsal starts has forgotten the package by then.
    from . import extension, permutation, weight_gradient

    def stand_in(common: ModuleType) -> None:
        sys.modules["transformer_engine_torch"] = extension.make()
        common.load_framework_extension = lambda framework: None  # type: ignore[attr-defined]

    sys.modules["fused_weight_gradient_mlp_cuda"] = weight_gradient
    when_imported(["transformer_engine.common"], stand_in)
    when_imported(["transformer_engine.pytorch.triton.permutation"], permutation.install)
    when_imported(["triton.runtime.autotuner"], _leave_one_choice)


def _leave_one_choice(autotuner: ModuleType) -> None:
    """Triton's autotuner would time its choices on a GPU, in the interpreter, too."""
    start = autotuner.Autotuner.__init__

    @functools.wraps(start)
    def with_one_choice(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        self.configs = self.configs[:1]

    autotuner.Autotuner.__init__ = with_one_choice
