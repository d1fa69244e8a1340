"""The procedural families, listed by reference."""

import difflib

from t1jax.tasks.families import (
  archives,
  builds,
  configuration,
  data,
  debugging,
  files,
  links,
  system,
  version_control,
)
from t1jax.tasks.families.base import Family
from t1jax.tasks.task import TaskError

FAMILIES: tuple[Family, ...] = (
  *files.FAMILIES,
  *configuration.FAMILIES,
  *data.FAMILIES,
  *debugging.FAMILIES,
  *version_control.FAMILIES,
  *builds.FAMILIES,
  *archives.FAMILIES,
  *system.FAMILIES,
  *links.FAMILIES,
)


def family(name: str) -> Family:
  """The family of this name.

  Raises:
    TaskError: no such family; the message suggests the closest name.
  """
  known = {item.name: item for item in FAMILIES}
  if name in known:
    return known[name]
  close = difflib.get_close_matches(name, known, n=1)
  hint = f"did you mean {close[0]!r}?" if close else f"known: {sorted(known)}"
  raise TaskError(f"unknown task family {name!r}; {hint}")
