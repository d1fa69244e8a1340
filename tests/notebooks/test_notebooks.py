"""The notebooks run top to bottom on a small run, and hold no outputs in git.

The kernel is a process of its own, so the strict rules of the tests end there:
a notebook runs as it does for a user.
"""

import pathlib

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

DIRECTORY = pathlib.Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(DIRECTORY.glob("*.ipynb"))

names = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)


@pytest.fixture
def execute(users_environment, monkeypatch):
  """Runs a notebook on a run directory; its outputs are in it then."""
  # This interpreter's kernel, whatever the user has installed elsewhere.
  monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "1")

  def run(notebook, workdir):
    client = NotebookClient(
      notebook,
      kernel_name="python3",
      timeout=300,
      startup_timeout=300,  # of a machine that is busy with other tests
      resources={"metadata": {"path": str(DIRECTORY)}},
    )
    client.execute(env={**users_environment, "T1JAX_RUN": str(workdir)})

  return run


def times(directory):
  return {p: p.stat().st_mtime_ns for p in directory.rglob("*")}


def read(path):
  return nbformat.read(path, as_version=4)


def code_cells(notebook):
  return [c for c in notebook.cells if c.cell_type == "code"]


def test_there_are_notebooks():
  assert NOTEBOOKS


@names
def test_it_runs_and_draws_and_concludes(path, finished, execute):
  before = times(finished)
  notebook = read(path)
  execute(notebook, finished)
  drawn = 0
  for cell in code_cells(notebook):
    kinds = {kind for output in cell.outputs for kind in output.get("data", {})}
    assert not any(o.get("name") == "stderr" for o in cell.outputs), cell.id
    if "plt.show()" in cell.source:
      assert {"image/png", "text/markdown"} <= kinds, cell.id
      drawn += 1
  assert drawn >= 3
  assert times(finished) == before


@names
def test_without_a_run_its_first_cell_says_how_to_make_one(
  path, tmp_path, execute
):
  notebook = read(path)
  with pytest.raises(CellExecutionError):
    execute(notebook, tmp_path / "none")
  (shown,) = code_cells(notebook)[0].outputs
  (line,) = shown.traceback
  assert line.startswith("error: there is no run in") and "\n" not in line
  assert "bash launch/local.sh" in line


@names
def test_it_is_stored_without_outputs(path):
  for cell in code_cells(read(path)):
    assert cell.outputs == [] and cell.execution_count is None, cell.id
