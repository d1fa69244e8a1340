"""Packing: trajectories of any length into rows of a few static shapes.

Axes: B rows, S tokens per row (a bucket), T tokens of one trajectory, L MoE
layers, K experts per token.

A row holds whole trajectories one after the other, told apart by segment ids
1, 2, ... (0 is padding). A bucket's batches always have token_budget // S rows
(at least one: the budget governs packing, a longer episode is a micro-batch of
its own), so a run compiles one program per bucket. Everything that belongs to
a token, its routes included, is copied by the same slice. Nothing is dropped
and nothing is cut; the same input packs the same way each time.

Routes leave [T, L, K] and arrive as [L, B, S, K] so that layer l is a slice.
Padding rows are -1, and so is each trajectory's last token: it was never an
input of the sampler, and no loss reads the hidden state behind it.
"""

import bisect
import dataclasses
import itertools
import math
from collections.abc import Sequence

import flax.struct
import numpy as np

from t1jax.rollout.trajectory import Demonstration, Trajectory


class BatchingError(ValueError):
  """A trajectory that cannot be packed; the message says which and why."""


@flax.struct.dataclass
class Batch:
  """Packed rows, every field aligned to token t (not to its predictor)."""

  tokens: np.ndarray  # [B, S] int32
  positions: np.ndarray  # [B, S] int32, from 0 in each segment
  segment_ids: np.ndarray  # [B, S] int32, 0 = padding
  turn_ids: np.ndarray  # [B, S] int32, -1 on prompts and padding
  loss_mask: np.ndarray  # [B, S] bool, the action tokens
  behaviour_logprobs: np.ndarray  # [B, S] float32
  rewards: np.ndarray  # [B, S] float32, terminal, on the last action token
  advantages: np.ndarray  # [B, S] float32, filled by the learner
  returns: np.ndarray  # [B, S] float32, filled by the learner
  values: np.ndarray  # [B, S] float32, filled by the learner
  old_logprobs: np.ndarray  # [B, S] float32, filled by the learner
  routes: np.ndarray | None = None  # [L, B, S, K] int16, -1 = not recorded
  reference_logprobs: np.ndarray | None = None  # [B, S] float32


@dataclasses.dataclass(frozen=True)
class Span:
  """Where one trajectory lies in a batch."""

  index: int  # its position in the list that was packed
  row: int
  start: int
  length: int

  @property
  def where(self) -> tuple[int, slice]:
    return self.row, slice(self.start, self.start + self.length)


@dataclasses.dataclass(frozen=True)
class MicroBatch:
  """A batch and what the host knows about it.

  Attributes:
    batch: the arrays.
    spans: the trajectories in it.
    recorded: every token that was an input has a route, so the program
      without top-k may run.
  """

  batch: Batch
  spans: tuple[Span, ...]
  recorded: bool

  @property
  def num_actions(self) -> int:
    return int(self.batch.loss_mask.sum())

  @property
  def num_tokens(self) -> int:
    return int((self.batch.segment_ids > 0).sum())


