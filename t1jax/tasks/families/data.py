"""Data processing: look a row up (twice when it moved), find an extreme."""

import numpy as np

from t1jax.tasks.families.base import (
  Check,
  Draft,
  Family,
  lines,
  numbers,
  pick,
  words,
)

_LOOKUP = (
  "{table}.csv lists a file for {key}. Copy that file to {new}.txt.",
  "Copy the file that {table}.csv gives for {key} to {new}.txt.",
  "Look up {key} in {table}.csv and copy its file to {new}.txt.",
)
_EXTREME = (
  "Remove the row with the {rank} number from {table}.csv and write its name"
  " to {out}.txt.",
  "Find the row of {table}.csv with the {rank} number. Delete it, and save"
  " its name in {out}.txt.",
  "{table}.csv has one row with the {rank} number. Put its name in {out}.txt"
  " and delete the row.",
)


def _lookup_row(rng: np.random.Generator) -> Draft:
  table, key, new, *rest = words(rng, 35)
  tables, keys, names = rest[:3], [key, *rest[3:12]], rest[12:22]
  texts = rest[22:32]
  moved = bool(rng.integers(2))
  other, name = tables[0], names[0]
  # Every other table has a row for the key as well: only the one that the
  # row points to is right, and none of them when the row has not moved.
  rows = {}
  for i, title in enumerate((table, *tables)):
    values = list(rng.permutation(names[1:]))
    rows[title] = [f"{k},{v}.txt" for k, v in zip(keys, [values[i], *values])]
  rows[other if moved else table][0] = f"{key},{name}.txt"
  if moved:
    rows[table][0] = f"{key},see {other}.csv"
  files = {
    f"{title}.csv": lines(*(listed[i] for i in rng.permutation(len(listed))))
    for title, listed in rows.items()
  }
  files |= {f"{n}.txt": lines(t) for n, t in zip(names, texts)}
  second = (f"grep {key} {other}.csv",) if moved else ()
  after = {k: v.decode().rstrip() for k, v in files.items()}
  after[f"{new}.txt"] = texts[0]
  kept = sorted(set(files) - {f"{name}.txt"})
  slots = {"table": table, "key": key, "new": new, "name": name}
  choices = {"name": tuple(names)}
  if moved:
    slots["other"] = other
    choices["other"] = tuple(tables)
  return Draft(
    instruction=pick(rng, _LOOKUP).format(table=table, key=key, new=new),
    files=files,
    oracle=(
      f"grep {key} {table}.csv",
      *second,
      f"cp {name}.txt {new}.txt",
      f"cat {new}.txt",
    ),
    checks=(
      Check("copy_exists", "semantic", f"exists('{new}.txt')"),
      Check("copy_right", "semantic", f"text('{new}.txt') == {texts[0]!r}"),
      Check("source_kept", "hygiene", f"unchanged('{name}.txt')"),
      Check("other_files_unchanged", "hygiene", f"unchanged(*{kept!r})"),
      Check("final_tree", "gate", f"tree() == {after!r}"),
    ),
    slots=slots,
    choices=choices,
  )


def _extreme_row(rng: np.random.Generator) -> Draft:
  table, out, *names = words(rng, 12)
  values = numbers(rng, 10)
  rank = pick(rng, ("largest", "smallest"))
  end, chosen = ("tail", max) if rank == "largest" else ("head", min)
  name = dict(zip(values, names))[chosen(values)]
  rows = [f"{n},{v}" for n, v in zip(names, values)]
  left = [row for row in rows if not row.startswith(f"{name},")]
  csv = f"{table}.csv"
  after = {csv: "\n".join(left), f"{out}.txt": name}
  return Draft(
    instruction=pick(rng, _EXTREME).format(table=table, out=out, rank=rank),
    files={csv: lines(*rows)},
    oracle=(
      f"sort -t, -k2 {csv} | {end} -n 1",
      f"sed -i /{name}/d {csv}",
      f"echo {name} > {out}.txt",
      f"cat {out}.txt",
    ),
    checks=(
      Check("row_gone", "semantic", f"{name!r} not in text({csv!r})"),
      Check("name_exists", "semantic", f"exists('{out}.txt')"),
      Check("name_right", "semantic", f"text('{out}.txt') == {name!r}"),
      Check(
        "other_rows_kept",
        "hygiene",
        f"[row for row in text({csv!r}).split('\\n')"
        f" if not row.startswith('{name},')] == {left!r}",
      ),
      Check("final_tree", "gate", f"tree() == {after!r}"),
    ),
    slots={"table": table, "out": out, "rank": rank, "name": name},
    choices={"name": tuple(names)},
  )


FAMILIES = (
  Family("lookup_row", "data_processing", _lookup_row),
  Family("extreme_row", "data_processing", _extreme_row),
)
