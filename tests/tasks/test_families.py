"""Families: sound, deterministic, learnable, and split by their slots."""

import collections
import dataclasses
import os
import pathlib
import re
import statistics
import subprocess

import numpy as np
import pytest

from t1jax.bench.tasks import Scratch, visible_slots
from t1jax.tasks import overlap, task
from t1jax.tasks.families import FAMILIES, base, family

_COUNT = 6
_each_family = pytest.mark.parametrize(
  "one", FAMILIES, ids=[f.name for f in FAMILIES]
)


def test_enough_families_and_domains():
  assert len(FAMILIES) >= 12
  assert len({f.name for f in FAMILIES}) == len(FAMILIES)
  assert len({f.domain for f in FAMILIES}) >= 6


def test_vocabulary_has_no_word_inside_another():
  assert len(set(base.WORDS)) == len(base.WORDS) == 64
  assert not [
    (a, b) for a in base.WORDS for b in base.WORDS if a != b and a in b
  ]


@_each_family
def test_oracle_passes_and_doing_nothing_fails(one, tmp_path):
  for index in range(_COUNT):
    made = base.make_task(one, "train", index)
    scratch = Scratch(made, tmp_path / str(index))
    scratch.run(made.oracle)
    verdict = scratch.verify()
    assert verdict.strict, (made.name, verdict.passed)
    assert len(verdict.passed) == made.num_assertions >= 4
    # The kinds are what they say: doing nothing passes hygiene, only that.
    scratch.run(())
    idle = scratch.verify()
    passed = {name for name, good in idle.passed.items() if good}
    assert passed == set(made.hygiene), (made.name, idle.passed)
    kinds = collections.Counter(map(made.kind, idle.passed))
    assert min(kinds[kind] for kind in base.KINDS) >= 1


@_each_family
def test_what_to_type_is_seen_or_said(one):
  for index in range(20):
    draft = base.make_draft(one, "train", index)
    hidden = set(draft.slots) - set(visible_slots(draft))
    assert hidden == set(draft.choices), draft
    ways = 1
    for slot, options in draft.choices.items():
      assert draft.slots[slot] in options and len(set(options)) == len(options)
      ways *= len(options)
    assert ways >= 8, "a guess would be right too often"
    assert visible_slots(draft), "one fixed list would fit every instance"
    words = re.findall(r"\w+|[^\w\s]", draft.instruction)
    assert len(words) <= 30, draft.instruction
    for command in draft.oracle:
      assert len(command.split()) <= 12 and "$(" not in command
      assert command.count("|") <= 1
  turns = [len(base.make_draft(one, "train", i).oracle) for i in range(20)]
  assert statistics.median(turns) >= 3


@_each_family
def test_nothing_is_typed_before_it_was_seen(one, tmp_path):
  for index in range(3):
    draft = base.make_draft(one, "train", index)
    scratch = Scratch(
      base.make_task(one, "train", index), tmp_path / f"{index}"
    )
    scratch.run(())
    seen = draft.instruction
    for command in draft.oracle:
      typed = set(re.findall(r"[a-z]+|[0-9]+", command))
      names = typed & {*base.WORDS, *draft.slots.values()} - {"on", "off"}
      unseen = names - set(re.findall(r"[a-z]+|[0-9]+", seen))
      assert not unseen, (draft.instruction, command)
      done = subprocess.run(
        ["/bin/sh", "-c", command],
        cwd=scratch.app,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
      )
      assert len(done.stdout.split()) <= 12, (command, done.stdout)
      seen += done.stdout


@_each_family
def test_instances_are_deterministic_and_differ(one):
  first = [task.to_bytes(base.make_task(one, "train", i)) for i in range(4)]
  again = [task.to_bytes(base.make_task(one, "train", i)) for i in range(4)]
  assert first == again
  assert len(set(first)) == 4
  texts = {base.make_draft(one, "train", i).oracle for i in range(4)}
  assert texts.isdisjoint(
    base.make_draft(one, "pretrain", i).oracle for i in range(4)
  )


def test_instance_is_the_same_on_every_machine():
  made = base.make_task(family("rename_by_content"), "train", 0)
  assert made.slots == _FIRST_SLOTS


_FIRST_SLOTS = {"key": "fjord", "old": "violet", "new": "acorn"}


@_each_family
def test_heldout_combinations_never_occur_in_training(one):
  sides = {
    split: [
      (f"{split}-{i}", one.name, base.make_draft(one, split, i).slots)
      for i in range(60)
    ]
    for split in base.SPLITS
  }
  training = sides["train"] + sides["pretrain"]
  assert overlap.overlaps(sides["heldout"], training) == []
  planted = ("planted", one.name, sides["heldout"][7][2])
  (found,) = overlap.overlaps(sides["heldout"], [*training, planted])
  assert (found.heldout, found.training) == ("heldout-7", "planted")


