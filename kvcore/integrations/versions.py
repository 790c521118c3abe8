"""Which versions of a library an integration works with."""

from __future__ import annotations

import importlib.metadata

from kvcore.errors import BackendError, UnsupportedError


def require(package: str, least: str, below: str, extra: str) -> tuple[int, ...]:
    """The installed version of ``package``; least <= version < below.

    BackendError where it is not installed, UnsupportedError outside the range.
    """
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError as error:
        raise BackendError(f"package {package} is not installed: pip install 'kvcore[{extra}]'") from error
    version = parse(found)
    if not parse(least) <= version < parse(below):
        raise UnsupportedError(
            f"{package} {found}: kvcore works inside versions from {least} up to, not including, {below}; "
            f"pip install '{package}>={least},<{below}'"
        )
    return version


def parse(version: str) -> tuple[int, ...]:
    """The leading numbers: "5.24.0.dev0" is (5, 24, 0)."""
    numbers: list[int] = []
    for part in version.split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)
