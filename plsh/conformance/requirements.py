"""The numbered requirements of the standard, as the suite knows them: ``requirements.toml``."""

import functools
import tomllib
from importlib import resources

__all__ = ["requirements"]


@functools.cache
def requirements() -> dict[str, str]:
    """Return what each requirement of the standard is about, by its id, in the standard's order.

    Examples
    --------
    >>> requirements()["NUM-12"]
    'a batch row does not depend on its mates'
    """
    text = (resources.files(__package__) / "requirements.toml").read_text("utf-8")
    found: dict[str, str] = tomllib.loads(text)["requirements"]
    return found
