"""Replacing functions of other packages: by version, once, on the record, and reversibly."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from importlib import metadata
from typing import Any, NamedTuple

from fastrl.errors import FastrlError
from fastrl.presets._tokens import NotCovered


class VersionError(FastrlError, ImportError):
    """A trainer is missing, or in a version that the integration was not tested with."""


class Replaced(NamedTuple):
    """One name that now leads to fastrl; ``original`` is None for one that was added."""

    package: str
    name: str
    owner: Any
    key: str
    original: Any
    is_mapping: bool


_replaced: list[Replaced] = []


def check_version(package: str, tested: tuple[str, ...], how: str = "tested with") -> None:
    """Refuse a version of ``package`` that was not tested, unless FASTRL_UNCHECKED_VERSIONS=1.

    ``how`` is "written against" for packages that no test can install.
    """
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError as error:
        raise VersionError(
            f"fastrl.integrations: {package} must be installed, in version {' or '.join(tested)}; "
            f"pip install {package}=={tested[-1]}"
        ) from error
    if found not in tested and os.environ.get("FASTRL_UNCHECKED_VERSIONS") != "1":
        raise VersionError(
            f"fastrl.integrations: {package} must be {' or '.join(tested)}, the versions this was {how}, "
            f"got {found}; set FASTRL_UNCHECKED_VERSIONS=1 to run it all the same"
        )


def import_checkout(package: str, module: str, how: str) -> Any:
    """A module of a trainer that has no versions; ``how`` says where the package comes from."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise VersionError(
            f"fastrl.integrations: {package} must be importable, {error}; {how}"
        ) from error


def check_arguments(package: str, theirs: Any, ours: Any) -> None:
    """For trainers without a version: refuse one whose function takes other arguments than ours, by name and order."""
    found, wanted = (list(inspect.signature(each).parameters) for each in (theirs, ours))
    if found != wanted and os.environ.get("FASTRL_UNCHECKED_VERSIONS") != "1":
        raise VersionError(
            f"fastrl.integrations: {package}'s {ours.__name__} must take ({', '.join(wanted)}) as when this was written, "
            f"got ({', '.join(found)}); set FASTRL_UNCHECKED_VERSIONS=1 to run it all the same"
        )


def replace(package: str, owner: Any, key: str, new: Any) -> None:
    """Set ``owner.key``, or ``owner[key]`` of a dict, to ``new`` and remember what stood there."""
    is_mapping = isinstance(owner, dict)
    old = owner.get(key) if is_mapping else getattr(owner, key)
    if old is new:
        return
    name = f"{getattr(owner, '__name__', package)}.{key}"
    if is_mapping:
        name = f"{package} registry: {key}"
        owner[key] = new
    else:
        setattr(owner, key, new)
    _replaced.append(Replaced(package, name, owner, key, old, is_mapping))


def replace_everywhere(package: str, key: str, old: Any, new: Any) -> None:
    """Replace ``old`` in every loaded module of ``package`` that has it under the name ``key``."""
    inside = (package, f"{package}.")
    for name, module in list(sys.modules.items()):
        if (name == inside[0] or name.startswith(inside[1])) and vars(module).get(key) is old:
            replace(package, module, key, new)


def or_theirs(ours: Any, theirs: Any) -> Any:
    """``ours``, or ``theirs`` for the options that ours refuses with ``NotCovered``; a second time the same."""
    if hasattr(theirs, "fastrl"):
        return theirs

    @functools.wraps(theirs)
    def choose(*args: Any, **kwargs: Any) -> Any:
        try:
            return ours(*args, **kwargs)
        except NotCovered:
            return theirs(*args, **kwargs)

    choose.fastrl = ours  # type: ignore[attr-defined]
    return choose


def restore(package: str) -> None:
    """Put back everything of ``package`` that :func:`replace` has set, last first."""
    for item in [r for r in reversed(_replaced) if r.package == package]:
        if not item.is_mapping:
            setattr(item.owner, item.key, item.original)
        elif item.original is None:
            item.owner.pop(item.key, None)
        else:
            item.owner[item.key] = item.original
        _replaced.remove(item)


def report() -> list[str]:
    """What leads to fastrl in this process, one line each, in the order in which it was replaced.

    >>> report()
    []
    """
    return [f"{item.package}: {item.name}" for item in _replaced]
