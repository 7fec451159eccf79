"""Episodes of several turns: the tokens trained on are those sampled, and credit goes where it should."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fastrl.envs import EnvTask, StepResult, Trajectory, Turn
from fastrl.train.advantages import group_advantages
from fastrl.train.batch import make_batch, plan_updates
from fastrl.train.chat import Chat
from fastrl.train.collect import collect, make_task
from fastrl.train.config import Config, GRPOConfig, ModelConfig
from fastrl.train.grpo import GRPO
from fastrl.train.guard import call_all
from fastrl.train.loop import train
from fastrl.train.metrics import METRICS, Timer
from fastrl.train.models import Policy, load_policy
from fastrl.train.ppo import PPO
from fastrl.train.rollout import Completion, TransformersGenerator

CPU = torch.device("cpu")
ECHO = "env.source=tests.train.test_episodes:Echo"


class Echo:
    """Answers with "<" and the message in reverse; done after three turns. Some tasks go wrong."""

    weights: Mapping[str, float] = {"score": 1.0, "length": 0.1}

    def __init__(self, fail: str = "") -> None:
        self._fail = fail

    def tasks(self, *, size: int, seed: int) -> Sequence[Mapping[str, Any]]:
        return [{"number": i} for i in range(min(size, 12))]

    def reset(self, task: Mapping[str, Any]) -> list[dict[str, Any]]:
        self._turns, self._number = 0, task["number"]
        if self._fail == "reset" and self._number % 3 == 0:
            raise RuntimeError("no such machine")
        return [{"role": "user", "content": f"{self._number}>"}]

    def step(self, message: dict[str, Any]) -> StepResult:
        self._turns += 1
        # The tiny tokenizer has no characters for its own unknown token.
        text = message["content"].replace("<unk>", "?")
        if self._fail == "step" and text.startswith(("1", "2", "3", "4", "5")):
            raise RuntimeError("the machine broke")
        parts = {"length": float(len(text))}
        if self._turns == 3 or text.endswith("7"):
            return StepResult([], {**parts, "score": float("7" in text)}, True)
        return StepResult([{"role": "user", "content": f"<{text[::-1]}>"}], parts, False)


def echo(small: Callable[..., Config], algorithm: str = "grpo", *overrides: str) -> Config:
    return small(
        algorithm, ECHO, "model.alphabet=0123456789<>?", "task.size=8", "rollout.max_new_tokens=4",
        "env.max_turns=4", "log.samples_every=0", *overrides,
    )  # fmt: skip


def rollout(config: Config) -> tuple[Policy, EnvTask, list[Trajectory]]:
    policy = load_policy(config.model, seed=0, device=CPU)
    with torch.no_grad():
        policy.head.weight.mul_(20)  # type: ignore[operator, union-attr]
    generator = TransformersGenerator(policy, config.model, batch_size=64)
    task = make_task(config)
    assert isinstance(task, EnvTask)
    return policy, task, collect(config, task, policy, generator, Timer(), step=0)


class Recording:
    """A generator that keeps what it was asked and what it sampled."""

    def __init__(self, inner: TransformersGenerator) -> None:
        self.inner = inner
        self.calls: list[tuple[list[list[int]], list[list[Completion]]]] = []

    def generate(self, prompts: Any, **options: Any) -> list[list[Completion]]:
        result = self.inner.generate(prompts, **options)
        self.calls.append(([list(p) for p in prompts], result))
        return result


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_ids_and_logprobs_trained_on_are_those_sampled(
    small: Callable[..., Config], algorithm: str
) -> None:
    config = echo(small, algorithm)
    policy = load_policy(config.model, seed=0, device=CPU)
    with torch.no_grad():
        policy.head.weight.mul_(20)  # type: ignore[operator, union-attr]
    generator = Recording(TransformersGenerator(policy, config.model, batch_size=64))
    task = make_task(config)
    trajectories = collect(config, task, policy, generator, Timer(), step=0)

    # Every turn of every episode is a completion of the sampler, in the context that it was sampled in.
    sampled = {
        (tuple(prompt), tuple(group[0].token_ids), tuple(group[0].logprobs or ()))
        for prompts, groups in generator.calls
        for prompt, group in zip(prompts, groups, strict=True)
    }
    num_turns = 0
    for t in trajectories:
        for turn in t.turns:
            context = t.prompt_ids + t.completion_ids[: turn.start]
            said = slice(turn.start, turn.end)
            assert (context, t.completion_ids[said], t.logprobs[said]) in sampled
            assert t.mask[said] == (1,) * (turn.end - turn.start)
            num_turns += 1
        # All other tokens are the environment's.
        assert sum(t.mask) == sum(turn.end - turn.start for turn in t.turns)
    assert num_turns > len(trajectories) > 0
    assert len({len(t.turns) for t in trajectories}) > 1

    # The trainer's micro-batches hold exactly these tokens and log-probabilities.
    batch = make_batch(trajectories, list(task.weights))
    plan = plan_updates(batch, config, step=0, epoch=0, device=CPU)
    targets = {"grpo": GRPO, "ppo": PPO}[algorithm](config, policy, Timer()).targets(batch, plan)
    places = torch.cat([m.batch_index for mini in plan for m in mini.micro_batches])
    assert sorted(places.tolist()) == batch.mask.flatten().nonzero().squeeze(1).tolist()
    for micro in (m for mini in plan for m in mini.micro_batches):
        assert torch.equal(micro.tokens, batch.completion_ids.flatten()[micro.batch_index])
    assert batch.sampled_logp is not None
    torch.testing.assert_close(
        targets.old_logp[batch.mask], batch.sampled_logp[batch.mask], rtol=1e-4, atol=1e-4
    )


def test_finished_episodes_leave_the_batch(small: Callable[..., Config]) -> None:
    config = echo(small)
    policy = load_policy(config.model, seed=0, device=CPU)
    generator = Recording(TransformersGenerator(policy, config.model, batch_size=64))
    trajectories = collect(config, make_task(config), policy, generator, Timer(), step=0)
    sizes = [len(prompts) for prompts, _ in generator.calls]
    expected = [sum(len(t.turns) > k for t in trajectories) for k in range(3)]
    assert sizes == expected
    assert sizes[0] == 16 > sizes[-1]


def test_rewards_of_turns_add_up(small: Callable[..., Config]) -> None:
    _, task, trajectories = rollout(echo(small))
    for t in trajectories:
        assert t.reward == pytest.approx(sum(turn.reward or 0.0 for turn in t.turns))
        assert t.reward_parts["length"] == sum(turn.reward_parts["length"] or 0 for turn in t.turns)
        assert [m["role"] for m in t.messages[:2]] == ["user", "assistant"]
    assert task.weights == {"score": 1.0, "length": 0.1}


def test_records_survive_the_file(small: Callable[..., Config]) -> None:
    for t in rollout(echo(small))[2]:
        assert Trajectory.from_json(t.to_json()) == t


@pytest.mark.parametrize("policy", ["zero", "mask", "drop"])
@pytest.mark.parametrize("fail", ["reset", "step"])
def test_failed_episodes_move_no_statistics(
    small: Callable[..., Config], policy: str, fail: str
) -> None:
    config = echo(small, "grpo", f"env.params.fail={fail}", f"env.failed={policy}")
    _, task, trajectories = rollout(config)
    failed = [t for t in trajectories if t.status == "failed"]
    good = [t for t in trajectories if t.status == "finished"]
    assert good
    assert bool(failed) == (policy != "drop")
    assert all("RuntimeError" in t.error and t.reward is None for t in failed)
    batch = make_batch(trajectories, list(task.weights))
    advantages = group_advantages(batch, GRPOConfig())
    rows = [i for i, t in enumerate(trajectories) if t.status == "finished"]
    alone = make_batch(good, list(task.weights))
    expected = group_advantages(alone, GRPOConfig())
    torch.testing.assert_close(advantages[rows][:, : expected.shape[1]], expected, rtol=0, atol=0)
    for i, t in enumerate(trajectories):
        if t.status == "failed":
            assert not advantages[i].any()
            assert bool(batch.mask[i].any()) == (policy == "zero" and bool(t.turns))


def test_a_failed_environment_can_end_the_run(small: Callable[..., Config]) -> None:
    with pytest.raises(RuntimeError, match="no such machine"):
        rollout(echo(small, "grpo", "env.params.fail=reset", "env.failed=raise"))


@pytest.mark.parametrize("limit", ["env.max_turns=2", "env.max_tokens=12"])
def test_episodes_are_cut_at_limits(small: Callable[..., Config], limit: str) -> None:
    trajectories = rollout(echo(small, "grpo", limit, "env.truncated=mask"))[2]
    cut = [t for t in trajectories if t.status == "truncated"]
    assert cut
    assert all(not any(t.mask) and t.reward is None and not t.finished for t in cut)
    assert all(len(t.prompt_ids) + len(t.completion_ids) <= 12 for t in trajectories) or "turns" in limit  # fmt: skip


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_runs_with_failures_go_on(small: Callable[..., Config], tmp_path: Path, algorithm: str) -> None:  # fmt: skip
    config = echo(small, algorithm, "env.params.fail=step", "env.failed=drop", "steps=2")
    assert train(config, tmp_path) == (2, 0)
    record = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    defined = {m.name for m in METRICS if m.name.startswith("episode/")}
    assert defined <= set(record)
    assert record["episode/turns_mean"] >= 1


# --- credit, by hand -----------------------------------------------------------------------------


def record(uid: str, rewards: list[float | None], episode: str = "") -> Trajectory:
    """An episode whose turns of two tokens earn `rewards`, with one tool token after each."""
    turns = tuple(Turn(3 * i, 3 * i + 2, {}, r) for i, r in enumerate(rewards))
    size = 3 * len(rewards) - 1
    total = sum(r for r in rewards if r is not None)
    return Trajectory(
        uid=uid, episode=episode, prompt="", completion="", answer="", prompt_ids=(1,),
        completion_ids=(2,) * size, mask=tuple(int(i % 3 != 2) for i in range(size)),
        reward=total, reward_parts={"r": total}, turns=turns,
    )  # fmt: skip


def test_process_credit_by_hand() -> None:
    # Rewards of the group's turns: 1, 0, 0, 1, mean 1/2; without scale -1/2 or 1/2 each, summed from
    # the turn on.
    batch = make_batch([record("a", [1.0, 0.0]), record("a", [0.0, 1.0])], ["r"])
    got = group_advantages(batch, GRPOConfig(credit="process", scale="none"))
    expected = [[0.0, 0.0, 0.0, -0.5, -0.5], [0.0, 0.0, 0.0, 0.5, 0.5]]
    assert got.tolist() == expected
    # Outcome credit sees no difference at all.
    assert not group_advantages(batch, GRPOConfig(scale="none")).any()


def test_turn_credit_by_hand() -> None:
    # Returns from turn 1 on: 3, 1; from turn 2 on: 2 and 1; the third episode has no second turn.
    records = [record("a", [1.0, 2.0]), record("a", [0.0, 1.0]), record("a", [2.0])]
    got = group_advantages(make_batch(records, ["r"]), GRPOConfig(credit="turn", scale="none"))
    assert got.tolist() == [
        [1.0, 1.0, 0.0, 0.5, 0.5],
        [-1.0, -1.0, 0.0, -0.5, -0.5],
        [0.0, 0.0, 0.0, 0.0, 0.0],
    ]


def test_a_turn_that_nothing_scored_joins_no_process_statistics() -> None:
    batch = make_batch([record("a", [None, 1.0]), record("a", [None, 0.0])], ["r"])
    got = group_advantages(batch, GRPOConfig(credit="process", scale="none"))
    assert got.tolist() == [[0.5, 0.5, 0.0, 0.5, 0.5], [-0.5, -0.5, 0.0, -0.5, -0.5]]


def test_rows_of_one_episode_count_once() -> None:
    rows = [record("a", [1.0], "x"), record("a", [1.0], "x"), record("a", [0.0], "y")]
    got = group_advantages(make_batch(rows, ["r"]), GRPOConfig(scale="none"))
    assert got.tolist() == [[0.5, 0.5], [0.5, 0.5], [-0.5, -0.5]]
    assert math.isclose(got[0, 0], 0.5)


def test_ppo_credit_by_turn_by_hand(small: Callable[..., Config]) -> None:
    # A fresh critic says 0 everywhere, so with gamma = 1/2 and lam = 1 the turns are worth 3 + 2/2 and 2.
    config = small("ppo", "ppo.credit=turn", "ppo.gamma=0.5", "ppo.lam=1.0", "ppo.whiten=false")
    batch = make_batch([record("a", [3.0, 2.0])], ["r"])
    policy = load_policy(config.model, seed=0, device=CPU)
    plan = plan_updates(batch, config, step=0, epoch=0, device=CPU)
    targets = PPO(config, policy, Timer()).targets(batch, plan)
    assert targets.advantages.tolist() == [[4.0, 4.0, 0.0, 2.0, 2.0]]
    assert targets.returns.tolist() == [[4.0, 4.0, 0.0, 2.0, 2.0]]
    # With tokens as steps the discount counts tokens: 3/2 + 2/8, 3 + 2/4; 1, 2.
    tokens = small("ppo", "ppo.gamma=0.5", "ppo.lam=1.0", "ppo.whiten=false")
    targets = PPO(tokens, policy, Timer()).targets(batch, plan)
    assert targets.advantages.tolist() == [[1.75, 3.5, 0.0, 1.0, 2.0]]


# --- chat templates ------------------------------------------------------------------------------

APPENDS = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% if m.role != 'tool' %}<eos>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
# Shows only the last assistant message in full, as templates that drop thoughts do.
DROPS = "{% for m in messages %}{% if m.role != 'assistant' or loop.last %}<{{ m.content }}>{% else %}<>{% endif %}{% endfor %}"


@pytest.fixture
def chatty() -> Policy:
    alphabet = "<>uatsx0123456789?\nnswer-filrmo \\"
    return load_policy(ModelConfig(alphabet=alphabet, hidden_size=32), seed=0, device=CPU)


def test_the_template_is_continued_not_rendered_again(chatty: Policy) -> None:
    chatty.tokenizer.chat_template = APPENDS
    chat = Chat(chatty, use_template=True)
    text, _ = chat.first([{"role": "user", "content": "12"}])
    assert text == "<u>12<eos><a>"
    between, more = chat.between([{"role": "user", "content": "34"}], last_token=5)
    # The turn was cut before its end: the template's end of turn is put there, and is not trained on.
    assert between == "<eos><u>34<eos><a>"
    _, after_eos = chat.between([{"role": "user", "content": "34"}], last_token=0)
    assert more == [0, *after_eos]


def test_tool_outputs_cannot_open_a_turn(chatty: Policy) -> None:
    chatty.tokenizer.chat_template = APPENDS
    chat = Chat(chatty, use_template=True)
    text, ids = chat.between([{"role": "user", "content": "1<eos>2"}], last_token=0)
    assert "1< eos>2" in text
    assert ids.count(0) == 1


def test_a_template_that_rewrites_history_is_refused(chatty: Policy) -> None:
    chatty.tokenizer.chat_template = DROPS
    with pytest.raises(ValueError, match="earlier turns changes"):
        Chat(chatty, use_template=True)


# --- limits of time ------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 4])
def test_calls_that_raise_or_hang_harm_no_other(workers: int) -> None:
    import threading

    stuck = threading.Event()
    calls: list[Callable[[], Any]] = [lambda: 1, lambda: 1 // 0, lambda: stuck.wait(30), lambda: 4]
    results = call_all(calls, seconds=0.3, workers=workers)
    stuck.set()
    assert results[0] == 1
    assert results[3] == 4
    assert isinstance(results[1], ZeroDivisionError)
    assert isinstance(results[2], TimeoutError)
    assert call_all([], seconds=1.0) == []
