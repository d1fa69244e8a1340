"""The append-only chat template: how turns become ids, once.

    <task> instruction <act> command <end> <obs> output <act> command <end> ...

History is only ever appended to, so the ids of a later turn start with the ids
of every earlier one (no re-tokenisation, no stripped reasoning). Control ids
come from here alone; text, whatever it spells, is ordinary bytes.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from t1jax.models.tokenizer import Tokenizer
from t1jax.rollout.trajectory import Demonstration


@dataclasses.dataclass(frozen=True)
class Chat:
  """The template over a tokenizer."""

  tokenizer: Tokenizer

  @property
  def stop_id(self) -> int:
    """The id that ends an action: sampled, and part of the loss."""
    return self.tokenizer.control("end")

  @property
  def forbidden_ids(self) -> tuple[int, ...]:
    """Control ids that the policy must never sample."""
    names = ("pad", "task", "act", "obs")
    return tuple(self.tokenizer.control(n) for n in names)

  def prompt(self, instruction: str) -> list[int]:
    """Ids before the first action."""
    control = self.tokenizer.control
    return [
      control("task"),
      *self.tokenizer.encode(instruction.strip()),
      control("act"),
    ]

  def observation(self, output: bytes) -> list[int]:
    """Ids between an action's stop id and the next action."""
    control = self.tokenizer.control
    return [control("obs"), *self.tokenizer.encode(output), control("act")]

  def demonstration(
    self,
    instruction: str,
    turns: Sequence[tuple[str, bytes]],
    provenance: Mapping[str, str] | None = None,
  ) -> Demonstration:
    """A supervised example from commands and what they printed.

    Args:
      instruction: the task's instruction.
      turns: (command, observation) pairs; the last observation is not seen by
        anybody and is left out.
      provenance: where the example comes from.

    Returns:
      The example; its loss mask covers commands and their stop ids.
    """
    tokens = self.prompt(instruction)
    mask = [False] * len(tokens)
    for i, (command, output) in enumerate(turns):
      action = [*self.tokenizer.encode(command), self.stop_id]
      answer = self.observation(output) if i + 1 < len(turns) else []
      tokens += action + answer
      mask += [True] * len(action) + [False] * len(answer)
    return Demonstration(
      tokens=np.asarray(tokens, np.int32),
      loss_mask=np.asarray(mask, bool),
      provenance=dict(provenance or {}),
    )
