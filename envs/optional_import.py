"""`load`: imports an optional package, or names the extra that installs it."""

import importlib
from typing import Any


def load(module: str, extra: str | None = None) -> Any:
    """Imports a module of an optional package.

    Args:
        module: name of the module.
        extra: name of the extra that installs the package. The default is the name of
            the package.

    Raises:
        ModuleNotFoundError: if the package or one of its dependencies is not installed;
            the message contains the install command.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        extra = module.partition(".")[0] if extra is None else extra
        raise ModuleNotFoundError(
            f'{error.name} is not installed: pip install ".[{extra}]"', name=error.name
        ) from error
