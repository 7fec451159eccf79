"""Loading this module installs :mod:`fastrl.integrations.verl`: what verl does with entry points of ``verl.plugins``."""

from fastrl.integrations import verl

verl.plugin()
