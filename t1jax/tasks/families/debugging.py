"""Software debugging: a script fails; its message says which of two ways."""

import numpy as np

from t1jax.tasks.families.base import (
  Check,
  Draft,
  Family,
  lines,
  pick,
  words,
)

_IMPORT = (
  "{script}.sh fails. Run it, find out why and fix {script}.sh.",
  "Running sh {script}.sh gives an error. Repair {script}.sh.",
  "Repair {script}.sh so that sh {script}.sh works.",
)


def _fix_import(rng: np.random.Generator) -> Draft:
  script, wrong, lib, function, said = words(rng, 5)
  path = f"{script}.sh"
  missing_file = bool(rng.integers(2))
  good = [f". lib/{lib}.sh", function]
  # Either the script loads a file that is not there, or it calls a function
  # that the file does not define. The message tells which, and only a look
  # at lib, or into it, gives the right name.
  if missing_file:
    right, bad = lib, [f". lib/{wrong}.sh", function]
    look = "ls lib"
  else:
    right, bad = function, [f". lib/{lib}.sh", wrong]
    look = "cat lib/*"
  library = f"lib/{lib}.sh"
  files = {
    path: lines(*bad),
    library: lines(f"{function}() {{ echo {said}; }}"),
  }
  at = 0 if missing_file else 1
  slots = {"script": script, "wrong": wrong, "right": right}
  shown = (wrong, lib, function, said)
  choices = {"wrong": shown[:3], "right": shown}
  return Draft(
    instruction=pick(rng, _IMPORT).format(script=script),
    files=files,
    oracle=(
      f"sh {path}",
      look,
      f"sed -i s/{wrong}/{right}/ {path}",
      f"sh {path}",
    ),
    checks=(
      Check("wrong_name_gone", "semantic", f"{wrong!r} not in text({path!r})"),
      Check(
        "right_name_used",
        "semantic",
        f"text({path!r}).split('\\n')[{at}] == {good[at]!r}",
      ),
      Check(
        "other_line_kept",
        "hygiene",
        f"text({path!r}).split('\\n')[{1 - at}] == {good[1 - at]!r}",
      ),
      Check("library_unchanged", "hygiene", f"unchanged({library!r})"),
      Check("final_text", "gate", f"text({path!r}) == {chr(10).join(good)!r}"),
    ),
    slots=slots,
    choices=choices,
  )


FAMILIES = (Family("fix_import", "software_debugging", _fix_import),)
