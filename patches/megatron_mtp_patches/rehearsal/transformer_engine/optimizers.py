"""Kernels over lists of tensors: scaling, norms, Adam, SGD. Source: TransformerEngine's multi_tensor_apply extensions.

`tensor_lists` has one list for each role (gradients, parameters, moments, ...). Each kernel writes in place.
`noop_flag` and `is_infinite` are int tensors of one element. Lists that a kernel would refuse or misread are refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import version
from .tensor_lists import Lists, check_lists, check_scalar

# The dtypes of Adam's moments: of both lists the same.
MOMENTS: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
if tuple(map(int, version().split(".")[:2])) < (2, 13):
    MOMENTS = (torch.float32,)


def _flag_non_finite(is_infinite: Tensor, source: Tensor) -> None:
    """Set the flag if a value is not finite; as in the real kernels, without a host-device sync."""
    is_infinite.bitwise_or_((~torch.isfinite(source)).any().to(is_infinite.dtype))


def _scale(kernel: str, is_infinite: Tensor, tensor_lists: Lists, scale: Any) -> None:
    check_scalar(kernel, "is_infinite", is_infinite, torch.int32)
    check_lists(kernel, tensor_lists, "sources targets")
    for source, target in zip(*tensor_lists, strict=True):
        _flag_non_finite(is_infinite, source)
        target.copy_(source.float() * scale)


def multi_tensor_scale(chunk_size: int, is_infinite: Tensor, tensor_lists: Lists, scale: float) -> None:
    _scale("multi_tensor_scale", is_infinite, tensor_lists, float(scale))


def multi_tensor_scale_tensor(chunk_size: int, is_infinite: Tensor, tensor_lists: Lists, scale: Tensor) -> None:
    """Scale by a tensor, which stays on the device. From TransformerEngine 2.14 on."""
    check_scalar("multi_tensor_scale_tensor", "scale", scale, torch.float32)
    _scale("multi_tensor_scale_tensor", is_infinite, tensor_lists, scale.reshape(()))


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    """Return (norm of all, norm of each or an empty tensor), both in fp32."""
    check_scalar("multi_tensor_l2norm", "noop_flag", noop_flag, torch.int32)
    check_lists("multi_tensor_l2norm", tensor_lists, "tensors")
    norms = torch.stack([torch.linalg.vector_norm(one, dtype=torch.float32) for one in tensor_lists[0]])
    total = torch.linalg.vector_norm(norms).view(1)
    _flag_non_finite(noop_flag, total)
    return total, norms if per_tensor else torch.empty(0)


def multi_tensor_unscale_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, inv_scale: Tensor, per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    check_lists("multi_tensor_unscale_l2norm", tensor_lists, "tensors")
    check_scalar("multi_tensor_unscale_l2norm", "inv_scale", inv_scale, torch.float32)
    unscaled = [[one.float() * inv_scale for one in tensor_lists[0]]]
    return multi_tensor_l2norm(chunk_size, noop_flag, unscaled, per_tensor)


def _adam(
    g: Tensor,
    p: Tensor,
    m: Tensor,
    v: Tensor,
    lr: Any,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: Any,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> Tensor:
    """Return the new value of one parameter in fp32, and update its moments in place.

    Mode 0 is Adam with L2 regularisation, mode 1 is AdamW.
    """
    g, p = g.float(), p.float()
    if mode == 0:
        g = g + weight_decay * p
    new_m = beta1 * m.float() + (1 - beta1) * g
    new_v = beta2 * v.float() + (1 - beta2) * g * g
    m.copy_(new_m)
    v.copy_(new_v)
    first, second = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    update = (new_m / first) / ((new_v / second).sqrt() + epsilon)
    if mode == 1:
        update = update + weight_decay * p
    return p - lr * update


def _check_adam(kernel: str, tensor_lists: Lists, last: str = "", **dtypes: tuple[torch.dtype, ...]) -> None:
    dtypes = {"moments": MOMENTS, "squares": MOMENTS, **dtypes}
    check_lists(kernel, tensor_lists, f"gradients parameters moments squares {last}", dtypes)
    moments, squares = (tensor_lists[place][0].dtype for place in (2, 3))
    if moments != squares:
        raise RuntimeError(
            f"{kernel}: moments are {moments} and squares {squares}; the kernel wants one dtype for both"
        )


def _update(tensor_lists: Lists, hyper: Any) -> None:
    for g, p, m, v, *master in zip(*tensor_lists, strict=True):
        value = _adam(g, master[0] if master else p, m, v, *hyper)
        for target in (p, *master):
            target.copy_(value)


def multi_tensor_adam(chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, *hyper: Any) -> None:
    """The lists are gradients, parameters, two moments, and master weights if there are any."""
    last = "masters" if len(tensor_lists) == 5 else ""
    _check_adam("multi_tensor_adam", tensor_lists, last, masters=(torch.float32,))
    _update(tensor_lists, hyper)


def _adam_capturable(
    kernel: str,
    last: str,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Tensor,
) -> None:
    _check_adam(kernel, tensor_lists, last, parameters=(tensor_lists[0][0].dtype,), masters=(torch.float32,))
    for name, number, dtype in (
        ("noop_flag", noop_flag, torch.int32),
        ("lr", lr, torch.float32),
        ("step", step, torch.int32),
        ("inv_scale", inv_scale, torch.float32),
    ):
        check_scalar(kernel, name, number, dtype)
    if noop_flag.item() == 1:
        return
    gradients, *others = tensor_lists
    unscaled = [g.float() * inv_scale for g in gradients]
    for value, g in zip(unscaled, gradients, strict=True):
        g.copy_(value)
    hyper = (lr.item(), beta1, beta2, epsilon, step.item(), mode, bias_correction, weight_decay)
    _update([unscaled, *others], hyper)


def multi_tensor_adam_capturable(chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, *hyper: Any) -> None:
    """Learning rate and step are tensors. Gradients are unscaled in place."""
    _adam_capturable("multi_tensor_adam_capturable", "", noop_flag, tensor_lists, *hyper)


def multi_tensor_adam_capturable_master(chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, *hyper: Any) -> None:
    _adam_capturable("multi_tensor_adam_capturable_master", "masters", noop_flag, tensor_lists, *hyper)


def multi_tensor_adam_param_remainder(chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, *hyper: Any) -> None:
    """A master weight is its bf16 parameter, rounded to nearest, together with the 16 bits that rounding cuts off."""
    _check_adam(
        "multi_tensor_adam_param_remainder",
        tensor_lists,
        "remainders",
        parameters=(torch.bfloat16,),
        remainders=(torch.int16,),
    )
    for g, p, m, v, remainder in zip(*tensor_lists, strict=True):
        low = remainder.int()
        high = p.view(torch.int16).int() - (low < 0).int()  # undo the rounding
        master = ((high << 16) | (low & 0xFFFF)).view(torch.float32)
        bits = _adam(g, master, m, v, *hyper).view(torch.int32)
        low = ((bits & 0xFFFF) ^ 0x8000) - 0x8000
        remainder.copy_(low)
        high = (bits >> 16) + (low < 0).int()
        p.view(torch.int16).copy_(((high & 0xFFFF) ^ 0x8000) - 0x8000)


def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    wd: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
) -> None:
    """The lists are gradients, parameters, momentum, and copies of the parameters in fp16 if there are any.

    bf16 is not among the dtypes for which the kernel is compiled.
    """
    has_copies = len(tensor_lists) == 4
    weights = (torch.float32,) if has_copies else (tensor_lists[0][0].dtype,)
    check_lists(
        "multi_tensor_sgd",
        tensor_lists,
        "gradients parameters momenta" + " copies" * has_copies,
        {
            "gradients": (torch.float16, torch.float32),
            "parameters": weights,
            "momenta": weights,
            "copies": (torch.float16,),
        },
    )
    if noop_flag.item() == 1:
        return
    for g, p, buffer, *copies in zip(*tensor_lists, strict=True):
        grad, value = g.float() * scale, p.float()
        if wd and not wd_after_momentum:
            grad = grad + wd * value
        if momentum:
            buffer.copy_(grad if first_run else buffer.float() * momentum + (1 - dampening) * grad)
            grad = grad + momentum * buffer.float() if nesterov else buffer.float()
        if wd and wd_after_momentum:
            grad = grad + wd * value
        for target in (p, *copies):
            target.copy_(torch.add(value, grad, alpha=-lr))


KERNELS = (
    multi_tensor_scale,
    multi_tensor_scale_tensor,
    multi_tensor_l2norm,
    multi_tensor_unscale_l2norm,
    multi_tensor_adam,
    multi_tensor_adam_capturable,
    multi_tensor_adam_capturable_master,
    multi_tensor_adam_param_remainder,
    multi_tensor_sgd,
)
