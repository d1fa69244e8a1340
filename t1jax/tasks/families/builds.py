"""Builds: learn from a failed build what is wrong, fix it, build again."""

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

_BUILD = (
  "sh build.sh {target} fails. Fix one line of deps.txt as index.txt says.",
  "Make sh build.sh {target} work: mend one line of deps.txt by index.txt.",
  "Build {target} with build.sh. One line of deps.txt must follow index.txt.",
  "Get {target} out of build.sh: one line of deps.txt must be as in index.txt.",
)

# Builtins only: the build is one process and one copy.
_SCRIPT = """\
# Makes $1.txt from deps.txt, whose versions must be those of index.txt.
version_of() {{
  found=
  while read -r name version; do
    [ "$name" = "$1" ] && found="$found$version"
  done < "$2"
}}
for need in {needs}; do
  version_of $need index.txt; expected=$found
  version_of $need deps.txt
  [ "$found" ] || {{ echo missing $need; exit 1; }}
  [ "$found" = "$expected" ] || {{ echo wrong $need; exit 1; }}
done
cp deps.txt "$1.txt" && echo ok
"""


def _missing_dependency(rng: np.random.Generator) -> Draft:
  target, *names = words(rng, 9)
  versions = numbers(rng, 9)
  index = dict(zip(names, versions, strict=False))
  name, version = names[0], index[names[0]]
  needs, wrong = names[:4], versions[8]
  missing = bool(rng.integers(2))
  fault = "missing" if missing else "wrong"
  rows = [f"{n} {index[n]}" for n in needs]
  order = list(map(int, rng.permutation(4)))
  before = [f"{name} {wrong}" if not i else rows[i] for i in order]
  after = [rows[i] for i in order]
  if missing:
    before.remove(f"{name} {wrong}")
    after = [*before, rows[0]]
  script = _SCRIPT.format(
    needs=" ".join(needs[int(i)] for i in rng.permutation(4))
  )
  files = {
    "build.sh": script.encode(),
    "deps.txt": lines(*before),
    "index.txt": lines(
      *(f"{names[i]} {index[names[i]]}" for i in rng.permutation(8))
    ),
  }
  fix = (
    f"echo {rows[0]} >> deps.txt"
    if missing
    else f"sed -i 's/{name} .*/{rows[0]}/' deps.txt"
  )
  built = f"{target}.txt"
  # In either file the order of the rows is free.
  same = "sorted(text({path!r}).split('\\n')) == {rows!r}".format
  others = sorted(set(rows[1:]))
  return Draft(
    instruction=pick(rng, _BUILD).format(target=target),
    files=files,
    oracle=(
      f"sh build.sh {target}",
      f"grep {name} index.txt",
      fix,
      f"sh build.sh {target}",
    ),
    checks=(
      Check(
        "dependency_added",
        "semantic",
        f"{rows[0]!r} in text('deps.txt').split('\\n')",
      ),
      Check("result_exists", "semantic", f"exists({built!r})"),
      Check(
        "result_is_right", "semantic", same(path=built, rows=sorted(after))
      ),
      Check(
        "script_and_index_unchanged",
        "hygiene",
        "unchanged('build.sh', 'index.txt')",
      ),
      Check(
        "other_dependencies_kept",
        "hygiene",
        f"set(text('deps.txt').split('\\n')) >= set({others!r})",
      ),
      Check(
        "final_state",
        "gate",
        same(path="deps.txt", rows=sorted(after))
        + f" and names() == {sorted([*files, built])!r}",
      ),
    ),
    slots={
      "target": target,
      "fault": fault,
      "name": name,
      "version": version,
    },
    choices={
      "fault": ("missing", "wrong"),
      "name": tuple(names),
      "version": tuple(versions[:8]),
    },
  )


missing_dependency = Family("missing_dependency", "builds", _missing_dependency)
FAMILIES = (missing_dependency,)
