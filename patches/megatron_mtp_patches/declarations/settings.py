"""A setting that a patch adds, among its `edits`: its field, flag, checks and texts are made from one declaration.

norms/floor_clip_coefficient.py is a short example.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import NoneType

from ..engine import AddField, AddFlag, Edit, Wrap

ADD_ARGUMENTS = "megatron.training.arguments:add_megatron_arguments"
TRANSFORMER_CONFIG = "megatron.core.transformer.transformer_config:TransformerConfig"
OPTIMIZER_CONFIG = "megatron.core.optimizer.optimizer_config:OptimizerConfig"

_WRAPPERS = "megatron_overrides.settings.check_where_read"
# The places where settings are read: Megatron's arguments, both configurations, and the start of every optimizer.
CHECK_SETTINGS = (
    Wrap(f"{OPTIMIZER_CONFIG}.__post_init__", f"{_WRAPPERS}:check_new_optimizer_configuration", check_source=False),
    Wrap(f"{TRANSFORMER_CONFIG}.__post_init__", f"{_WRAPPERS}:check_new_model_configuration", check_source=False),
    Wrap("megatron.training.arguments:validate_args", f"{_WRAPPERS}:check_arguments", check_source=False),
    Wrap("megatron.core.optimizer:_get_param_groups", f"{_WRAPPERS}:check_configs", check_source=False),
)
# A YAML configuration that was written for the release keeps working.
DEFAULT_IN_YAML = Wrap(
    "megatron.training.yaml_arguments:core_config_from_args", f"{_WRAPPERS}:default_added_fields", check_source=False
)


@dataclass(frozen=True, eq=False)
class Setting:
    """A field of one of Megatron's configurations, the flag that sets it, and the values that it refuses.

    Attributes:
        name: that of the field; the flag is spelled alike.
        type: the field's annotation. A bool takes True and False only, and its flag is a switch.
        default: its value if it is not set, with which it does nothing new.
        help: what it does, in a sentence, for `--help` and the pages.
        unit: of an int, what it counts and what 0 means, for the message that refuses other numbers.
        choices: the values that it takes, if they are few.
        check: "module:function" in megatron_overrides that raises ValueError for other values or combinations. It is
            called wherever settings are read, with what is known there: a configuration as it is created, Megatron's
            arguments, and, at the start of an optimizer, its configuration, in one with the model's if this has heads.
            It lets a combination pass of which it gets a part.
        example: a valid value for tests, where no value of the type serves.
        metavar: what stands for the value in `--help`.
        is_upstream: newer releases have the field.
        named_in: the number of an upstream change that has a field of this name and is in no known release; 0 for none.
        in_ms_swift: it also acts in the models of mcore-bridge. `megatron sft` of ms-swift takes it as an argument, as
            all settings of the optimizer; other settings are refused there.
    """

    name: str
    type: object
    default: object
    help: str
    unit: str = ""
    choices: tuple[object, ...] = ()
    check: str = ""
    example: object = None
    metavar: str | None = None
    is_upstream: bool = False
    named_in: int = 0
    in_ms_swift: bool = False

    @property
    def field_metadata(self) -> dict[str, object]:
        """The metadata from which Megatron makes the flag of the field."""
        return {"argparse_meta": {"help": self.help}}

    def field_edit(self, configuration: str) -> AddField:
        """Return the edit that adds the field to a configuration class."""
        return AddField(
            configuration,
            field=self.name,
            type=self.type,
            default=self.default,
            doc=self.help,
            is_upstream=self.is_upstream,
            named_in=self.named_in,
            setting=self,
        )


def model_setting(setting: Setting) -> tuple[Edit, ...]:
    """Return the edits for a field of TransformerConfig; Megatron makes the flag of it."""
    return (setting.field_edit(TRANSFORMER_CONFIG), DEFAULT_IN_YAML, *CHECK_SETTINGS)


def optimizer_setting(setting: Setting) -> tuple[Edit, ...]:
    """Return the edits for a field of OptimizerConfig and its flag; Megatron carries the one over to the other."""
    flag = AddFlag(
        ADD_ARGUMENTS,
        flag=f"--{setting.name.replace('_', '-')}",
        type=_flag_type(setting.type),
        default=setting.default,
        help=setting.help,
        metavar=setting.metavar,
    )
    return (setting.field_edit(OPTIMIZER_CONFIG), flag, *CHECK_SETTINGS)


def _flag_type(annotation: object) -> object:
    """Return `float` for `float | None`: what argparse makes of the word."""
    return next((kind for kind in getattr(annotation, "__args__", ()) if kind is not NoneType), annotation)
