"""Plants a fault of ci/watch/faults.toml in the training of a rank, by functions of its trainer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron_mtp_patches.parity import training as parity_training
from megatron_mtp_patches.parity import weights
from megatron_mtp_patches.parity.samples import Samples

from megatron_overrides.norms.optimizer_tree import leaves

from .changes import change_tensor
from .places import Piece, Places

_SEED = 1234  # Megatron's default
_TAKE = "get_batch_on_this_tp_rank"


class Planter:
    """Makes the change of a fault when and where its row says.

    Args:
        row: of the fault, with what its layout has; a row without `where` has none.
        rank: this one.

    Attributes:
        count: how often this rank has made the change.
    """

    def __init__(self, row: dict[str, Any], rank: int) -> None:
        self._row, self._rank = row, rank
        self._model: Any = None
        self._parameters: dict[str, torch.nn.Parameter] = {}
        self._places: Places | None = None
        self._before: torch.Tensor | None = None
        self._step = 0
        self.count = 0

    @property
    def _is_here(self) -> bool:
        """True if the row names this rank, or all of them."""
        rank = self._row.get("rank")
        return rank in ("all", self._rank) or isinstance(rank, list) and self._rank in rank

    def install(self) -> None:
        """Replace functions of the trainer. What `parity` replaces afterwards calls them."""
        from megatron.core.models.gpt.gpt_model import GPTModel

        parity_training.have_instances_prepared(GPTModel, self._prepare_model)
        from megatron.training import training

        self._watch_steps(training)
        self._replace_fill()
        if self._row.get("where") == "batch":
            self._plant_batches()

    def seed(self) -> list[str]:
        """The flags of this rank that the others do not have."""
        if self._row.get("where") != "seed" or not self._is_here:
            return []
        self.count += 1
        return ["--seed", str(_SEED + self._row["change"]["add"])]

    def _prepare_model(self, model: Any) -> None:
        """Freeze what the layout freezes, and give a parameter its mark."""
        self._model = model
        self._parameters = dict(model.named_parameters())
        for name, param in self._parameters.items():
            if "frozen" in self._row and name.startswith(self._row["frozen"]):
                param.requires_grad_(False)
        name = self._row.get("tensor")
        if self._row.get("where") == "mark" and self._is_here and name in self._parameters:
            setattr(self._parameters[name], self._row["mark"], self._row["change"]["value"])
            self.count += 1

    def _replace_fill(self) -> None:
        """Give weights what the row says after `parity` has filled them; none where a seed has to decide."""
        fill = weights.fill

        def fill_and_give(*values: Any) -> None:
            if self._row.get("where") == "seed":
                return
            fill(*values)
            for name, parts in self._row.get("weights", {}).items():
                for part, value in parts.items():
                    start, stop = map(int, part.split(":"))
                    self._parameters[name].data.view(-1)[start:stop] = value

        weights.fill = fill_and_give

    def _watch_steps(self, training: Any) -> None:
        set_up, train_step = training.setup_model_and_optimizer, training.train_step

        @functools.wraps(set_up)
        def set_up_and_plant(*values: Any, **named: Any) -> Any:
            model, optimizer, *rest = set_up(*values, **named)
            self._places = Places(self._parameters, model, optimizer)
            step = optimizer.step

            def step_and_plant() -> Any:
                self._plant("check")
                self._remember()
                result = step()
                self._plant("update")
                return result

            optimizer.step = step_and_plant
            if self._row.get("at") == "during update":
                for leaf in leaves(optimizer):
                    if getattr(leaf, "optimizer", None) is not None:
                        leaf.optimizer.step = self._during(leaf.optimizer.step)
            return model, optimizer, *rest

        @functools.wraps(train_step)
        def count_and_train(*values: Any, **named: Any) -> Any:
            self._step += 1
            self._plant("forward")
            return train_step(*values, **named)

        training.setup_model_and_optimizer, training.train_step = set_up_and_plant, count_and_train

    def _during(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The step of a torch optimizer, with the change in its place or after it."""

        @functools.wraps(step)
        def step_and_plant(*values: Any, **named: Any) -> Any:
            if self._step == self._row["step"] and self._is_here and self._row["where"] == "update":
                self.count += 1
                return None
            result = step(*values, **named)
            if not self.count:
                self._plant("during update")
            return result

        return step_and_plant

    def _plant(self, moment: str) -> None:
        row = self._row
        if row.get("at") != moment or row["where"] in ("batch", "update", "seed", "mark"):
            return
        is_due = self._step >= row["step"] if "zero" in row["change"] else self._step == row["step"]
        if is_due and (self._is_first_owner() if row["rank"] == "owner" else self._is_here):
            piece = self._find(row["tensor"])
            if piece is not None and change_tensor(piece, row["change"], self._before, self._find):
                self.count += 1

    def _is_first_owner(self) -> bool:
        """True on the first rank whose optimizer, or shard, has the element. A collective of all ranks."""
        assert self._places is not None
        owners = [False] * dist.get_world_size()
        owns = self._places.owns(self._row["tensor"], self._row["change"]["element"])
        dist.all_gather_object(owners, owns)
        return owns and owners.index(True) == self._rank

    def _remember(self) -> None:
        """Keep the values from before an update."""
        if "restore" in self._row.get("change", {}) and self._is_here:
            piece = self._find(self._row["tensor"])
            assert piece is not None
            self._before = piece.values.clone()

    def _find(self, name: str) -> Piece | None:
        if self._row["where"] == "buffer":
            module, _, attribute = name.rpartition(".")
            return Piece(getattr(self._model.get_submodule(module), attribute).view(-1))
        assert self._places is not None
        return self._places.find(self._row["where"], name, self._row.get("state", ""))

    def _plant_batches(self) -> None:
        change = self._row["change"]
        if "element" in change:
            self._plant_in_fields()
            return
        take = Samples.__getitem__

        def take_others(samples: Samples, index: int) -> dict[str, torch.Tensor]:
            return take(samples, self._other_index(int(index), change))

        Samples.__getitem__ = take_others  # type: ignore[method-assign]

    def _other_index(self, index: int, change: dict[str, Any]) -> int:
        from megatron.core import parallel_state
        from megatron.training import get_args

        arguments = get_args()
        if not self._is_here or index // arguments.global_batch_size + 1 != self._row["step"]:
            return index
        self.count += 1
        if "sample" in change:
            return index + int(change["sample"])
        replicas = parallel_state.get_data_parallel_rank() - change["replica"]
        return index - int(replicas) * int(arguments.micro_batch_size)

    def _plant_in_fields(self) -> None:
        """Change a field of a batch, as the script gets it from Megatron."""
        from megatron.core import utils as of_core
        from megatron.training import utils as of_trainer

        utils = of_core if hasattr(of_core, _TAKE) else of_trainer
        take = getattr(utils, _TAKE)

        @functools.wraps(take)
        def take_and_change(*values: Any, **named: Any) -> Any:
            batch = take(*values, **named)
            if self._step == self._row["step"] and self._is_here:
                field = batch[self._row["tensor"]]
                self.count += change_tensor(Piece(field.view(-1)), self._row["change"], None, lambda name: None)
            return batch

        setattr(utils, _TAKE, take_and_change)
