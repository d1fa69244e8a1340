"""Reward schemes: plain arithmetic on what the verifier counted.

Assertions come in three kinds. *semantic* ones are the task's work. *hygiene*
ones a do-nothing agent passes already. *gate* ones decide success but earn
nothing. From them come four numbers:

  S   strict success: every assertion passed
  A   assertions passed, of any kind
  P   semantic assertions passed
  D_f the family's scale: the 90th percentile, over the family's tasks, of the
      number of non-hygiene assertions

Every scheme returns a Python float: a reward array built from integers would
truncate 0.7 to 0. An infrastructure failure has no counts and therefore no
reward. A verifier without assertions may still give a verdict of its own.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from t1jax.rollout.trajectory import Outcome

KINDS = ("semantic", "hygiene", "gate")
SCHEMES = ("t1_dense", "fdr", "spr", "binary", "fraction")

# T1's global constant M and Terminal-RSI's scale for a family that was never
# counted.
DEFAULT_MAX_ASSERTIONS = 10.0
FALLBACK_DENOMINATOR = 82.0
_PERCENTILE = 90.0
_DENSE_CEILING = 1.5


@dataclasses.dataclass(frozen=True)
class Counts:
  """What one verification counted.

  Attributes:
    strict: S, every assertion passed.
    passed: A, assertions passed of any kind.
    total: assertions of any kind.
    semantic_passed: P, semantic assertions passed.
    scale: assertions that are not hygiene; what D_f is taken over.
  """

  strict: bool
  passed: int
  total: int
  semantic_passed: int
  scale: int

  def __post_init__(self):
    if not 0 <= self.semantic_passed <= self.passed <= self.total:
      raise ValueError(
        "Counts must satisfy 0 <= semantic_passed <= passed <= total, got"
        f" semantic_passed={self.semantic_passed}, passed={self.passed},"
        f" total={self.total}."
      )
    if self.strict and self.passed != self.total:
      raise ValueError(
        f"Counts say strict success with {self.passed} of {self.total}"
        " assertions passed. Strict means all of them: pass strict=False."
      )


def count(
  assertions: Iterable[tuple[str, str, bool]], *, strict: bool | None = None
) -> Counts:
  """Counts assertions given as (name, kind, passed).

  Args:
    assertions: what the verifier read, in any order.
    strict: the verifier's own verdict. It can only lower the result: success
      needs every assertion as well. None: decided by the assertions alone,
      and no assertion at all is a failure.

  Raises:
    ValueError: a kind outside KINDS.
  """
  assertions = tuple(assertions)
  for position, (name, kind, _) in enumerate(assertions):
    if kind not in KINDS:
      raise ValueError(
        f"Assertion {position} ({name!r}) is of kind {kind!r}; expected one"
        f" of {', '.join(KINDS)}."
      )
  passed = sum(bool(ok) for _, _, ok in assertions)
  everything = passed == len(assertions)
  if strict is None:
    strict = bool(assertions)
  return Counts(
    strict=bool(strict) and everything,
    passed=passed,
    total=len(assertions),
    semantic_passed=sum(
      bool(ok) for _, kind, ok in assertions if kind == "semantic"
    ),
    scale=sum(kind != "hygiene" for _, kind, _ in assertions),
  )


def t1_dense(
  passed: int, *, max_assertions: float = DEFAULT_MAX_ASSERTIONS
) -> float:
  """T1's dense reward, clip(A / M, 0, 1.5), in [0, 1.5].

  The count is absolute and M is one constant for all tasks and batches, so a
  reward never depends on the tasks that happen to share its batch.

  Args:
    passed: A, assertions passed of any kind.
    max_assertions: M > 0.
  """
  _check_positive("max_assertions", max_assertions)
  return min(max(float(passed) / float(max_assertions), 0.0), _DENSE_CEILING)


def fdr(semantic_passed: int, denominator: float) -> float:
  """Family-denominator reward P / D_f, not clipped (Terminal-RSI)."""
  _check_positive("denominator", denominator)
  return float(semantic_passed) / float(denominator)


def spr(strict: bool, semantic_passed: int, denominator: float) -> float:
  """Success-prioritised reward S + P / (P + D_f) (Terminal-RSI).

  Every failure is < 1, every success >= 1, and all are < 2, however many
  assertions a task has.
  """
  _check_positive("denominator", denominator)
  semantic_passed = float(semantic_passed)
  return float(bool(strict)) + semantic_passed / (
    semantic_passed + float(denominator)
  )


def binary(strict: bool) -> float:
  """1.0 for strict success, else 0.0."""
  return float(bool(strict))


def fraction(passed: int, total: int) -> float:
  """A over the task's own number of assertions, in [0, 1]; 0 of 0 is 0."""
  return float(passed) / float(total) if total else 0.0


def family_denominator(scales: Sequence[int]) -> float:
  """D_f: 90th percentile (linear interpolation) of `scales`, at least 1.

  Args:
    scales: for each task of one family, its number of assertions that are
      not hygiene (`Counts.scale`). Empty: FALLBACK_DENOMINATOR.
  """
  if not len(scales):
    return FALLBACK_DENOMINATOR
  scales = np.asarray(scales, dtype=np.float64)
  return max(1.0, float(np.percentile(scales, _PERCENTILE, method="linear")))


def family_denominators(
  scales_by_family: Mapping[str, Sequence[int]],
) -> dict[str, float]:
  """`family_denominator` for every family."""
  return {
    family: family_denominator(scales)
    for family, scales in scales_by_family.items()
  }


def reward_parts(
  counts: Counts,
  family: str,
  denominators: Mapping[str, float],
  *,
  max_assertions: float = DEFAULT_MAX_ASSERTIONS,
) -> dict[str, float]:
  """Every scheme's reward for one verification, keyed as in SCHEMES.

  All are kept because a run that trains on one is read by the others. A
  family missing from `denominators` has the scale FALLBACK_DENOMINATOR.
  """
  denominator = denominators.get(family, FALLBACK_DENOMINATOR)
  return {
    "t1_dense": t1_dense(counts.passed, max_assertions=max_assertions),
    "fdr": fdr(counts.semantic_passed, denominator),
    "spr": spr(counts.strict, counts.semantic_passed, denominator),
    "binary": binary(counts.strict),
    "fraction": fraction(counts.passed, counts.total),
  }


def score(
  outcome: Outcome,
  family: str,
  denominators: Mapping[str, float],
  *,
  scheme: str,
  max_assertions: float = DEFAULT_MAX_ASSERTIONS,
) -> Outcome:
  """The outcome with its reward by `scheme`, and what others would give.

  An infra failure has no verdict and comes back as it is.
  """
  if outcome.status == "infra_failure":
    return outcome
  parts = reward_parts(
    count(
      ((a.name, a.kind, a.passed) for a in outcome.assertions),
      strict=outcome.success,
    ),
    family,
    denominators,
    max_assertions=max_assertions,
  )
  return dataclasses.replace(outcome, reward=parts[scheme], reward_parts=parts)


def check(scheme: str, max_assertions: float) -> None:
  """Raises ValueError unless `score` can use these."""
  if scheme not in SCHEMES:
    raise ValueError(
      f"reward is {scheme!r}; expected one of {', '.join(SCHEMES)}"
    )
  _check_positive("max_assertions", max_assertions)


def _check_positive(name: str, value: float) -> None:
  if not (math.isfinite(value) and value > 0):
    raise ValueError(f"{name} is {value!r}; expected a finite number > 0.")
