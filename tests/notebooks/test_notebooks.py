"""The notebooks run top to bottom on a small run, and hold no outputs in git.

The kernel is a process of its own, so the strict rules of the tests end there:
a notebook runs as it does for a user.
"""

import pathlib

import nbformat
import pytest
from jupyter_client import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

DIRECTORY = pathlib.Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(DIRECTORY.glob("*.ipynb"))

names = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)


@pytest.fixture
def execute(users_environment, monkeypatch):
  """Runs a notebook on a run directory; returns it with its outputs."""
  # This interpreter's kernel, whatever the user has installed elsewhere.
  monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "1")

  def run(path, workdir):
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
      notebook,
      km=AsyncKernelManager(kernel_name="python3", transport="ipc"),
      timeout=300,
      resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute(env={**users_environment, "T1JAX_RUN": str(workdir)})
    return notebook

  return run


def times(directory):
  return {p: p.stat().st_mtime_ns for p in directory.rglob("*")}


def code_cells(notebook):
  return [c for c in notebook.cells if c.cell_type == "code"]


def test_there_are_notebooks():
  assert NOTEBOOKS


@names
def test_it_runs_and_draws_and_concludes(path, finished, execute):
  before = times(finished)
  done = execute(path, finished)
  drawn = 0
  for cell in code_cells(done):
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
  with pytest.raises(CellExecutionError) as error:
    execute(path, tmp_path / "none")
  said = error.value.traceback.strip().splitlines()
  assert len(said) == 1
  assert said[0].startswith("error: there is no run in")
  assert "bash launch/local.sh" in said[0]


@names
def test_it_is_stored_without_outputs(path):
  for cell in code_cells(nbformat.read(path, as_version=4)):
    assert cell.outputs == [] and cell.execution_count is None, cell.id
