"""The link family: however the target is spelt, and only that target."""

import pytest

from t1jax.tasks.families.links import broken_link


def test_the_oracle_solves_and_nothing_does_not(check_family):
  check_family(broken_link)


@pytest.mark.parametrize("prefix", ["", "./", "/app/"])
def test_any_spelling_of_the_target_counts(play, prefix):
  place = play(broken_link, 0)
  slots = place.draft.slots
  target = f"{prefix}{slots['folder']}/{slots['target']}"
  place.run(f"ln -sf {target} {slots['link']}")
  assert place.failed() == []


def test_a_copy_is_not_a_link(play):
  place = play(broken_link, 1)
  slots = place.draft.slots
  place.run(
    f"rm {slots['link']}",
    f"cp {slots['folder']}/{slots['target']} {slots['link']}",
  )
  assert set(place.failed()) == {
    "link_is_a_link",
    "link_leads_there",
    "final_state",
  }


def _link_to(choose):
  def commands_of(draft):
    link, target = choose(draft)
    return (f"ln -sf {target} {link}",)

  return commands_of


@pytest.mark.parametrize(
  "commands_of",
  [
    lambda draft: ("find . -xtype l -delete",),
    # The link is known, its target guessed.
    _link_to(
      lambda d: (
        d.slots["link"],
        f"{d.slots['folder']}/{min(d.choices['target'])}",
      )
    ),
    # The target is known, the link guessed.
    _link_to(
      lambda d: (
        min(d.choices["link"]),
        f"{d.slots['folder']}/{d.slots['target']}",
      )
    ),
    # The other folder has files of the same names.
    _link_to(
      lambda d: (
        d.slots["link"],
        next(
          path
          for path in d.files
          if path.endswith(d.slots["target"])
          and not path.startswith(d.slots["folder"])
        ),
      )
    ),
    # What was missing is made instead of mending the link.
    lambda draft: (f"touch $(readlink {draft.slots['link']})",),
  ],
  ids=["delete", "first_target", "first_link", "other_folder", "touch"],
)
def test_shortcuts_fail(solved_share, commands_of):
  assert solved_share(broken_link, commands_of, 20) <= 0.2
