"""`record`: what dataclass(frozen=True) makes of a class of declarations.

The library's imports inspect and compiles each class, which is half of what importing the patches would take, in every
process of a training image.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing itself is not imported
if TYPE_CHECKING:
    from dataclasses import dataclass as record

    __all__ = ["record"]
else:

    def record(cls=None, *, eq=True):
        """Give a class an __init__ of its annotated names, those of its bases first, and what goes with it.

        As with dataclass, `__match_args__` has these names, and a subclass of `eq=False` compares by identity.
        """
        if cls is None:
            return lambda cls: record(cls, eq=eq)
        names, defaults = [], {}
        for base in reversed(cls.__mro__[:-1]):
            names += [name for name in base.__annotations__ if name not in names]
            defaults |= {name: vars(base)[name] for name in base.__annotations__ if name in vars(base)}

        def initialise(self, *args, **kwargs):
            if len(args) > len(names) or not kwargs.keys() <= set(names[len(args) :]):
                raise TypeError(f"{cls.__name__} takes {', '.join(names)}, each once")
            values = {**defaults, **dict(zip(names, args)), **kwargs}  # noqa: B905 - not all need be given
            if missing := [name for name in names if name not in values]:
                raise TypeError(f"{cls.__name__} needs {', '.join(missing)}")
            vars(self).update(values)

        def refuse(self, name, value):
            raise AttributeError(f"a {cls.__name__} does not change")

        def describe(self):
            return f"{cls.__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

        cls.__init__, cls.__setattr__, cls.__repr__ = initialise, refuse, describe
        cls.__match_args__ = tuple(names)
        cls.__replace__ = lambda self, **changes: type(self)(**{**vars(self), **changes})
        if eq:
            cls.__eq__ = lambda self, other: type(self) is type(other) and vars(self) == vars(other)
            cls.__hash__ = lambda self: hash((type(self), *vars(self).values()))
        return cls
