"""The public functions of the trainers under their own names and arguments, computed by fastrl.

``from fastrl.presets import verl`` and call ``verl.compute_gae_advantage_return(...)`` as in verl. No preset imports its
trainer. What differs on purpose is in the table of ``fastrl/presets/README.md``.
"""
