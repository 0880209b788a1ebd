"""`load`: imports a package that need not be installed, or names the extra for it."""

import importlib
from typing import Any


def load(module: str, extra: str | None = None) -> Any:
    """Imports a module of a package that an extra installs, when it is needed.

    Args:
        module: its name.
        extra: the extra, by default that of the package's own name.

    Raises:
        ModuleNotFoundError: if it, or a package that it needs, is not installed; it
            names the command that installs both.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        extra = module.partition(".")[0] if extra is None else extra
        raise ModuleNotFoundError(
            f'{error.name} is not installed: pip install ".[{extra}]"', name=error.name
        ) from error
