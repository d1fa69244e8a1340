"""The system families: a service to restart, a job to disable."""

import pytest

from t1jax.tasks.families.system import disable_job, restart_failed


@pytest.mark.parametrize(
  "family", [restart_failed, disable_job], ids=lambda family: family.name
)
def test_the_oracle_solves_and_nothing_does_not(check_family, family):
  check_family(family)


def test_the_other_log_shows_another_failure(play):
  place = play(restart_failed, 0)
  (found,) = place.run("grep -h ERROR *.log")
  failed = {row.split()[1] for row in found.splitlines()}
  assert len(failed) == 2 and place.draft.slots["name"] in failed


@pytest.mark.parametrize(
  "commands_of",
  [
    lambda draft: (draft.oracle[-1].replace(">>", ">"),),
    lambda draft: (draft.oracle[-1], draft.oracle[-1]),
    lambda draft: (f"grep ERROR {draft.slots['log']}.log >> queue.txt",),
    lambda draft: (
      f"echo restart {min(draft.choices['name'])} {draft.slots['port']}"
      " >> queue.txt",
    ),
    lambda draft: (
      f"echo restart {draft.slots['name']} {min(draft.choices['port'])}"
      " >> queue.txt",
    ),
  ],
  ids=["overwrite", "twice", "copy_of_log", "first_name", "first_port"],
)
def test_restart_shortcuts_fail(solved_share, commands_of):
  assert solved_share(restart_failed, commands_of) <= 0.2


def test_deleting_the_job_by_its_name_counts(play):
  place = play(disable_job, 0)
  place.run(f"sed -i /{place.draft.slots['job']}/d cron.txt")
  assert place.failed() == []


@pytest.mark.parametrize(
  "commands_of",
  [
    lambda draft: (f"sed -i /{draft.slots['owner']}/d cron.txt",),
    lambda draft: (f"sed -i /{draft.slots['owner']}/d owners.txt",),
    lambda draft: ("sed -i 1d cron.txt",),
    lambda draft: ("sed -i '$d' cron.txt",),
    lambda draft: ("sed -i d cron.txt",),
    lambda draft: ("rm cron.txt",),
  ],
  ids=["owner", "other_file", "first", "last", "all", "remove"],
)
def test_disable_shortcuts_fail(solved_share, commands_of):
  assert solved_share(disable_job, commands_of) <= 0.2
