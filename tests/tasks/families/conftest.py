"""A place to play a generated task in, without a sandbox.

The environment lies in a temporary directory and /app is mapped onto it: the
families know nothing of sandboxes, and their tests run where user namespaces
are forbidden. What the real sandbox makes of the tasks is tested end to end.
"""

import contextlib
import json
import pathlib
import re
import subprocess

import pytest

from t1jax.tasks.dockerfile import copied_files, parse
from t1jax.tasks.families.base import Family, make_draft, make_task

# A hash, a date, a size or a time of day: nothing a model can learn to copy.
_UNSTABLE = re.compile(r"\b[0-9a-f]{7,}\b|\d{3,}|:\d\d:")


class Playground:
  """Instance `index` of a family, set up under `root` (made when absent)."""

  def __init__(
    self, root: pathlib.Path, family: Family, split: str, index: int
  ) -> None:
    self.draft = make_draft(family, split, index)
    self.task = make_task(family, split, index)
    self.app, self._logs = root / "app", root / "logs"
    self.app.mkdir(parents=True)
    for step in parse(self.task.environment["Dockerfile"].decode()):
      if step.kind == "copy":
        placed = copied_files(step, self.task.room("environment"))
        for path, (data, mode) in placed.items():
          file = self.app / path.removeprefix("/app/")
          file.parent.mkdir(parents=True, exist_ok=True)
          file.write_bytes(data)
          file.chmod(mode)
      elif step.kind == "run":
        assert self.run(step.args[0]) == [""]

  def run(self, *commands: str) -> list[str]:
    """What each command printed, both streams together."""
    return [
      subprocess.run(
        ["/bin/bash", "-c", command.replace("/app/", f"{self.app}/")],
        cwd=self.app,
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=20,
        check=False,
      ).stdout.decode()
      for command in commands
    ]

  def failed(self) -> list[str]:
    """Names of the assertions that do not hold."""
    source = self.task.tests["verify.py"].decode()
    source = source.replace('"/app"', repr(str(self.app)))
    source = source.replace('"/logs/verifier"', repr(str(self._logs)))
    with contextlib.chdir(self.app):
      exec(compile(source, "verify.py", "exec"), {"__name__": "__main__"})
    report = json.loads((self._logs / "ctrf.json").read_text())["results"]
    return [t["name"] for t in report["tests"] if t["status"] != "passed"]


@pytest.fixture
def play(tmp_path):
  """play(family, index, split="train") -> Playground, as often as needed."""
  count = iter(range(1_000_000))

  def make(family: Family, index: int, split: str = "train") -> Playground:
    return Playground(tmp_path / str(next(count)), family, split, index)

  return make


@pytest.fixture
def check_family(play):
  """check(family, count): the oracle solves, nothing else than it is needed.

  In both splits: a do-nothing agent passes the hygiene checks and no other,
  the oracle passes all, and what it prints is short and stable.
  """

  def check(family: Family, count: int = 4) -> None:
    for split in ("train", "heldout"):
      for index in range(count):
        place = play(family, index, split)
        assert place.task == play(family, index, split).task
        earned = {c.name for c in place.draft.checks if c.kind != "hygiene"}
        assert set(place.failed()) == earned
        outputs = place.run(*place.draft.oracle)
        assert place.failed() == []
        assert 3 <= len(outputs) <= 4
        for output in outputs:
          assert not _UNSTABLE.search(output), output
          assert len(output.split()) <= 12
        assert len(re.findall(r"\w+", place.draft.instruction)) <= 25

  return check


@pytest.fixture
def solved_share(play):
  """share(family, commands_of, count): how often a shortcut solves the task.

  `commands_of(draft)` gives the shortcut's commands for an instance.
  """

  def share(family: Family, commands_of, count: int = 10) -> float:
    solved = 0
    for index in range(count):
      place = play(family, index)
      place.run(*commands_of(place.draft))
      solved += not place.failed()
    return solved / count

  return share
