"""Public tasks, with their own solutions and their own tests, in a sandbox.

Six that need nothing but what a small machine has; all of them:
`python -m t1jax.bench.shared_tasks`. Skipped where the tasks or the Python
index are out of reach.
"""

import asyncio
import pathlib

import pytest

from t1jax.bench import shared_tasks
from t1jax.sandbox import base

TASKS = pathlib.Path(__file__).parents[3] / "shared" / "tasks"
NAMES = (
  "cookbook__simple-task",
  "tb1__analyze-access-logs",
  "tb1__bank-trans-filter",
  "tb1__sparql-professors-universities",
  "tb2__hello-world",
  "tb2__polyglot-c-py",
)
needs_tasks = pytest.mark.skipif(
  not TASKS.is_dir(), reason=f"{TASKS} is not there"
)


def play(names):
  try:
    rows = asyncio.run(
      shared_tasks.run_all(
        [TASKS / name for name in names], shared_tasks.cache_directory()
      )
    )
  except base.SandboxUnavailable as error:
    pytest.skip(str(error))
  if any("Python packages" in row.lacks for row in rows):
    pytest.skip(f"the Python index is out of reach: {rows[0].lacks}")
  return rows


@needs_tasks
def test_solutions_earn_1_and_doing_nothing_earns_0():
  rows = play(NAMES)
  assert {r.task: (r.oracle, r.nothing) for r in rows} == dict.fromkeys(
    NAMES, (1.0, 0.0)
  ), rows


@needs_tasks
def test_a_task_that_cannot_run_says_what_it_lacks():
  (row,) = play(["cookbook__multi-step"])
  assert not row.good and "[[steps]]" in row.lacks


def test_requirements_are_read_from_scripts():
  assert shared_tasks.requirements(
    b"RUN pip install --no-cache-dir numpy==2.1.2 scipy==1.15.3 && pytest\n",
    b"uv pip install pytest==8.4.1  pyyaml==6.0.2;uv add six\n",
    b"uvx \\\n  --with pytest==8.4.1 \\\n  --with extra[a] rival /tests/x\n",
    b"apt-get install -y jq=1.6-2.1\nuv pip install -r needs.txt\n",
  ) == (
    "extra[a]", "numpy==2.1.2", "pytest==8.4.1", "pyyaml==6.0.2",
    "scipy==1.15.3", "six",
  )  # fmt: skip
