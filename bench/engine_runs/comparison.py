"""Turns of all variants set against the baseline: ratios of medians, their spread, other answers.

Only turns that both have played are compared, round by round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from bench.engine_runs.conversations import LONG_TOKENS, Turn

GROUPS: dict[str, Callable[[Turn], bool]] = {
    "cold": lambda turn: turn.is_cold,
    f"returning, >= {LONG_TOKENS:,} tokens": lambda turn: turn.is_long,
    f"returning, < {LONG_TOKENS:,} tokens": lambda turn: not turn.is_cold and not turn.is_long,
}
COLD, LONG, SHORT = GROUPS

Cell = tuple[int, int, int]


def cell(turn: Turn) -> Cell:
    """Round, conversation and turn: what is compared has these in common."""
    return turn.round, turn.conversation, turn.turn


@dataclass(frozen=True, slots=True)
class Comparison:
    """One variant in one group of turns.

    Attributes:
        turns: how many were compared.
        ratio: median TTFT over the baseline's median TTFT on the same turns.
        paired: the median of the turns' own ratios, which does not mix long with short.
        cpu_ratio: as `paired`, of the CPU time up to the first token.
        by_round: `ratio` of each round alone.
        paired_by_round: `paired` of each round alone.
    """

    variant: str
    group: str
    turns: int
    ttft_s: float
    baseline_s: float
    ratio: float
    paired: float
    by_round: tuple[float, ...]
    paired_by_round: tuple[float, ...]
    reused_tokens: float
    cpu_ratio: float
    settle_s: float


def compare(turns: Sequence[Turn], variant: str, baseline: str, group: str) -> Comparison | None:
    """None where they have no turn of the group in common.

    Of a variant that restarts its engine the returning turns after that count, and no others.
    """
    belongs = GROUPS[group]
    theirs = {cell(turn): turn for turn in turns if turn.variant == baseline}
    pairs = [
        (turn, theirs[cell(turn)])
        for turn in counted(turns, variant)
        if belongs(turn) and cell(turn) in theirs
    ]
    if not pairs:
        return None
    rounds = sorted({turn.round for turn, _ in pairs})
    each = [[pair for pair in pairs if pair[0].round == number] for number in rounds]
    return Comparison(
        variant=variant,
        group=group,
        turns=len(pairs),
        ttft_s=median(turn.ttft_s for turn, _ in pairs),
        baseline_s=median(other.ttft_s for _, other in pairs),
        ratio=_ratio(pairs),
        paired=_paired(pairs),
        by_round=tuple(_ratio(some) for some in each),
        paired_by_round=tuple(_paired(some) for some in each),
        reused_tokens=median(turn.reused_tokens for turn, _ in pairs),
        cpu_ratio=median(turn.ttft_cpu_s / other.ttft_cpu_s for turn, other in pairs),
        settle_s=median(turn.settle_s for turn, _ in pairs),
    )


def counted(turns: Iterable[Turn], variant: str) -> list[Turn]:
    """Turns of a variant, without those returning ones that came before its restart."""
    own = [turn for turn in turns if turn.variant == variant]
    restarts = any(turn.phase == "restarted" for turn in own)
    return [turn for turn in own if not restarts or turn.is_cold or turn.phase == "restarted"]


Pair = tuple[Turn, Turn]


def _ratio(pairs: Sequence[Pair]) -> float:
    own = median(turn.ttft_s for turn, _ in pairs)
    return own / median(other.ttft_s for _, other in pairs)


def _paired(pairs: Sequence[Pair]) -> float:
    return median(turn.ttft_s / other.ttft_s for turn, other in pairs)


def differing_tokens(turns: Sequence[Turn]) -> dict[str, tuple[int, int]]:
    """By variant: answer tokens that are not those of the round's first variant, and all.

    An answer is part of the next prompt, so one other token may bring further ones.
    """
    reference: dict[Cell, tuple[int, ...]] = {}
    found: dict[str, tuple[int, int]] = {}
    for turn in turns:
        expected = reference.setdefault(cell(turn), turn.answer)
        other = sum(mine != theirs for mine, theirs in zip(turn.answer, expected, strict=True))
        differing, count = found.get(turn.variant, (0, 0))
        found[turn.variant] = differing + other, count + len(turn.answer)
    return found


def by_turn(turns: Sequence[Turn], variant: str, *, is_long: bool) -> dict[int, list[float]]:
    """TTFTs of a variant, by turn, of conversations that are long (or short) from their start."""
    first = {
        (turn.round, turn.conversation): turn.prompt_tokens
        for turn in turns
        if turn.variant == variant and turn.turn == 1
    }
    found: dict[int, list[float]] = {}
    for turn in turns:
        start = first.get((turn.round, turn.conversation))
        if turn.variant == variant and start is not None and (start >= LONG_TOKENS) == is_long:
            found.setdefault(turn.turn, []).append(turn.ttft_s)
    return found
