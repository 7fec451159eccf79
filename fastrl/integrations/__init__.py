"""Real trainers running on fastrl: ``from fastrl.integrations import verl; verl.install()``.

Each names the versions it was tested with or written against, or compares arguments where there are no versions, and
refuses others; ``FASTRL_UNCHECKED_VERSIONS=1`` lets them through.
:func:`report` says what was replaced in this process.
"""

from fastrl.integrations._patch import report

__all__ = ["report"]
