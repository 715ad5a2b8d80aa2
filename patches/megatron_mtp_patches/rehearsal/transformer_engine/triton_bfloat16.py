"""bf16 in Triton's interpreter, in which Triton kernels run in a rehearsal.

It keeps bf16 as the 16 bits of an integer and calculates with them as such: 0.25 - 1 is 4e-39. It also converts fp32 to
bf16 by cutting bits off, and integers to bf16 and back as if both were integers. Here each operation takes its bf16
operands as fp32 and rounds its result to the nearest bf16 once, as the operation of a GPU does. So does a sum of many
numbers, of which a GPU also rounds parts, in another order. fp16 is numpy's.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import numpy
import torch

_OPERATIONS = ("binary_op", "ternary_op", "unary_op", "create_fma", "create_erf", "create_rsqrt", "create_dot")
_REDUCTIONS = {"ReduceOps": ("sum", "min_max"), "ScanOps": ("cumsum", "cumprod")}  # others combine by _OPERATIONS
_REFUSED = ("create_atomic_rmw", "create_dot_scaled")


def install(interpreter: ModuleType) -> None:
    """Wrap the operations of triton.runtime.interpreter's builder, and the reductions and scans that numpy makes."""
    builder = interpreter.InterpreterBuilder
    for name in _OPERATIONS:
        setattr(builder, name, _in_fp32(interpreter, getattr(builder, name)))
    for name in ("cast_impl", "create_fp_to_fp"):
        setattr(builder, name, _converting(interpreter, getattr(builder, name)))
    for name in _REFUSED:
        setattr(builder, name, _refusing_bfloat16(interpreter, name, getattr(builder, name)))
    for class_name, names in _REDUCTIONS.items():
        reductions = getattr(interpreter, class_name)
        for name in names:
            setattr(reductions, name, _reducing_in_fp32(interpreter, getattr(reductions, name)))


def _is_bfloat16(interpreter: ModuleType, value: Any) -> bool:
    """True if `value` holds bf16; the result of a comparison has the dtype of what it compared, and holds bools."""
    return (
        isinstance(value, interpreter.TensorHandle)
        and value.dtype.scalar == interpreter.tl.bfloat16
        and value.data.dtype == numpy.uint16
    )


def _to_fp32(interpreter: ModuleType, value: Any) -> Any:
    if not _is_bfloat16(interpreter, value):
        return value
    bits = value.data.astype(numpy.uint32) << numpy.uint32(16)
    return interpreter.TensorHandle(bits.view(numpy.float32), interpreter.tl.float32)


def _round(interpreter: ModuleType, value: Any) -> Any:
    """Round fp32 to the nearest bf16."""
    data = numpy.ascontiguousarray(value.data, dtype=numpy.float32)
    bits = torch.from_numpy(data).bfloat16().view(torch.int16).numpy().view(numpy.uint16).reshape(value.data.shape)
    return interpreter.TensorHandle(bits, interpreter.tl.bfloat16)


def _in_fp32(interpreter: ModuleType, operation: Any) -> Any:
    @functools.wraps(operation)
    def calculate(self: Any, *operands: Any) -> Any:
        if not any(_is_bfloat16(interpreter, operand) for operand in operands):
            return operation(self, *operands)
        handles = [operand for operand in operands if isinstance(operand, interpreter.TensorHandle)]
        # all operands of one operation have one dtype, but for conditions, and the sum to which a product is added
        rounds = _is_bfloat16(interpreter, handles[-1])
        result = operation(self, *(_to_fp32(interpreter, operand) for operand in operands))
        return _round(interpreter, result) if rounds and result.data.dtype != numpy.bool_ else result

    return calculate


def _reducing_in_fp32(interpreter: ModuleType, reduce: Any) -> Any:
    tl = interpreter.tl

    @functools.wraps(reduce)
    def reduce_in_fp32(self: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        value = values[0] if isinstance(values, tuple) else values
        if not _is_bfloat16(interpreter, value.handle):
            return reduce(self, values, *args, **kwargs)
        handle = _to_fp32(interpreter, value.handle)
        reduced = reduce(self, self.to_tensor(handle.data, tl.float32), *args, **kwargs)
        if isinstance(reduced, tl.core.tensor):
            return round_values(reduced)
        return type(reduced)(round_values(part) for part in reduced)

    def round_values(reduced: Any) -> Any:
        """`reduced` in bf16, or as it is if it holds indices."""
        if reduced.dtype != tl.float32:
            return reduced
        is_block = reduced.type.is_block()
        kind = tl.block_type(tl.bfloat16, reduced.type.shape) if is_block else tl.bfloat16
        return tl.core.tensor(_round(interpreter, reduced.handle), kind)

    return reduce_in_fp32


def _converting(interpreter: ModuleType, convert: Any) -> Any:
    bfloat16, fp32 = interpreter.tl.bfloat16, interpreter.tl.float32

    @functools.wraps(convert)
    def to_nearest(self: Any, source: Any, dtype: Any, *rounding_mode: Any) -> Any:
        target = dtype.scalar
        to_bfloat16 = target == bfloat16 and source.dtype.scalar != bfloat16
        truncates = interpreter._ir.ROUNDING_MODE.RTZ in rounding_mode
        if truncates or not (to_bfloat16 or _is_bfloat16(interpreter, source)):
            return convert(self, source, dtype, *rounding_mode)
        source = _to_fp32(interpreter, source)
        if target == bfloat16:
            return _round(interpreter, source)
        return source if target == fp32 else convert(self, source, dtype, *rounding_mode)

    return to_nearest


def _refusing_bfloat16(interpreter: ModuleType, name: str, operation: Any) -> Any:
    @functools.wraps(operation)
    def refuse(self: Any, *operands: Any) -> Any:
        if any(_is_bfloat16(interpreter, operand) for operand in operands):
            raise NotImplementedError(
                f"{name}: a rehearsal on the CPU cannot do this in bf16, which Triton's interpreter keeps as integers"
            )
        return operation(self, *operands)

    return refuse
