"""Kernels over lists of tensors: scaling, norms, Adam, SGD. Source: TransformerEngine's multi_tensor_apply extensions.

`tensor_lists` has one list for each role (gradients, parameters, moments, ...). Each kernel writes in place.
`noop_flag` and `is_infinite` are int tensors of one element.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Lists = list[list[Tensor]]


def _flag_non_finite(is_infinite: Tensor, source: Tensor) -> None:
    """Set the flag if a value is not finite; as in the real kernels, without a host-device sync."""
    is_infinite.bitwise_or_((~torch.isfinite(source)).any().to(is_infinite.dtype))


def _scale(is_infinite: Tensor, tensor_lists: Lists, scale: Any) -> None:
    for source, target in zip(*tensor_lists, strict=True):
        _flag_non_finite(is_infinite, source)
        target.copy_(source.float() * scale)


def multi_tensor_scale(chunk_size: int, is_infinite: Tensor, tensor_lists: Lists, scale: float) -> None:
    _scale(is_infinite, tensor_lists, float(scale))


def multi_tensor_scale_tensor(chunk_size: int, is_infinite: Tensor, tensor_lists: Lists, scale: Tensor) -> None:
    """Scale by a tensor, which stays on the device. From TransformerEngine 2.14 on."""
    _scale(is_infinite, tensor_lists, scale.float().reshape(()))


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    """Return (norm of all, norm of each or an empty tensor), both in fp32."""
    norms = torch.stack([torch.linalg.vector_norm(one, dtype=torch.float32) for one in tensor_lists[0]])
    total = torch.linalg.vector_norm(norms).view(1)
    _flag_non_finite(noop_flag, total)
    return total, norms if per_tensor else torch.empty(0)


def multi_tensor_unscale_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, inv_scale: Tensor, per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
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


def multi_tensor_adam(chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, *hyper: Any) -> None:
    """The lists are gradients, parameters, two moments, and master weights if there are any."""
    for g, p, m, v, *master in zip(*tensor_lists, strict=True):
        value = _adam(g, master[0] if master else p, m, v, *hyper)
        for target in (p, *master):
            target.copy_(value)


def multi_tensor_adam_capturable(
    chunk_size: int,
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
    """Learning rate and step are tensors. Gradients are unscaled in place."""
    if noop_flag.item() == 1:
        return
    gradients, *others = tensor_lists
    unscaled = [g.float() * inv_scale for g in gradients]
    for value, g in zip(unscaled, gradients, strict=True):
        g.copy_(value)
    hyper = (lr.item(), beta1, beta2, epsilon, step.item(), mode, bias_correction, weight_decay)
    multi_tensor_adam(chunk_size, noop_flag, [unscaled, *others], *hyper)


def multi_tensor_adam_capturable_master(*arguments: Any) -> None:
    multi_tensor_adam_capturable(*arguments)


def multi_tensor_adam_param_remainder(chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, *hyper: Any) -> None:
    """A master weight is its bf16 parameter, rounded to nearest, together with the 16 bits that rounding cuts off."""
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
    """The lists are gradients, parameters, momentum, and copies of the parameters in another dtype if there are any."""
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
