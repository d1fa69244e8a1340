"""One truth per trajectory: tokens in, tokens out (TITO).

A token is appended once, with everything that belongs to it. Nothing is ever
decoded and encoded again, so the learner trains on exactly the ids that the
sampler consumed and produced (T1, arXiv 2609.11042, "token-in-token-out").

Axes: T real tokens, L MoE layers, K experts per token.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

STATUSES = ("completed", "truncated", "timeout", "infra_failure")
KINDS = ("semantic", "hygiene", "gate")


class TrajectoryError(ValueError):
  """A trajectory breaks its contract; the message holds the position."""


@dataclasses.dataclass(frozen=True)
class AssertionResult:
  """What the verifier said of one assertion."""

  name: str
  kind: str  # one of KINDS
  passed: bool


@dataclasses.dataclass(frozen=True)
class Outcome:
  """How an episode ended and what its verifier read.

  Attributes:
    status: one of STATUSES. An episode that was cut by a limit is verified
      like any other; only `infra_failure` carries no verdict.
    success: strict success, as the verifier judged it.
    assertions: the verifier's assertions, each read on its own.
    reward: terminal reward, set by a scheme of `rewards.schemes`.
    reward_parts: the terms that the reward is made of, for the metrics.
    seconds: wall-clock seconds of each phase (`boot`, `model`, `shell`,
      `verify`).
    error: why the episode is an infra failure; empty otherwise.
  """

  status: str
  success: bool = False
  assertions: tuple[AssertionResult, ...] = ()
  reward: float = 0.0
  reward_parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
  seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
  error: str = ""

  def __post_init__(self):
    if self.status not in STATUSES:
      raise TrajectoryError(
        f"outcome.status is {self.status!r}; expected one of {STATUSES}"
      )
    failed = [a.name for a in self.assertions if not a.passed]
    if self.success and failed:
      raise TrajectoryError(
        f"outcome.success is True but {failed[0]!r} did not pass; strict "
        "success means that every assertion passed"
      )


@dataclasses.dataclass(frozen=True)
class Trajectory:
  """An episode as the learner sees it (host memory, NumPy).

  Attributes:
    tokens: [T] int32, the exact ids that the sampler consumed and produced.
    loss_mask: [T] bool, True only on ids that the policy sampled.
    logprobs: [T] float32, behaviour log-prob of tokens[t]; 0 where not sampled.
    turn_ids: [T] int32, turn of an action or of the observation that answers
      it; -1 for the prompt.
    weight_version: [T] int32, policy version that was live for the token.
    routes: [T, L, K] int16, expert ids used when tokens[t] was an input; a row
      of -1 was not recorded. The last token is never an input.
    outcome: see Outcome.
    task, family, domain: which task was tried.
    attempt: which try at the task this is.
    seed: what keyed every random draw of the episode.
  """

  tokens: np.ndarray
  loss_mask: np.ndarray
  logprobs: np.ndarray
  turn_ids: np.ndarray
  weight_version: np.ndarray
  routes: np.ndarray
  outcome: Outcome
  task: str = ""
  family: str = ""
  domain: str = ""
  attempt: int = 0
  seed: tuple[int, ...] = ()

  def __len__(self) -> int:
    return len(self.tokens)

  @property
  def num_turns(self) -> int:
    return int(self.turn_ids.max(initial=-1)) + 1

  def segments(self) -> Iterator[tuple[int, bool, slice]]:
    """Turn, whether the policy sampled it, where: prompt, action, answer, ...

    Neighbouring tokens that share turn and loss mask are one segment, so an
    action that a limit cut ends before the stop that the template supplied.
    """
    changes = (np.diff(self.turn_ids) != 0) | (np.diff(self.loss_mask) != 0)
    cuts = [0, *(np.flatnonzero(changes) + 1).tolist(), len(self)]
    for start, stop in itertools.pairwise(cuts):
      turn, sampled = self.turn_ids[start], self.loss_mask[start]
      yield int(turn), bool(sampled), slice(start, stop)

  def cut(self, length: int) -> "Trajectory":
    """The first `length` tokens, all fields cut together."""
    if not 0 < length <= len(self):
      raise TrajectoryError(f"cut to {length} of {len(self)} tokens")
    fields = {f: getattr(self, f)[:length] for f in TOKEN_FIELDS}
    fields["routes"] = fields["routes"].copy()
    fields["routes"][-1] = -1  # the last token is no longer an input
    return dataclasses.replace(self, **fields)


TOKEN_FIELDS = (
  "tokens",
  "loss_mask",
  "logprobs",
  "turn_ids",
  "weight_version",
  "routes",
)


@dataclasses.dataclass(frozen=True)
class Demonstration:
  """A supervised example: no log-probs, no routes.

  Attributes:
    tokens: [T] int32.
    loss_mask: [T] bool, True on the decisions that are to be imitated.
    provenance: where the example comes from (task, attempt, ...).
  """

  tokens: np.ndarray
  loss_mask: np.ndarray
  provenance: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    if len(self.tokens) != len(self.loss_mask):
      raise TrajectoryError(
        f"demonstration of {len(self.tokens)} tokens has a loss mask of "
        f"{len(self.loss_mask)}"
      )

  def __len__(self) -> int:
    return len(self.tokens)


class TrajectoryBuilder:
  """Grows a trajectory; `append` is the only way in.

  Routes lag behind tokens: the sampler knows the experts of a token only once
  it has been an input, so the last sampled id of a turn gets its row from the
  next turn's prefill. `append_routes` therefore takes rows for the oldest
  tokens that have none yet.
  """

  def __init__(self, num_experts: int, num_moe_layers: int, top_k: int):
    self._num_experts = num_experts
    self._route_shape = (num_moe_layers, top_k)
    self._parts: dict[str, list[np.ndarray]] = {f: [] for f in TOKEN_FIELDS}
    self._length = 0
    self._routed = 0

  def __len__(self) -> int:
    return self._length

  def append(
    self,
    tokens: Sequence[int],
    *,
    turn: int,
    weight_version: int,
    logprobs: Sequence[float] | None = None,
  ) -> None:
    """Appends ids that were sampled (with log-probs) or given (without).

    Args:
      tokens: [n] ids.
      turn: turn id of all of them; -1 for the prompt; never decreases.
      weight_version: the policy version that is live.
      logprobs: [n] behaviour log-probs when the policy sampled these ids.

    Raises:
      TrajectoryError: lengths differ, a log-prob is not a finite number ≤ 0,
        or the turn goes backwards.
    """
    ids = np.asarray(tokens, np.int32)
    n = len(ids)
    sampled = logprobs is not None
    logp = np.asarray(logprobs if sampled else np.zeros(n), np.float32)
    if logp.shape != (n,):
      raise TrajectoryError(
        f"at token {self._length}: {n} ids came with {logp.shape} log-probs"
      )
    bad = np.flatnonzero(~(np.isfinite(logp) & (logp <= 1e-5)))
    if bad.size:
      raise TrajectoryError(
        f"at token {self._length + bad[0]}: log-prob {logp[bad[0]]} is not a "
        "finite number ≤ 0"
      )
    last_turn = self._parts["turn_ids"][-1][-1] if self._length else -1
    if turn < last_turn:
      raise TrajectoryError(
        f"at token {self._length}: turn {turn} follows turn {last_turn}"
      )
    if n == 0:
      return
    self._parts["tokens"].append(ids)
    self._parts["loss_mask"].append(np.full(n, sampled))
    self._parts["logprobs"].append(logp)
    self._parts["turn_ids"].append(np.full(n, turn, np.int32))
    self._parts["weight_version"].append(np.full(n, weight_version, np.int32))
    self._length += n

  def append_routes(self, routes: np.ndarray) -> None:
    """Appends rows for the next tokens that became inputs.

    Args:
      routes: [m, L, K] expert ids; a row is wholly recorded or wholly -1.

    Raises:
      TrajectoryError: wrong shape, more rows than tokens, a partial row, a
        duplicate or an id outside [0, E), with the position.
    """
    routes = np.asarray(routes)
    if routes.shape[1:] != self._route_shape:
      raise TrajectoryError(
        f"routes at token {self._routed} have shape {routes.shape}; expected "
        f"[m, L, K] with L, K = {self._route_shape}"
      )
    if self._routed + len(routes) > self._length:
      raise TrajectoryError(
        f"{self._routed + len(routes)} route rows for {self._length} tokens"
      )
    check_routes(routes, self._num_experts, first=self._routed)
    self._parts["routes"].append(routes.astype(np.int16))
    self._routed += len(routes)

  def finish(self, outcome: Outcome, **about) -> Trajectory:
    """The finished trajectory.

    Raises:
      TrajectoryError: there is no token, a row is missing before the last
        token, or a layer's rows are all zero.
    """
    if not self._length:
      raise TrajectoryError("a trajectory needs at least one token")
    missing = self._length - self._routed
    if missing > 1 and outcome.status == "infra_failure":
      # An abort leaves tokens that never became inputs: cut there.
      whole = self._padded(outcome, missing, about)
      return whole.cut(self._routed + 1)
    if missing > 1:
      raise TrajectoryError(
        f"{self._routed} route rows for {self._length} tokens: every token "
        "but the last was an input and must have a row (of -1 if unknown)"
      )
    trajectory = self._padded(outcome, missing, about)
    zero = (trajectory.routes[:-1] == 0).all(axis=(0, 2))
    if self._length > 16 and self._num_experts > 1 and zero.any():
      raise TrajectoryError(
        f"MoE layer {int(np.argmax(zero))} routes every token to expert 0: "
        "the engine dropped that layer's rows"
      )
    return trajectory

  def _padded(self, outcome: Outcome, missing: int, about) -> Trajectory:
    rows = np.full((missing, *self._route_shape), -1, np.int16)
    parts = {**self._parts, "routes": [*self._parts["routes"], rows]}
    arrays = {name: np.concatenate(part) for name, part in parts.items()}
    return Trajectory(outcome=outcome, **arrays, **about)


def check_routes(routes: np.ndarray, num_experts: int, first: int = 0) -> None:
  """Checks rows of expert ids.

  Args:
    routes: [m, L, K] ids.
    num_experts: E; valid ids are [0, E), or -1 for a whole row.
    first: position of row 0, for the message.

  Raises:
    TrajectoryError: a partial row, a duplicate or an id out of range.
  """
  if routes.size == 0:
    return
  missing = routes == -1
  wholly = missing.all(axis=(1, 2))
  partial = missing.any(axis=(1, 2)) & ~wholly
  outside = ((routes < -1) | (routes >= num_experts)).any(axis=(1, 2))
  ordered = np.sort(routes, axis=2)
  same = ordered[:, :, 1:] == ordered[:, :, :-1]
  duplicate = same.any(axis=(1, 2)) & ~wholly
  for what, rows in (
    ("is only partly recorded", partial),
    (f"holds an id outside [0, {num_experts})", outside),
    ("names an expert twice in one layer", duplicate),
  ):
    if rows.any():
      at = int(np.argmax(rows))
      raise TrajectoryError(
        f"route row of token {first + at} {what}: {routes[at].tolist()}"
      )
