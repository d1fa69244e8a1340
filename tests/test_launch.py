import os
import pathlib
import shutil
import subprocess
import sys
import time

import pytest

REPOSITORY = pathlib.Path(__file__).parents[1]
SCRIPTS = ("launch/local.sh", "launch/test.sh")


def run(script, *args, cwd=REPOSITORY, **environment):
  return subprocess.run(
    ["bash", script, *args],
    cwd=cwd,
    env={**os.environ, **environment},
    capture_output=True,
    text=True,
    timeout=300,
  )


def test_scripts_pass_shellcheck():
  checker = pathlib.Path(sys.executable).with_name("shellcheck")
  files = [*SCRIPTS, "launch/environment.sh", ".ci/run"]
  ended = subprocess.run(
    [checker, "--external-sources", *files],
    cwd=REPOSITORY,
    capture_output=True,
    text=True,
  )
  assert ended.returncode == 0, ended.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_teaches_and_installs_nothing(script, tmp_path):
  venv = tmp_path / "venv"
  ended = run(script, "--help", VENV=str(venv))
  assert ended.returncode == 0
  assert f"bash {script}" in ended.stdout
  assert "PYTHON" in ended.stdout
  assert "#" not in ended.stdout.splitlines()[0]
  assert "set -euo" not in ended.stdout
  assert not venv.exists()


@pytest.fixture(name="old_python")
def make_old_python(tmp_path):
  """Answers as an interpreter does whose version is below what we need."""
  old = tmp_path / "python3.8"
  old.write_text("#!/bin/sh\nexit 1\n")
  old.chmod(0o755)
  return old


def test_an_unusable_interpreter_is_one_clear_line(tmp_path, old_python):
  for bad in (old_python, tmp_path / "none"):
    ended = run(SCRIPTS[0], PYTHON=str(bad), VENV=str(tmp_path / "venv"))
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"error: PYTHON={bad} does not run, or is")
    assert ended.stderr.count("\n") == 1


def test_no_interpreter_at_all_is_one_clear_line(tmp_path):
  # A PATH that has the tools of the script, but no Python.
  tools = tmp_path / "bin"
  tools.mkdir()
  for tool in ("bash", "dirname"):
    (tools / tool).symlink_to(shutil.which(tool))
  ended = run(
    SCRIPTS[0], PATH=str(tools), PYTHON="", VENV=str(tmp_path / "venv")
  )
  assert ended.returncode == 2
  assert ended.stderr.startswith("error: no Python 3.11 or newer found")


def test_installs_once_and_again_when_the_package_changes(tmp_path):
  """The real scripts on a package whose main job prints its arguments."""
  (tmp_path / "launch").mkdir()
  for name in ("environment.sh", "local.sh"):
    shutil.copy(REPOSITORY / "launch" / name, tmp_path / "launch")
  (tmp_path / "t1jax").mkdir()
  (tmp_path / "t1jax" / "__init__.py").write_text("")
  (tmp_path / "t1jax" / "train.py").write_text(
    "import sys\nprint(*sys.argv[1:], sep='|')\n"
  )
  (tmp_path / "pyproject.toml").write_text("")
  setup = (
    "import setuptools\nsetuptools.setup(name='t1jax', packages=['t1jax'])"
  )
  (tmp_path / "setup.py").write_text(setup)

  def local(*args):
    return run(
      "launch/local.sh", *args, cwd=tmp_path, PYTHON=sys.executable, VENV=".v"
    )

  first = local("--config.seed=1", "a b")
  if "pip could not install" in first.stderr:
    pytest.skip("no package index is reached: " + first.stderr.splitlines()[-1])
  assert first.returncode == 0, first.stderr
  assert "Making .v" in first.stderr
  assert first.stdout == (
    "--config=configs/tiny.py|--workdir=runs/tiny|--config.seed=1|a b\n"
  )
  started = time.monotonic()
  second = local()
  assert time.monotonic() - started < 5
  assert second.stderr == ""
  (tmp_path / "setup.py").write_text(setup + "\n# changed")
  third = local()
  assert "Installing" in third.stderr
  assert "Making" not in third.stderr
  assert local().stderr == ""
