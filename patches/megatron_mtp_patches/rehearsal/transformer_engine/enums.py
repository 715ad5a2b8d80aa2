"""The enums and types of the extension. Source: TransformerEngine's pybind.cpp and fused_attn.h, 2.12 to 2.18.

TransformerEngine asserts some of these values when it is imported, so a wrong value fails there.
"""

from __future__ import annotations

from enum import IntEnum
from importlib import metadata
from typing import Any

import torch

from .kernel import refusal


class DType(IntEnum):
    """transformer_engine::DType."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


_TORCH_DTYPES = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
    DType.kFloat8E4M3: torch.float8_e4m3fn,
    DType.kFloat8E5M2: torch.float8_e5m2,
}


def torch_dtype(dtype: Any) -> torch.dtype:
    """Return torch's dtype for a DType, which callers may pass as an int."""
    return _TORCH_DTYPES[DType(int(dtype))]


def _enum(name: str, members: str) -> Any:
    return IntEnum(name, members, start=0, module=__name__)


NVTE_Bias_Type = _enum("NVTE_Bias_Type", "NVTE_NO_BIAS NVTE_PRE_SCALE_BIAS NVTE_POST_SCALE_BIAS NVTE_ALIBI")
NVTE_Mask_Type = _enum(
    "NVTE_Mask_Type",
    "NVTE_NO_MASK NVTE_PADDING_MASK NVTE_CAUSAL_MASK NVTE_PADDING_CAUSAL_MASK NVTE_CAUSAL_BOTTOM_RIGHT_MASK "
    "NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK",
)
NVTE_Softmax_Type = _enum("NVTE_Softmax_Type", "NVTE_VANILLA_SOFTMAX NVTE_OFF_BY_ONE_SOFTMAX NVTE_LEARNABLE_SOFTMAX")
NVTE_QKV_Format = _enum(
    "NVTE_QKV_Format",
    "NVTE_SBHD NVTE_BSHD NVTE_THD NVTE_BSHD_2SBHD NVTE_SBHD_2BSHD NVTE_THD_2BSHD NVTE_THD_2SBHD NVTE_BHSD "
    "NVTE_QKV_Format_NOT_SET",
)
NVTE_QKV_Layout = _enum(
    "NVTE_QKV_Layout",
    "NVTE_SB3HD NVTE_SBH3D NVTE_SBHD_SB2HD NVTE_SBHD_SBH2D NVTE_SBHD_SBHD_SBHD NVTE_BS3HD NVTE_BSH3D "
    "NVTE_BSHD_BS2HD NVTE_BSHD_BSH2D NVTE_BSHD_BSHD_BSHD NVTE_T3HD NVTE_TH3D NVTE_THD_T2HD NVTE_THD_TH2D "
    "NVTE_THD_THD_THD NVTE_SBHD_BSHD_BSHD NVTE_BSHD_SBHD_SBHD NVTE_THD_BSHD_BSHD NVTE_THD_SBHD_SBHD "
    "NVTE_Paged_KV_BSHD_BSHD_BSHD NVTE_Paged_KV_BSHD_SBHD_SBHD NVTE_Paged_KV_SBHD_BSHD_BSHD "
    "NVTE_Paged_KV_SBHD_SBHD_SBHD NVTE_Paged_KV_THD_BSHD_BSHD NVTE_Paged_KV_THD_SBHD_SBHD NVTE_BHSD_BHSD_BHSD",
)
_BACKENDS = {"NVTE_No_Backend": -1, "NVTE_F16_max512_seqlen": 0, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2}
if tuple(map(int, metadata.version("transformer_engine").split(".")[:2])) >= (2, 18):
    del _BACKENDS["NVTE_F16_max512_seqlen"]
NVTE_Fused_Attn_Backend = IntEnum("NVTE_Fused_Attn_Backend", _BACKENDS, module=__name__)  # type: ignore[misc]
NVTERoutingMapFormat = _enum("NVTERoutingMapFormat", "BYTEMAP BITMAP_U8")
Float8BlockScaleTensorFormat = _enum("Float8BlockScaleTensorFormat", "GEMM_READY COMPACT INVALID")
CommOverlapType = _enum("CommOverlapType", "RS AG")
CommOverlapAlgo = _enum(
    "CommOverlapAlgo",
    "BULK_OVERLAP_AG BULK_OVERLAP_RS SPLIT_PIPELINED_AG_P2P SPLIT_PIPELINED_RS SPLIT_PIPELINED_RS_P2P "
    "ATOMIC_GEMM_RS ATOMIC_GEMM_AG_P2P ATOMIC_GEMM_RS_P2P EXTERNAL_BULK_OVERLAP_AG",
)
FP8FwdTensors = _enum(
    "FP8FwdTensors", " ".join(f"GEMM{gemm}_{what}" for gemm in (1, 2, 3) for what in ("INPUT", "WEIGHT", "OUTPUT"))
)
FP8BwdTensors = _enum(
    "FP8BwdTensors", " ".join(f"GRAD_{what}{gemm}" for gemm in (1, 2, 3) for what in ("OUTPUT", "INPUT"))
)


class FP8TensorMeta:
    """The scales of a module. Only fp8 reads them."""

    scale = scale_inv = amax_history = None


def _refused_class(name: str) -> type:
    return type(name, (), {"__init__": refusal(name), "__module__": __name__})


TYPES: tuple[type, ...] = (
    DType,
    NVTE_Bias_Type,
    NVTE_Mask_Type,
    NVTE_Softmax_Type,
    NVTE_QKV_Format,
    NVTE_QKV_Layout,
    NVTE_Fused_Attn_Backend,
    NVTERoutingMapFormat,
    Float8BlockScaleTensorFormat,
    CommOverlapType,
    CommOverlapAlgo,
    FP8FwdTensors,
    FP8BwdTensors,
    FP8TensorMeta,
    *map(
        _refused_class,
        (
            "CommOverlapCore",
            "CommOverlapBase",
            "CommOverlapP2PBase",
            "CommOverlapHelper",
            "CommOverlap",
            "CommOverlapP2P",
        ),
    ),
)