def rows_of(bucket: int, token_budget: int) -> int:
  """Rows in every batch of this bucket."""
  return max(1, token_budget // bucket)


def pack(
  trajectories: Sequence[Trajectory],
  *,
  buckets: Sequence[int],
  token_budget: int,
  num_moe_layers: int,
  top_k: int,
  indices: Sequence[int] | None = None,
) -> list[MicroBatch]:
  """Packs trajectories for the learner.

  Args:
    trajectories: verified ones. Infra failures must have been set aside.
    buckets: row lengths S, increasing.
    token_budget: tokens B * S per batch.
    num_moe_layers: L, what the routes must have; 0 for a dense model.
    top_k: K, likewise.
    indices: pack these alone; spans keep the numbers of the whole list.

  Raises:
    BatchingError: a trajectory is longer than the largest bucket, is an infra
      failure, samples its first token, has a reward that is not finite, or
      routes of another shape.
  """
  if indices is None:
    indices = range(len(trajectories))
  for index in indices:
    _check(index, trajectories[index], num_moe_layers, top_k)
  lengths = {index: len(trajectories[index]) for index in indices}
  return [
    _trajectory_batch(trajectories, layout, num_moe_layers, top_k)
    for layout in _layouts(lengths, buckets, token_budget)
  ]


def pack_demonstrations(
  demonstrations: Sequence[Demonstration],
  *,
  buckets: Sequence[int],
  token_budget: int,
) -> list[MicroBatch]:
  """Packs supervised examples in the same way; they have no routes.

  Raises:
    BatchingError: an example is longer than the largest bucket or asks for a
      loss on its first token.
  """
  for index, demonstration in enumerate(demonstrations):
    _check_first("Demonstration", index, demonstration)
  return [
    _common_batch(demonstrations, layout)
    for layout in _layouts(
      {i: len(d) for i, d in enumerate(demonstrations)}, buckets, token_budget
    )
  ]


def terminal_rewards(trajectory: Trajectory) -> np.ndarray:
  """[T] float32: the outcome's reward on the last *action* token.

  Not on the last token: an observation or a template's stop may follow it,
  and a reward on a masked tail would be lost.
  """
  rewards = np.zeros(len(trajectory), np.float32)
  actions = np.flatnonzero(trajectory.loss_mask)
  if actions.size:
    rewards[actions[-1]] = trajectory.outcome.reward
  return rewards


def unpack(
  micro_batches: Sequence[MicroBatch], arrays_BxS: Sequence[np.ndarray]
) -> dict[int, np.ndarray]:
  """One [T] array per trajectory, by its index in the packed list."""
  return {
    span.index: array[span.where]
    for micro, array in zip(micro_batches, arrays_BxS, strict=True)
    for span in micro.spans
  }


def refill(
  micro_batches: Sequence[MicroBatch], **fields: dict[int, np.ndarray]
) -> list[MicroBatch]:
  """Writes per-trajectory [T] arrays into float fields of the batches.

  Args:
    micro_batches: as packed.
    **fields: name of a float field of Batch -> {index: [T] array}.
  """
  filled = []
  for micro in micro_batches:
    arrays = {}
    for name, by_index in fields.items():
      array = np.zeros(micro.batch.tokens.shape, np.float32)
      for span in micro.spans:
        array[span.where] = by_index[span.index]
      arrays[name] = array
    filled.append(
      dataclasses.replace(micro, batch=micro.batch.replace(**arrays))
    )
  return filled


@dataclasses.dataclass(frozen=True)
class _Layout:
  bucket: int
  rows: int
  spans: tuple[Span, ...]


def _layouts(lengths, buckets, token_budget) -> list[_Layout]:
  """Best-fit decreasing: long ones open rows, short ones fill the gaps."""
  buckets = _checked_buckets(buckets, token_budget)
  for index, length in lengths.items():
    if length > buckets[-1]:
      raise BatchingError(
        f"Trajectory {index} has {length} tokens, more than the largest bucket"
        f" ({buckets[-1]}). Add a bucket of at least {length}, or lower the"
        " harness's token limit to the largest bucket."
      )
  rows_by_bucket: dict[int, list[list[tuple[int, int, int]]]] = {
    bucket: [] for bucket in buckets
  }
  open_rows: list[tuple[int, int, int]] = []  # (space left, bucket, row)
  for index in sorted(lengths, key=lambda i: (-lengths[i], i)):
    length = lengths[index]
    at = bisect.bisect_left(open_rows, (length, 0, 0))
    if at < len(open_rows):
      space, bucket, row = open_rows.pop(at)
    else:
      bucket = buckets[bisect.bisect_left(buckets, length)]
      space, row = bucket, len(rows_by_bucket[bucket])
      rows_by_bucket[bucket].append([])
    rows_by_bucket[bucket][row].append((index, bucket - space, length))
    if space > length:
      bisect.insort(open_rows, (space - length, bucket, row))
  _promote(rows_by_bucket, token_budget)
  layouts = []
  for bucket, rows in rows_by_bucket.items():
    size = rows_of(bucket, token_budget)
    for first in range(0, len(rows), size):
      spans = tuple(
        Span(index, row, start, length)
        for row, members in enumerate(rows[first : first + size])
        for index, start, length in members
      )
      layouts.append(_Layout(bucket, size, spans))
  return layouts


def _promote(rows_by_bucket, token_budget):
  """Moves a bucket's odd rows into free rows of the next bucket's batch.

  A batch with three rows of sixteen costs as much as a full one.
  """
  buckets = list(rows_by_bucket)
  for small, large in itertools.pairwise(buckets):
    rows = rows_by_bucket[small]
    odd = len(rows) % rows_of(small, token_budget)
    free = -len(rows_by_bucket[large]) % rows_of(large, token_budget)
    if 0 < odd <= free:
      rows_by_bucket[large].extend(rows[len(rows) - odd :])
      del rows[len(rows) - odd :]


def _checked_buckets(buckets, token_budget):
  buckets = list(buckets)
  if not buckets or buckets != sorted(set(buckets)) or buckets[0] < 1:
    raise BatchingError(
      f"buckets are {buckets}; expected row lengths > 0, strictly increasing."
    )
  if token_budget < 1:
    raise BatchingError(f"token_budget is {token_budget}; expected > 0.")
  return buckets


def _check(index, trajectory, num_moe_layers, top_k):
  _check_first("Trajectory", index, trajectory)
  if trajectory.outcome.status == "infra_failure":
    raise BatchingError(
      f"Trajectory {index} (task {trajectory.task!r}) is an infra failure: it"
      " has no reward and belongs to no loss. Set it aside before packing"
      " (learner.trainable does)."
    )
  if not math.isfinite(trajectory.outcome.reward):
    raise BatchingError(
      f"Trajectory {index} (task {trajectory.task!r}) has reward"
      f" {trajectory.outcome.reward!r}; expected a finite number."
    )
  expected = (len(trajectory), num_moe_layers, top_k)
  shape = trajectory.routes.shape
  if shape != expected and not (
    num_moe_layers == 0 and shape[:2] == expected[:2]
  ):
    raise BatchingError(
      f"Trajectory {index} (task {trajectory.task!r}) has routes of shape"
      f" {shape}; expected [T, L, K] = {expected}. Convert the"
      " engine's axis order where trajectories are built."
    )


def _check_first(kind, index, example):
  if len(example) == 0:
    raise BatchingError(f"{kind} {index} has no tokens.")
  if example.loss_mask[0]:
    raise BatchingError(
      f"{kind} {index} has loss_mask[0] set, but no token precedes token 0 to"
      " predict it. Start it with a token that is given."
    )


def _common_batch(examples, layout: _Layout) -> MicroBatch:
  shape = (layout.rows, layout.bucket)
  tokens = np.zeros(shape, np.int32)
  positions = np.zeros(shape, np.int32)
  segment_ids = np.zeros(shape, np.int32)
  loss_mask = np.zeros(shape, bool)
  segments = [0] * layout.rows
  for span in layout.spans:
    segments[span.row] += 1
    tokens[span.where] = examples[span.index].tokens
    loss_mask[span.where] = examples[span.index].loss_mask
    positions[span.where] = np.arange(span.length)
    segment_ids[span.where] = segments[span.row]

  def zeros():
    return np.zeros(shape, np.float32)

  batch = Batch(
    tokens=tokens,
    positions=positions,
    segment_ids=segment_ids,
    turn_ids=np.full(shape, -1, np.int32),
    loss_mask=loss_mask,
    behaviour_logprobs=zeros(),
    rewards=zeros(),
    advantages=zeros(),
    returns=zeros(),
    values=zeros(),
    old_logprobs=zeros(),
  )
  return MicroBatch(batch, layout.spans, recorded=False)


def _trajectory_batch(
  trajectories, layout: _Layout, num_moe_layers, top_k
) -> MicroBatch:
  micro = _common_batch(trajectories, layout)
  batch = micro.batch
  routes_BxSxLxK = np.full(
    (*batch.tokens.shape, num_moe_layers, top_k), -1, np.int16
  )
  recorded = True
  for span in layout.spans:
    trajectory = trajectories[span.index]
    batch.turn_ids[span.where] = trajectory.turn_ids
    batch.behaviour_logprobs[span.where] = trajectory.logprobs
    batch.rewards[span.where] = terminal_rewards(trajectory)
    if num_moe_layers:
      inputs = trajectory.routes[:-1]
      row, where = span.where
      routes_BxSxLxK[row, where][:-1] = inputs
      recorded = recorded and bool((inputs >= 0).all())
  routes = np.ascontiguousarray(routes_BxSxLxK.transpose(2, 0, 1, 3))
  return MicroBatch(batch.replace(routes=routes), micro.spans, recorded)
