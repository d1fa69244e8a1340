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
_MODE = (
  "One script in bin is not executable. Fix that, run it and save what it"
  " prints to {out}.txt.",
  "A script in bin lost its executable bit. Restore it and write the"
  " script's output to {out}.txt.",
  "Find the script in bin that can not be executed, make it executable and"
  " put its output in {out}.txt.",
)


def _rename_by_content(rng: np.random.Generator) -> Draft:
  key, new, *rest = words(rng, 24)
  others, texts = rest[:10], rest[10:]
  old = others[0]
  held = f"{texts[0]} {key}"
  # A file that is *called* by the key is there to mislead a glance at ls.
  files = {f"{key}.txt": lines(f"{texts[1]} {texts[2]}")}
  for i, name in enumerate(others):
    files[f"{name}.txt"] = lines(held if i == 0 else f"{texts[i]} {texts[11]}")
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


def _fix_mode(rng: np.random.Generator) -> Draft:
  out, *rest = words(rng, 21)
  scripts, said = rest[:10], rest[10:]
  script = scripts[0]
  files = {}
  for i, name in enumerate(scripts):
    mode = 0o644 if i == 0 else 0o755
    files[f"bin/{name}.sh"] = (lines(f"echo {said[i]}"), mode)
  paths = sorted(files)
  after = {k: data.decode().rstrip() for k, (data, _) in files.items()}
  after[f"{out}.txt"] = said[0]
  others = [path for path in paths if path != f"bin/{script}.sh"]
  return Draft(
    instruction=pick(rng, _MODE).format(out=out),
    files=files,
    oracle=(
      "find bin ! -perm -u=x",
      f"chmod +x bin/{script}.sh",
      f"sh bin/{script}.sh > {out}.txt",
      f"cat {out}.txt",
    ),
    checks=(
      Check("script_executable", "semantic", f"executable('bin/{script}.sh')"),
      Check("output_exists", "semantic", f"exists('{out}.txt')"),
      Check("output_right", "semantic", f"text('{out}.txt') == {said[0]!r}"),
      Check("scripts_unchanged", "hygiene", f"unchanged(*{paths!r})"),
      Check("other_modes_kept", "hygiene", f"all(map(executable, {others!r}))"),
      Check("final_tree", "gate", f"tree() == {after!r}"),
    ),
    slots={"script": script, "out": out},
    choices={"script": tuple(scripts)},
  )


FAMILIES = (
  Family("rename_by_content", "files", _rename_by_content),
  Family("fix_mode", "files", _fix_mode),
)
