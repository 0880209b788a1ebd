"""`load`: imports an optional package, or says which extra installs it."""

import importlib
from typing import Any


def load(module: str, extra: str | None = None) -> Any:
    """Imports a module of a package that an extra installs.

    Args:
        module: its name.
        extra: the extra, by default the one called like the package.

    Raises:
        ModuleNotFoundError: if the package, or one that it needs, is not installed; the
            message has the command that installs both.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        extra = module.partition(".")[0] if extra is None else extra
        raise ModuleNotFoundError(
            f'{error.name} is not installed: pip install ".[{extra}]"', name=error.name
        ) from error
