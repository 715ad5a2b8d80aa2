"""Kernels of mamba_ssm, causal_conv1d, fla and fast_hadamard_transform in plain torch: an option of the rehearsal.

It is off unless `install` is called. They stand for what Megatron's training takes of these libraries, whose own are
Triton and CUDA. They compute in float32, or in the type of float64 inputs, and round once; step by step, or over all
pairs of tokens, so they are for short sequences. Nothing was compared with a GPU.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

VERSION = "9.0.0"  # Megatron asks for the lowest that has packed sequences


def install() -> None:
    """Put the modules with these kernels in the place of the packages, before Megatron imports them."""
    modules: dict[str, dict[str, Any]] = {
        "mamba_ssm": {"__version__": VERSION},
        "mamba_ssm.ops": {},
        "mamba_ssm.ops.triton": {},
        "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": RMSNorm},
        "mamba_ssm.ops.triton.ssd_combined": {
            "mamba_chunk_scan_combined": mamba_chunk_scan_combined,
            "mamba_split_conv1d_scan_combined": mamba_split_conv1d_scan_combined,
        },
        "causal_conv1d": {"__version__": VERSION, "causal_conv1d_fn": causal_conv1d_fn},
        "causal_conv1d.causal_conv1d_varlen": {"causal_conv1d_varlen_states": None},  # of inference
        "fast_hadamard_transform": {"hadamard_transform": hadamard_transform},
        "fla": {},
        "fla.modules": {},
        "fla.modules.convolution": {"causal_conv1d": causal_conv1d},
        "fla.modules.l2norm": {"l2norm": l2norm},
        "fla.ops": {},
        "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": chunk_gated_delta_rule},
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        vars(module).update(contents)
        sys.modules[name] = module


class RMSNorm(torch.nn.Module):
    """The norm of groups of features, with a gate before or after it. Source: mamba_ssm's layernorm_gated.py."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.eps, self.group_size, self.norm_before_gate = eps, group_size or hidden_size, norm_before_gate

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        gate = None if z is None else F.silu(_wide(z))
        value = _wide(x) if gate is None or self.norm_before_gate else _wide(x) * gate
        groups = value.unflatten(-1, (-1, self.group_size))
        normed = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        value = normed.flatten(-2) * _wide(self.weight)
        return (value if gate is None or not self.norm_before_gate else value * gate).to(x.dtype)


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, sequences: Tensor | None, activation: str | None
) -> Tensor:
    """Convolve each channel of x [batch, length, channels] with its row of weight [channels, width], causally.

    Args:
        sequences: [batch, length], the number of a token's sequence: a token sees none of another one. None for one.
    """
    x, weight = _wide(x), _wide(weight)
    length, width = x.shape[1], weight.shape[1]
    total = torch.zeros_like(x) if bias is None else _wide(bias).expand_as(x).clone()
    for back in range(min(width, length)):
        earlier = F.pad(x[:, : length - back], (0, 0, back, 0))
        if sequences is not None:
            before = F.pad(sequences[:, : length - back], (back, 0), value=-1)
            earlier = earlier * (before == sequences)[..., None]
        total = total + earlier * weight[:, width - 1 - back]
    return F.silu(total) if activation in ("silu", "swish") else total


def _sequences(ends: Tensor | None, length: int) -> Tensor | None:
    """[1, length]: the number of each token's sequence, of `cu_seqlens`."""
    return None if ends is None else torch.bucketize(torch.arange(length), ends[1:].long(), right=True)[None]


