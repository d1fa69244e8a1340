"""The overlap audit: has training seen what the held-out tasks ask for?"""

import dataclasses
from collections.abc import Iterable, Mapping

from t1jax.tasks.families.base import slot_key
from t1jax.tasks.task import Task, TaskError

Entry = tuple[str, str, Mapping[str, str]]


@dataclasses.dataclass(frozen=True)
class Overlap:
  """A held-out task and a training task that share their decisive slots."""

  heldout: str
  training: str
  slots: tuple[tuple[str, str], ...]


def overlaps(
  heldout: Iterable[Task | Entry], training: Iterable[Task | Entry]
) -> list[Overlap]:
  """Every held-out task whose slot combination occurs in training.

  Both sides are tasks or (name, family, slots). Two tasks overlap when they
  are of one family and agree in every decisive slot. Training is streamed.

  Raises:
    TaskError: a task without slots: it can't be audited.
  """
  found, wanted = [], {}
  for item in heldout:
    name, family, slots = _entry(item)
    wanted.setdefault(slot_key(family, slots), []).append((name, slots))
  for item in training:
    name, family, slots = _entry(item)
    for other, shared in wanted.get(slot_key(family, slots), ()):
      found.append(Overlap(other, name, tuple(sorted(shared.items()))))
  return found


def _entry(item: Task | Entry) -> Entry:
  if isinstance(item, Task):
    item = (item.name, item.family, item.slots)
  if not item[2]:
    raise TaskError(
      f"task {item[0]!r}: has no slots, so its overlap can't be audited; "
      "name its decisive values in task.toml under [metadata.slots]"
    )
  return item
