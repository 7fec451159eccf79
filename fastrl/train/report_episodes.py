"""Single episodes in a report, turn by turn: the best, the worst, and one that failed or was cut.

Sampled turns are set apart from what the environment said, each with its tokens, whether they were trained
on, and what the turn earned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fastrl.envs import Trajectory

__all__ = ["episodes"]

_CHARACTERS = 1500


def episodes(samples: Sequence[Trajectory], text: Callable[[str], str]) -> str:
    """The section as HTML, "" when `samples` has no episode of turns; `text` escapes what goes into it."""
    chosen = _chosen([t for t in samples if t.turns and t.messages])
    if not chosen:
        return ""
    body = "".join(
        f"<details open><summary>{text(_title(why, t))}</summary>{_turns(t, text)}</details>"
        for why, t in chosen
    )
    return f"<section class=episodes><h2>Episodes</h2>{body}</section>"


def _chosen(samples: Sequence[Trajectory]) -> list[tuple[str, Trajectory]]:
    """Which are shown and why, each once; of equals the latest, which is the more trained one."""
    found: list[tuple[str, Trajectory]] = []
    scored = [(t.reward, i, t) for i, t in enumerate(samples) if t.reward is not None]
    if scored:
        found.append(("best", max(scored, key=lambda s: (s[0], s[1]))[2]))
        found.append(("worst", min(scored, key=lambda s: (s[0], -s[1]))[2]))
    for status in ("failed", "truncated"):
        found += [(status, t) for t in samples if t.status == status][-1:]
    return [(why, t) for i, (why, t) in enumerate(found) if all(t is not o for _, o in found[:i])]


def _title(why: str, t: Trajectory) -> str:
    reward = "not scored" if t.reward is None else f"reward {t.reward:.3f}"
    parts = f" ({_parts(t.reward_parts)})" if len(t.reward_parts) > 1 else ""
    error = f", {t.error}" if t.error else ""
    return f"{why}: step {t.step}, task {t.uid}, {t.status}, {reward}{parts}{error}"


def _parts(parts: Mapping[str, float | None]) -> str:
    return ", ".join(f"{k} {'-' if v is None else format(v, '.3f')}" for k, v in parts.items())


def _turns(t: Trajectory, text: Callable[[str], str]) -> str:
    turns = iter(t.turns)
    rows = []
    for message in t.messages:
        role = str(message.get("role", "?"))
        note, kind = "not trained on", "heard"
        turn = next(turns, None) if role == "assistant" else None
        if turn is not None:
            trained = sum(t.mask[turn.start : turn.end])
            note = f"tokens {turn.start} to {turn.end - 1}, {trained} trained on"
            earned = _parts(turn.reward_parts)
            note, kind = f"{note}; {earned}" if earned else note, "said"
        content = str(message.get("content") or "")
        more = len(content) - _CHARACTERS
        cut = f"<small>{more} characters more</small>" if more > 0 else ""
        rows.append(
            f"<div class={kind}><small>{text(f'{role}, {note}')}</small>"
            f"<pre>{text(content[:_CHARACTERS])}</pre>{cut}</div>"
        )
    return f"<div>{''.join(rows)}</div>"
