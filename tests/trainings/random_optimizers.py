"""Random optimizers of real Megatron classes: parameters, tags, gradients, settings, and the ranks that own them.

A case is plain data that describes all ranks; `Built` makes the optimizer of one rank.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from tests.oracles.reference_norms import Gradient, Outcome, expected_step

STEPS = 2

# The same examples in every run and on every rank. Health checks depend on time, so ranks could disagree about them.
quietly = {
    "derandomize": True,
    "database": None,
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "phases": (Phase.explicit, Phase.generate, Phase.shrink),
}


def examples(number: int) -> settings:
    return settings(max_examples=number, **quietly)


@dataclass(frozen=True)
class Parameter:
    """`owners` are the ranks that have a shard each, in order; None: every rank has the whole parameter."""

    shape: tuple[int, ...]
    heads: bool
    half: bool
    shared: bool
    owners: tuple[int, ...] | None
    gradients: tuple[str, ...]

    def shard(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        if self.owners is None:
            return whole
        return whole.flatten().tensor_split(len(self.owners))[self.owners.index(rank)]


@dataclass(frozen=True)
class Leaf:
    """`halves`: its norm is summed over one half of the ranks, and the other half has the same parameters."""

    mixed_precision: bool
    exempt: bool
    stub_if_empty: bool
    halves: bool
    parameters: tuple[Parameter, ...]

    def owned(self, rank: int, world: int) -> list[tuple[int, Parameter, int]]:
        """Return (index in this leaf, parameter, index of this rank among its owners) of each parameter of the rank."""
        place = rank % (world // 2) if self.halves else rank
        numbered = enumerate(self.parameters)
        return [(number, each, place) for number, each in numbered if each.owners is None or place in each.owners]


@dataclass(frozen=True)
class Case:
    """`spoilt` has for each step (index of a gradient, bad value) or None; `nesting` is alone, chained or nested.

    With `precision_aware`, gradients may be in another attribute. Here none is, but the code has to check each.
    """

    leaves: tuple[Leaf, ...]
    nesting: str
    seed: int
    spoilt: tuple[tuple[int, str] | None, ...]
    count_zeros: bool
    precision_aware: bool
    settings: tuple[tuple[str, Any], ...]

    @property
    def not_measured(self) -> tuple[Any, Any]:
        """The norm and the number of zeros that a step returns if no setting needs them."""
        return (0.0, 0) if self.nesting == "alone" and self.leaves[0].mixed_precision else (None, None)

    @property
    def needs_norms(self) -> bool:
        """A chain always measures norms; a single optimizer does if a setting depends on them."""
        chosen = dict(self.settings)
        thresholds = (chosen["grad_norm_skip_threshold"], chosen["mtp_grad_norm_skip_threshold"])
        clips = chosen["clip_grad"] or chosen["mtp_clip_grad"]
        return bool(self.nesting != "alone" or clips or any(each not in (None, math.inf) for each in thresholds))

    @property
    def reductions(self) -> int:
        """The all-reduces of a step that counts no zeros: one for each group of ranks that share an optimizer."""
        return len({leaf.halves for leaf in self.leaves}) if self.needs_norms else 0

    def gradients(self, step: int) -> list[Gradient]:
        """Return the whole gradients of all parameters, leaf by leaf."""
        generator = torch.Generator(torch.get_default_device()).manual_seed(self.seed + step)
        number = sum(len(leaf.parameters) for leaf in self.leaves)
        drawn = []
        for leaf in self.leaves:
            for each in leaf.parameters:
                # Integers: some are zero, and no norm of them is close to a threshold.
                values = torch.randint(-3, 4, each.shape, generator=generator).float()
                kind = each.gradients[step]
                values = None if kind == "missing" else values * _SCALES[kind]
                spoilt = self.spoilt[step]
                if values is not None and values.numel() and spoilt and spoilt[0] % number == len(drawn):
                    values.view(-1)[0] = _SPOILING[spoilt[1]]
                drawn.append(Gradient(values, each.heads, leaf.exempt, not each.shared))
        return drawn


_SCALES = {"zero": 0.0, "small": 2.0**-10, "plain": 1.0, "large": 2.0**10}
_SPOILING = {"nan": math.nan, "inf": math.inf, "huge": -(2.0**90)}  # the square of the last exceeds float32

_settings = st.fixed_dictionaries(
    {
        "clip_grad": st.sampled_from([0.0, 0.05, 3.0, 1e6]),
        "mtp_clip_grad": st.sampled_from([None, 0.0, 0.05, 1e6]),
        "grad_norm_skip_threshold": st.sampled_from([math.inf, math.inf, 0.051, 5.1, 20.1, 3000.3]),
        "mtp_grad_norm_skip_threshold": st.sampled_from([None, math.inf, 0.051, 5.1, 3000.3]),
        "min_clip_coefficient": st.sampled_from([None, 0.001, 0.3]),
    }
)


@st.composite
def cases(draw: Any, world: int = 1) -> Case:
    """Draw cases for `world` ranks."""
    nesting = draw(st.sampled_from(["alone", "chained", "nested"]))
    leaves = tuple(draw(st.lists(_leaves(world), min_size=1, max_size=1 if nesting == "alone" else 3)))
    chosen = draw(_settings)
    if not (chosen["clip_grad"] or chosen["mtp_clip_grad"]):
        chosen["min_clip_coefficient"] = None  # refused, because nothing is clipped
    spoilt = st.none() | st.tuples(st.integers(0, 11), st.sampled_from(sorted(_SPOILING)))
    alike = len({leaf.halves for leaf in leaves}) == 1
    return Case(
        leaves,
        nesting,
        draw(st.integers(0, 99)),
        tuple(draw(spoilt) for _ in range(STEPS)),
        # Megatron cannot count zeros in a nested chain whose children have different ranks.
        draw(st.booleans()) and (alike or nesting != "nested"),
        draw(st.booleans()),
        tuple(chosen.items()),
    )


@st.composite
def _leaves(draw: Any, world: int) -> Leaf:
    halves = world > 1 and draw(st.booleans())
    ranks = world // 2 if halves else world
    owners: Any = st.permutations(range(ranks)).flatmap(lambda order: st.integers(1, ranks).map(lambda n: order[:n]))
    owners = owners.map(tuple)
    mixed_precision = draw(st.booleans())
    parameter = st.builds(
        Parameter,
        shape=st.sampled_from([(0,), (1,), (7,), (3, 5)]),
        heads=st.booleans(),
        half=st.booleans() if mixed_precision else st.just(False),
        shared=st.sampled_from([False, False, True]),
        owners=owners if halves else st.none() | owners,
        gradients=st.tuples(*[st.sampled_from(["missing", *_SCALES])] * STEPS),
    )
    parameters = tuple(draw(st.lists(parameter, max_size=4)))
    return Leaf(mixed_precision, draw(st.booleans()), draw(st.booleans()), halves, parameters)


class Built:
    """The optimizer of one rank. Its parameters are shards of the case's parameters and have their numbers."""

    def __init__(self, case: Case, rank: int = 0, world: int = 1, everybody: Any = None, half: Any = None) -> None:
        from megatron.core.optimizer import OptimizerConfig
        from megatron.core.optimizer.optimizer import ChainedOptimizer

        self.case = case
        self.config = OptimizerConfig(
            optimizer="sgd", lr=1.0, bf16=True, log_num_zeros_in_grad=case.count_zeros, **dict(case.settings)
        )
        self.config.use_precision_aware_optimizer = case.precision_aware  # OptimizerConfig() refuses it with SGD
        self.model_params: list[torch.nn.Parameter] = []
        self.shards: list[tuple[int, Parameter, int]] = []
        optimizers = []
        first = 0
        for leaf in case.leaves:
            owned = leaf.owned(rank, world)
            params = [self._make(each, place) for _, each, place in owned]
            self.shards += [(first + number, each, place) for number, each, place in owned]
            self.model_params += params
            optimizers.append(self._wrap(leaf, params))
            optimizers[-1].grad_stats_parallel_group = half if leaf.halves else everybody
            first += len(leaf.parameters)
        self.leaves = list(optimizers)
        if case.nesting == "nested":
            optimizers = [ChainedOptimizer(optimizers[:2]), *optimizers[2:]]
        self.optimizer = optimizers[0] if case.nesting == "alone" else ChainedOptimizer(optimizers)

    @staticmethod
    def _make(each: Parameter, place: int) -> torch.nn.Parameter:
        dtype = torch.bfloat16 if each.half else torch.float32
        param = torch.nn.Parameter(each.shard(torch.zeros(each.shape, dtype=dtype), place).clone())
        if each.heads:
            param.grad_norm_group = "mtp"
        if each.shared:
            param.shared = True
        param.tensor_model_parallel = each.owners is not None
        return param

    def _wrap(self, leaf: Leaf, params: list[torch.nn.Parameter]) -> Any:
        from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

        inner = None if leaf.stub_if_empty and not params else torch.optim.SGD([{"params": list(params)}], lr=1.0)
        optimizer: Any
        if leaf.mixed_precision:
            optimizer = Float16OptimizerWithFloat16Params(inner, self.config, None, lambda *args: None)
        else:
            optimizer = FP32Optimizer(inner, self.config, lambda *args: None)
        optimizer.skip_grad_norm_clip = leaf.exempt
        return optimizer

    def params(self) -> list[torch.nn.Parameter]:
        """Return the parameters that are updated, in float32: main params for parameters in half precision."""
        return [param for leaf in self.leaves for param in leaf.get_parameters()]

    @torch.no_grad()
    def begin_step(self, step: int) -> list[Gradient]:
        """Set gradients and zero parameters: SGD with lr 1 then leaves minus the update in each parameter."""
        self.optimizer.zero_grad()
        for param in (*self.model_params, *self.params()):
            param.zero_()
        whole = self.case.gradients(step)
        for param, (index, each, place) in zip(self.model_params, self.shards, strict=True):
            values = whole[index].values
            if values is not None:
                param.main_grad = each.shard(values, place).clone()
            elif each.half and hasattr(param, "main_grad"):
                del param.main_grad
            elif not each.half:
                param.main_grad = None
        return whole

    def reference_step(self, step: int, **settings: Any) -> Outcome:
        """Begin the step. Return the expected outcome under these settings, or those of the case."""
        from megatron.core.optimizer import clip_grads

        on_device = getattr(clip_grads, "multi_tensor_scale_tensor_impl", None) is not None
        return expected_step(self.begin_step(step), dict(self.case.settings) | settings, nan_spreads=on_device)

    def updated_with(self) -> list[torch.Tensor]:
        return [-param.detach() for param in self.params()]

    def shards_of(self, whole: list[torch.Tensor | None]) -> list[torch.Tensor]:
        """Return the shards of `whole` that this rank's parameters are; None counts as 0."""
        return [
            each.shard(torch.zeros(each.shape) if whole[index] is None else whole[index], place)
            for index, each, place in self.shards
        ]
