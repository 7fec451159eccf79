"""Tasks, environments and trajectories: where questions come from, how they are scored, what is recorded.

Nothing here knows of training, so an environment can be tested, and its records read, without it.
"""

from fastrl.envs.env import Env, EnvTask, Message, StepResult, load_env_task
from fastrl.envs.tasks import Question, Reward, RewardError, Task, as_score, load_task
from fastrl.envs.tools import ToolBox, ToolCall, ToolEnv, parse_tool_calls, tool_schema
from fastrl.envs.trajectory import Trajectory, Turn, read_trajectories, write_trajectories

__all__ = [
    "Env",
    "EnvTask",
    "Message",
    "Question",
    "Reward",
    "RewardError",
    "StepResult",
    "Task",
    "ToolBox",
    "ToolCall",
    "ToolEnv",
    "Trajectory",
    "Turn",
    "as_score",
    "load_env_task",
    "load_task",
    "parse_tool_calls",
    "read_trajectories",
    "tool_schema",
    "write_trajectories",
]
