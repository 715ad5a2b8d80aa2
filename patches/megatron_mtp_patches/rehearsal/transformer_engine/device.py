"""Properties of the device and of NVIDIA's libraries. Source: TransformerEngine's misc.cpp and pybind.cpp."""

from __future__ import annotations


def get_cudnn_version() -> int:
    """9.21.0. TransformerEngine chooses attention's features, and the memory layout of its statistics, by this."""
    return 92100


def get_cublasLt_version() -> int:
    return 0


def get_num_cublas_streams() -> int:
    return 1


def get_stream_priority_range(device: int = -1) -> tuple[int, int]:
    return 0, -1


def ubuf_built_with_mpi() -> bool:
    return False


def device_supports_multicast(device: int = -1) -> bool:
    return False


KERNELS = (
    get_cudnn_version,
    get_cublasLt_version,
    get_num_cublas_streams,
    get_stream_priority_range,
    ubuf_built_with_mpi,
    device_supports_multicast,
)
