"""Optional packages: an error that names the extra, where one is not installed.

Used by the export and the adapters. Must not: import the package.
"""

from __future__ import annotations

import importlib.util
import sys

from pipeline.contract.errors import ConfigError

E_EXTRA = "E112"


class MissingExtra(ConfigError, ImportError):
    """A package of an extra is not installed."""

    code = E_EXTRA


def require_extra(package: str, extra: str, *, use: str) -> None:
    """Check that a package is installed.

    Args:
        package: The name that is imported.
        extra: The extra of this project that brings it.
        use: The feature that needs it, as the beginning of a sentence: `Parquet files need`.

    Raises:
        MissingExtra: The package is not installed.
    """
    if not _is_installed(package):
        raise MissingExtra(
            f"{use} the package {package}, which is not installed.",
            remedy=f'pip install "rollout-pipeline[{extra}]"',
        )


def _is_installed(package: str) -> bool:
    if package in sys.modules:
        return sys.modules[package] is not None
    return importlib.util.find_spec(package) is not None
