"""The bench can tell a task that needs looking from one that doesn't."""

import json

import pytest

from t1jax.bench import tasks as bench
from t1jax.tasks.families import base, family


def _leaky(rng):
  # Where the answer lies never changes: a fixed list solves every instance.
  key, *rest = base.words(rng, 6)
  return base.Draft(
    instruction=f"Put {key} where it belongs.",
    files={f"{name}.txt": b"x\n" for name in rest},
    oracle=("ls", f"echo {key} > out.txt", "cat out.txt"),
    checks=(
      base.Check("made", "semantic", "exists('out.txt')"),
      base.Check("right", "semantic", f"text('out.txt') == {key!r}"),
      base.Check("kept", "hygiene", f"exists('{rest[0]}.txt')"),
      base.Check("again", "gate", f"text('out.txt') == {key!r}"),
    ),
    slots={"key": key, "other": rest[0]},
    choices={"other": tuple(rest)},
  )


def test_sees_a_family_that_needs_no_looking():
  found = bench.measure(base.Family("leaky", "files", _leaky), 4)
  assert found["best_fixed_list"] == 1.0
  assert found["oracle_pass"] == 1.0 and found["nop_pass"] == 0.0
  assert found["nop_assertion_share"] == 0.25


def test_sees_a_guess_that_is_always_right():
  one = family("rename_by_content")

  def generate(rng):
    draft = one.generate(rng)
    object.__setattr__(draft, "choices", {"old": (draft.slots["old"],)})
    return draft

  rigged = base.Family(one.name, one.domain, generate)
  assert bench.measure(rigged, 3)["best_fixed_list"] == 1.0


def test_shapes_bind_only_what_the_instruction_shows():
  drafts = [
    base.make_draft(family("lookup_row"), "train", i) for i in range(12)
  ]
  shapes = {bench.shape(draft) for draft in drafts}
  assert len(shapes) == 2  # the row has moved, or not
  assert not any(word in " ".join(s) for s in shapes for word in base.WORDS)
  draft = drafts[0]
  assert bench.bind(bench.shape(draft), dict(draft.slots)) == draft.oracle
  assert set(bench.visible_slots(draft)) == {"table", "key", "new"}
  for rule, commands in bench.blind_lists(drafts, 0).items():
    if rule[0] in ("common", "wildcard", "other"):
      assert draft.slots["name"] not in " ".join(commands)


def test_leaves_out_only_what_changes_nothing():
  looks = ("cat a", "grep -l x *", "sort -k2 a | head -n 1", "find . -xtype l")
  does = ("cat a > b", "find . -delete", "sort -o a a", "sh a.sh", "mv a b")
  assert bench.acts((*looks, *does)) == does


def test_prints_one_json_line(capsys):
  bench.main(["--instances=2", "--families=fix_mode"])
  out = capsys.readouterr().out
  assert out.count("\n") == 1
  line = json.loads(out)
  assert line["oracle_pass"] == 1.0 and line["heldout_overlaps"] == 0
  assert line["families"]["fix_mode"]["verifier_cpu_ms"] > 0


def test_unknown_family_is_one_line(capsys):
  with pytest.raises(SystemExit):
    bench.main(["--families=nope"])
  assert "no family ['nope']" in capsys.readouterr().err