def test_audit_refuses_what_it_cannot_see():
  made = base.make_task(FAMILIES[0], "train", 0)
  bare = dataclasses.replace(made, slots={})
  with pytest.raises(task.TaskError, match="can't be audited"):
    overlap.overlaps([bare], [])
  assert overlap.overlaps([made], [made])[0].heldout == made.name


def test_paraphrases_and_targets_vary():
  for one in FAMILIES:
    drafts = [base.make_draft(one, "train", i) for i in range(60)]
    plain = set()
    for draft in drafts:
      text = draft.instruction
      for value in draft.slots.values():
        text = text.replace(value, "_")
      plain.add(text)
    assert len(plain) >= 3, one.name
    for slot in {slot for d in drafts for slot in d.choices}:
      seen = [d for d in drafts if slot in d.choices]
      first = sum(d.slots[slot] == sorted(d.choices[slot])[0] for d in seen)
      # A target that tends to sort first would reward not looking.
      options = min(len(d.choices[slot]) for d in seen)
      if options > 4:
        assert first <= 0.35 * len(seen), (one.name, slot)


def test_unknown_names_are_one_line():
  with pytest.raises(task.TaskError, match="did you mean 'fix_mode'"):
    family("fix_mod")
  with pytest.raises(task.TaskError, match="unknown split 'test'"):
    base.make_draft(FAMILIES[0], "test", 0)
  with pytest.raises(task.TaskError, match="index is -1"):
    base.make_draft(FAMILIES[0], "train", -1)


def _toy(checks, slots=None):
  draft = base.Draft(
    instruction="Write amber to out.txt.",
    files={"a.txt": b"a\n"},
    oracle=("echo amber > out.txt",),
    checks=checks,
    slots=slots or {"key": "amber"},
  )
  return base.Family("toy", "toy", lambda rng: draft)


_GOOD = (
  base.Check("made", "semantic", "exists('out.txt')"),
  base.Check("right", "semantic", "text('out.txt') == 'amber'"),
  base.Check("kept", "hygiene", "unchanged('a.txt')"),
  base.Check("tree", "gate", "tree() == {'a.txt': 'a', 'out.txt': 'amber'}"),
)


def _either_split(one):
  held = base.is_heldout("toy", {"key": "amber"})
  return base.make_task(one, "heldout" if held else "train", 0)


@pytest.mark.parametrize(
  "checks, expected",
  [
    (_GOOD[:3], "at least 4 checks"),
    ((*_GOOD[:3], _GOOD[2]), "all three kinds"),
    ((*_GOOD, _GOOD[0]), "the same name"),
  ],
)
def test_weak_checks_are_refused(checks, expected):
  with pytest.raises(task.TaskError, match=expected):
    _either_split(_toy(checks))


def test_too_few_combinations_are_refused():
  held = base.is_heldout("toy", {"key": "amber"})
  with pytest.raises(task.TaskError, match="more combinations"):
    base.make_task(_toy(_GOOD), "train" if held else "heldout", 0)


@pytest.mark.parametrize(
  "trick",
  [
    "ln -s /etc/passwd out.txt",
    "mkfifo out.txt",
    "mkdir out.txt",
    "printf '\\377' > out.txt",
    "head -c 3000000 /dev/zero > out.txt",
    "printf 'import sys; sys.exit()' > json.py; echo no > out.txt",
    "rm a.txt; ln -s out.txt a.txt; echo amber > out.txt",
  ],
)
def test_the_verifier_survives_what_an_agent_leaves(trick, tmp_path):
  scratch = Scratch(_either_split(_toy(_GOOD)), tmp_path)
  scratch.run((trick,))
  verdict = scratch.verify()
  assert not verdict.strict and len(verdict.passed) == 4
  assert verdict.passed["made"]  # the others are read all the same


def test_a_removed_directory_is_a_failure_not_a_crash(tmp_path):
  scratch = Scratch(_either_split(_toy(_GOOD)), tmp_path)
  scratch.run(("cd ..; rm -r app",))
  verdict = scratch.verify()
  assert len(verdict.passed) == 4 and not any(verdict.passed.values())


def test_setup_runs_once_in_the_environment(tmp_path):
  draft = _toy(_GOOD).generate(np.random.default_rng(0))
  draft = dataclasses.replace(draft, setup="mkdir d\necho x > d/y.txt")
  one = base.Family("toy", "toy", lambda rng: draft)
  scratch = Scratch(_either_split(one), tmp_path)
  scratch.run(("mv d/y.txt z.txt",))
  assert (scratch.app / "z.txt").read_text() == "x\n"
  assert sorted(os.listdir(scratch.app)) == ["a.txt", "d", "z.txt"]


def test_written_tasks_hold_their_own_verifier(tmp_path):
  made = base.make_task(FAMILIES[0], "train", 0)
  root: pathlib.Path = task.write_task(made, tmp_path)
  assert task.read_task(root) == made
  source = (root / "tests/verify.py").read_text()
  imports = re.findall(r"^import (\w+)", source, re.M)
  assert imports == ["json", "os"]
