"""The git family: any honest merge counts, shortcuts do not."""

import pytest

from t1jax.tasks.families.version_control import merge_branch


def test_the_oracle_solves_and_nothing_does_not(check_family):
  check_family(merge_branch)


def test_a_merge_commit_and_packed_references_count(play):
  place = play(merge_branch, 0)
  branch = place.draft.slots["branch"]
  place.run(
    f"git merge -q --no-ff --no-edit {branch}",
    f"git branch -qd {branch}",
    "git pack-refs --all",
  )
  assert place.failed() == []


def test_copying_the_file_is_not_a_merge(play):
  place = play(merge_branch, 1)
  branch = place.draft.slots["branch"]
  place.run(
    f"git checkout -q {branch} .",
    "git commit -qm copied",
    f"git branch -qD {branch}",
  )
  assert place.failed() == ["main_has_the_commit"]


def test_a_lost_branch_is_seen(play):
  place = play(merge_branch, 2)
  place.run(*place.draft.oracle, f"git branch -qD {place.draft.slots['key']}")
  assert place.failed() == ["other_branches_kept", "final_state"]


@pytest.mark.parametrize(
  "guess",
  [
    lambda draft: draft.slots["key"],
    lambda draft: min(draft.choices["branch"]),
  ],
  ids=["called_by_the_key", "first"],
)
def test_guessing_the_branch_fails(solved_share, guess):
  share = solved_share(
    merge_branch,
    lambda draft: (
      f"git merge -q {guess(draft)}",
      f"git branch -qd {guess(draft)}",
    ),
  )
  assert share <= 0.2
