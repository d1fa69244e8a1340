"""The build family: two faults, two fixes, one build."""

import pytest

from t1jax.tasks.families.base import make_draft
from t1jax.tasks.families.builds import missing_dependency


def test_the_oracle_solves_and_nothing_does_not(check_family):
  check_family(missing_dependency)


def test_both_faults_occur_and_the_build_names_them(play):
  faults = set()
  for index in range(8):
    place = play(missing_dependency, index)
    slots = place.draft.slots
    said = place.run(f"sh build.sh {slots['target']}")
    assert said == [f"{slots['fault']} {slots['name']}\n"]
    faults.add(slots["fault"])
  assert faults == {"missing", "wrong"}


def test_the_fix_of_the_other_fault_fails(play):
  indices = iter(range(100))
  for fault in ("missing", "wrong"):
    index = next(
      i
      for i in indices
      if make_draft(missing_dependency, "train", i).slots["fault"] == fault
    )
    place = play(missing_dependency, index)
    slots = place.draft.slots
    row = f"{slots['name']} {slots['version']}"
    fixes = {
      "wrong": f"echo {row} >> deps.txt",
      "missing": f"sed -i 's/{slots['name']} .*/{row}/' deps.txt",
    }
    build = f"sh build.sh {slots['target']}"
    said = place.run(fixes[fault], build)
    assert said == ["", f"{fault} {slots['name']}\n"]
    assert "final_state" in place.failed()


def test_the_order_of_rows_is_free(play):
  place = play(missing_dependency, 0)
  *fix, build = place.draft.oracle
  place.run(*fix, "sort -o deps.txt deps.txt", build)
  assert place.failed() == []


@pytest.mark.parametrize(
  "commands_of",
  [
    lambda draft: (
      "cp index.txt deps.txt",
      f"sh build.sh {draft.slots['target']}",
    ),
    lambda draft: (f"cp deps.txt {draft.slots['target']}.txt",),
    lambda draft: (
      "sed -i 's/ exit 1/ true/' build.sh",
      f"sh build.sh {draft.slots['target']}",
    ),
    lambda draft: (
      f"echo {draft.choices['name'][0]} {draft.choices['version'][1]}"
      " >> deps.txt",
      f"sh build.sh {draft.slots['target']}",
    ),
    # All is right but the build was not run again.
    lambda draft: draft.oracle[:-1],
  ],
  ids=["whole_index", "by_hand", "script", "guess", "not_built"],
)
def test_shortcuts_fail(solved_share, commands_of):
  assert solved_share(missing_dependency, commands_of) <= 0.2
