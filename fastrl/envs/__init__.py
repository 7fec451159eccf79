"""Tasks and trajectories: where questions come from, how answers are scored, what is recorded.

Nothing here knows of training, so an environment can be tested, and its records read, without it.
"""

from fastrl.envs.tasks import Question, Reward, Task, load_task
from fastrl.envs.trajectory import Trajectory, read_trajectories, write_trajectories

__all__ = [
    "Question",
    "Reward",
    "Task",
    "Trajectory",
    "load_task",
    "read_trajectories",
    "write_trajectories",
]
