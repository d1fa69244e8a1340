"""Files and permissions: find a file by what it holds, or by its mode."""

import numpy as np

from t1jax.tasks.families.base import (
  Check,
  Draft,
  Family,
  lines,
  pick,
  words,
)

_RENAME = (
  "Rename the file that contains {key} to {new}.txt.",
  "Find the file that holds {key} and rename it to {new}.txt.",
  "Only one file mentions {key}. Give it the name {new}.txt.",
  "Which file contains {key}? Move it to {new}.txt.",
)


def _rename_by_content(rng: np.random.Generator) -> Draft:
  key, new, *rest = words(rng, 20)
  others, texts = rest[:8], rest[8:]
  old = others[0]
  held = f"{texts[0]} {key}"
  # A file that is *called* by the key is there to mislead a glance at ls.
  files = {f"{key}.txt": lines(f"{texts[1]} {texts[2]}")}
  for i, name in enumerate(others):
    files[f"{name}.txt"] = lines(held if i == 0 else f"{texts[i]} {texts[9]}")
  after = {k: v.decode().rstrip() for k, v in files.items()}
  after[f"{new}.txt"] = after.pop(f"{old}.txt")
  kept = sorted(set(files) - {f"{old}.txt"})
  return Draft(
    instruction=pick(rng, _RENAME).format(key=key, new=new),
    files=files,
    oracle=(f"grep -l {key} *", f"mv {old}.txt {new}.txt", f"cat {new}.txt"),
    checks=(
      Check("new_name_exists", "semantic", f"exists('{new}.txt')"),
      Check("new_name_holds_key", "semantic", f"text('{new}.txt') == {held!r}"),
      Check("old_name_gone", "semantic", f"not exists('{old}.txt')"),
      Check("other_files_unchanged", "hygiene", f"unchanged(*{kept!r})"),
      Check("final_tree", "gate", f"tree() == {after!r}"),
    ),
    slots={"key": key, "old": old, "new": new},
    choices={"old": tuple(others)},
  )


rename_by_content = Family("rename_by_content", "files", _rename_by_content)
FAMILIES = (rename_by_content,)
