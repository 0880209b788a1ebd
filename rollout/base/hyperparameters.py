"""`Hyperparameters`: a base class of configs whose errors name the right field."""

from typing import Any, Self

from rollout.base.names import argument_hint, field_hint


class Hyperparameters:
    """Base class of a config: an error for a wrong name contains the right name.

    A subclass is a frozen dataclass.

    Raises:
        TypeError: if a keyword argument is not a field.
    """

    def __new__(cls, *args: Any, **values: Any) -> Self:  # noqa: D102
        del args
        names = cls.__dataclass_fields__  # pyright: ignore[reportAttributeAccessIssue]
        for name in values.keys() - names.keys():
            hint = argument_hint(name) or field_hint(name, names, "`{}`".format)
            hint = hint or f"The fields are {', '.join(names)}."
            raise TypeError(f"`{name}` must be a field of `{cls.__qualname__}`. {hint}")
        return super().__new__(cls)
