"""The tar family: archives that every tar reads, and misleading names."""

import pytest

from t1jax.tasks.families.archives import extract_from


def test_the_oracle_solves_and_nothing_does_not(check_family):
  check_family(extract_from)


def test_archives_are_sound(play):
  place = play(extract_from, 0)
  for archive in place.draft.choices["archive"]:
    (listing,) = place.run(f"tar tf {archive}")
    member, end = listing.split("\n")
    assert member.endswith(".txt") and end == ""


def test_the_key_alone_is_not_enough(play):
  # grep finds the key in the text of another archive too.
  place = play(extract_from, 1)
  (found,) = place.run(f"grep -l {place.draft.slots['key']} *")
  assert len(found.split()) == 2


def test_writing_the_file_by_hand_needs_its_text(play):
  place = play(extract_from, 2)
  place.run(
    f"touch {place.draft.slots['key']}.txt",
    f"rm {place.draft.slots['archive']}",
  )
  assert place.failed() == ["file_is_right"]


@pytest.mark.parametrize(
  "commands_of",
  [
    lambda draft: (f"tar xf {draft.slots['key']}.tar",),
    lambda draft: tuple(
      command.replace(draft.slots["archive"], min(draft.choices["archive"]))
      for command in draft.oracle
    ),
    lambda draft: ("for a in *.tar; do tar xf $a; done", "rm *.tar"),
    lambda draft: (f"for a in *; do tar xf $a {draft.slots['key']}.txt; done",),
  ],
  ids=["called_by_the_key", "first", "all", "all_but_delete"],
)
def test_shortcuts_fail(solved_share, commands_of):
  assert solved_share(extract_from, commands_of) <= 0.2
