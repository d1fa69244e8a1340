"""Drills: aimless shell work that shows how to copy what was printed.

Not a task family to train or judge on, and not in FAMILIES: a base model reads
its sessions, without their instructions, before it meets any task. Rows of
names and numbers are looked up, written down, replaced and printed again.
"""

import numpy as np

from t1jax.tasks.families.base import (
  Check,
  Draft,
  Family,
  lines,
  numbers,
  words,
)

_COMMANDS = 5


def _copying(rng: np.random.Generator) -> Draft:
  names, values = words(rng, 24), numbers(rng, 12)
  table, note, *rows = names[:9]
  source, target = f"{table}.txt", f"{note}.txt"
  held = dict(zip(rows, values, strict=False))
  spare = values[len(rows) :]
  files = {source: lines(*(f"{k} {v}" for k, v in held.items()))}
  written: list[str] = []
  commands: list[str] = []
  while len(commands) < _COMMANDS:
    name = rows[int(rng.integers(len(rows)))]
    value = held[name]
    commands.append(f"grep {name} {source}")
    match int(rng.integers(5)):
      case 0:
        written = [value]
        commands += [f"echo {value} > {target}", f"cat {target}"]
      case 1:
        written.append(f"{name} {value}")
        commands.append(f"echo {name} {value} >> {target}")
      case 2 if spare:
        held[name] = spare.pop()
        commands.append(f"sed -i s/{value}/{held[name]}/ {source}")
        commands.append(f"grep {held[name]} {source}")
      case 3:
        written = [name]
        commands += [f"echo {name} > {target}", f"cat {target}"]
      case _:
        first, second = next(iter(held.items()))
        commands.append(f"head -n 1 {source}")
        written.append(f"{second} {first}")
        commands.append(f"echo {second} {first} >> {target}")
  after = {source: "\n".join(f"{k} {v}" for k, v in held.items())}
  if written:
    after[target] = "\n".join(written)
  return Draft(
    instruction="Practise.",
    files=files,
    oracle=tuple(commands),
    checks=(
      Check("table_exists", "hygiene", f"exists({source!r})"),
      Check("rows_kept", "hygiene", f"len(text({source!r}).split()) == 14"),
      Check(
        "table_right", "semantic", f"text({source!r}) == {after[source]!r}"
      ),
      Check("all_right", "gate", f"tree() == {after!r}"),
    ),
    slots={"table": table, "note": note},
  )


copying = Family("copying", "drills", _copying)
