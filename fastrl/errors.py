"""Every error that fastrl raises on purpose; each is also a built-in type, so callers need not import these."""

from __future__ import annotations


class FastrlError(Exception):
    """Base class: ``except fastrl.errors.FastrlError`` catches whatever the library raises on purpose."""


class ArgumentError(FastrlError, ValueError):
    """An argument has the wrong value, shape, dtype or device."""


class ArgumentTypeError(FastrlError, TypeError):
    """An argument has the wrong Python type."""


class ImplementationError(FastrlError, ValueError):
    """A named implementation does not exist or cannot run here; it is never replaced silently."""