def causal_conv1d_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, seq_idx: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """Convolve [batch, channels, length]. Source: causal_conv1d's causal_conv1d_interface.py."""
    return _convolve(x.transpose(1, 2), weight, bias, seq_idx, activation).transpose(1, 2).to(x.dtype)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    initial_state: None,
    output_final_state: bool,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, None]:
    """Convolve [batch, length, channels]. Source: fla/modules/convolution.py."""
    _refuse_states(initial_state, output_final_state)
    return _convolve(x, weight, bias, _sequences(cu_seqlens, x.shape[1]), activation).to(x.dtype), None


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x over its norm along the last dimension. Source: fla/modules/l2norm.py."""
    wide = _wide(x)
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def _refuse_states(*states: object) -> None:
    if any(state is not None and state is not False for state in states):
        raise NotImplementedError("a rehearsal keeps no states of Mamba and GatedDeltaNet layers, which inference has")


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: None = None,
    seq_idx: Tensor | None = None,
    dt_softplus: bool = False,
    return_final_states: bool = False,
) -> Tensor:
    """The outputs [batch, length, heads, width] of a state-space layer. Source: mamba_ssm's ssd_combined.py.

    The state of a head decays by exp(dt A) before it gets dt B x; the output is C times the state, and D x.

    Args:
        x: [batch, length, heads, width].
        dt: [batch, length, heads].
        A: [heads], negative.
        B, C: [batch, length, groups, state size]; a group has as many heads as another.
        D: [heads] or [heads, width].
        z: as x, a gate.
        seq_idx: [batch, length], the number of each token's sequence.
    """
    _refuse_states(initial_states, return_final_states)
    wide, heads, length = _wide(x), x.shape[2], x.shape[1]
    step = _wide(dt) if dt_bias is None else _wide(dt) + dt_bias
    step = F.softplus(step) if dt_softplus else step
    B, C = (_wide(one).repeat_interleave(heads // one.shape[2], 2) for one in (B, C))
    decay = (step * A).cumsum(1).transpose(1, 2)  # [batch, heads, length]
    sees = torch.ones(length, length, dtype=torch.bool).tril()
    if seq_idx is not None:
        sees = sees & (seq_idx[:, None, :, None] == seq_idx[:, None, None, :])
    kept = (decay[..., None] - decay[..., None, :]).masked_fill(~sees, -torch.inf).exp()
    weights = torch.einsum("bthn,bshn->bhts", C, B) * kept
    out = torch.einsum("bhts,bsh,bshp->bthp", weights, step, wide)
    if D is not None:
        out = out + wide * (D if D.dim() == 2 else D[:, None])
    return (out if z is None else out * F.silu(_wide(z))).to(x.dtype)


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    seq_idx: Tensor | None = None,
    activation: str = "silu",
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> Tensor:
    """The outputs [batch, length, heads x width] of gates, x, B, C and dt beside each other, after a convolution.

    Source: mamba_ssm's ssd_combined.py. `norm_before_gate` is that of a norm which Megatron does not ask for here.
    """
    width = headdim or D.shape[1]
    inner, mixed = len(A) * width, len(conv1d_weight)
    z, xbc, dt = zxbcdt.split([inner, mixed, len(A)], -1)
    xbc = _convolve(xbc, conv1d_weight, conv1d_bias, seq_idx, activation).to(zxbcdt.dtype)
    x, B, C = xbc.split([inner, (mixed - inner) // 2, (mixed - inner) // 2], -1)
    x, z = (one.unflatten(-1, (-1, width)) for one in (x, z))
    B, C = (one.unflatten(-1, (ngroups, -1)) for one in (B, C))
    settings = {"D": D, "z": z, "dt_bias": dt_bias, "seq_idx": seq_idx, "dt_softplus": True}
    return mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, **settings).flatten(-2)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, None]:
    """The outputs [batch, length, heads, width] of the gated delta rule. Source: fla/ops/gated_delta_rule.

    The state of a head decays by exp(g), then moves what it has for the key a part beta of the way to the value.

    Args:
        q, k: [batch, length, heads, key width].
        v: [batch, length, heads, width].
        g, beta: [batch, length, heads].
        cu_seqlens: the ends of packed sequences, at which the state begins at zero.
    """
    _refuse_states(initial_state, output_final_state)
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    q_, k_, v_, decay, part = (_wide(one) for one in (q, k, v, g.exp(), beta))
    starts = set() if cu_seqlens is None else set(cu_seqlens.tolist())
    outputs: list[Tensor] = []
    state = q_.new_zeros(q.shape[0], *q.shape[2:], v.shape[-1])
    for at in range(q.shape[1]):
        state = torch.zeros_like(state) if at in starts else state * decay[:, at, :, None, None]
        held = torch.einsum("bhkv,bhk->bhv", state, k_[:, at])
        change = (v_[:, at] - held) * part[:, at, :, None]
        state = state + torch.einsum("bhk,bhv->bhkv", k_[:, at], change)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q_[:, at]))
    return (torch.stack(outputs, 1) * q.shape[-1] ** -0.5).to(v.dtype), None


def hadamard_transform(x: Tensor, scale: float = 1.0) -> Tensor:
    """The last dimension, of 2^n entries, times the Hadamard matrix and `scale`. Source: fast_hadamard_transform.

    Raises:
        NotImplementedError: for other sizes, which the library pads.
    """
    size = x.size(-1)
    if size & (size - 1):
        raise NotImplementedError(f"a rehearsal has no hadamard_transform of {size} entries")
    values, step = _wide(x), 1
    while step < size:
        first, second = values.unflatten(-1, (-1, 2, step)).unbind(-2)
        values, step = torch.stack((first + second, first - second), -2).flatten(-3), 2 * step
    return (values * scale).to(x.dtype)
