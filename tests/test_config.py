import errno
import json
import os
import pathlib
import subprocess
import sys

import pytest
from absl import flags
from ml_collections import config_dict

from t1jax import config as config_lib
from t1jax.config import UserError

CONFIG = """
from ml_collections import ConfigDict
from t1jax.config import parse_arg

def get_config(arg=None):
  names = parse_arg(arg, ("smoke", "wide"))
  config = ConfigDict()
  config.seed = 0
  config.name = "tiny"
  config.model = ConfigDict({"d_model": 64, "tied": True})
  config.rl = ConfigDict({"learning_rate": 1e-4, "buckets": (64, 128)})
  config.rl.scales = (0.5, 1.0)
  if "smoke" in names:
    config.seed = 7
  if "wide" in names:
    config.model.d_model = 256
  return config
"""


@pytest.fixture(name="path")
def config_path(tmp_path):
  path = tmp_path / "configs" / "tiny.py"
  path.parent.mkdir()
  path.write_text(CONFIG)
  return path


def parse(*args, **kwargs):
  return config_lib.parse_command_line(
    ["program", *map(str, args)], description="Does it.", **kwargs
  )


def test_loads_a_config_with_its_argument(path):
  assert config_lib.load_config(str(path)).seed == 0
  both = config_lib.load_config(f"{path}:smoke,wide")
  assert (both.seed, both.model.d_model) == (7, 256)


def test_a_loaded_config_is_locked(path):
  with pytest.raises(AttributeError):
    config_lib.load_config(str(path)).sed = 3


def test_overrides_keep_their_types(path):
  config = parse(
    f"--config={path}",
    "--config.seed=3",
    "--config.rl.learning_rate=1",
    "--config.rl.buckets=(32, 64, 96)",
    "--noconfig.model.tied",
    "--config.name",
    "5",
  ).config
  assert config.seed == 3
  assert type(config.rl.learning_rate) is float
  assert config.rl.buckets == (32, 64, 96)
  assert config.model.tied is False
  assert config.name == "5"


def test_the_last_config_and_workdir_count(path, tmp_path):
  run = parse(
    "--config=nowhere.py",
    "--workdir=runs/default",
    "--config.seed=5",
    f"--config={path}:wide",
    f"--workdir={tmp_path / 'run'}",
  )
  assert run.config.model.d_model == 256
  assert run.config.seed == 5
  assert run.workdir == tmp_path / "run"
  assert run.source == f"{path}:wide"


def test_a_relative_workdir_becomes_absolute(path):
  run = parse(f"--config={path}", "--workdir=runs/x")
  assert run.workdir == pathlib.Path.cwd() / "runs" / "x"
  run = parse(f"--config={path}", "--workdir=gs://bucket/x")
  assert str(run.workdir) == "gs://bucket/x"


def test_a_program_may_take_the_config_of_its_run(path, tmp_path):
  config = config_lib.load_config(f"{path}:wide")
  config_lib.claim_workdir(tmp_path / "run", config)
  workdir = f"--workdir={tmp_path / 'run'}"
  run = parse(workdir, "--config.seed=2", resume_config=True)
  assert run.config.to_dict() == {**config.to_dict(), "seed": 2}
  with pytest.raises(UserError, match="not a run directory"):
    parse(f"--workdir={tmp_path / 'none'}", resume_config=True)
  with pytest.raises(UserError, match="--config is missing"):
    parse(workdir)


def test_a_program_has_flags_of_its_own(path):
  values = flags.FlagValues()
  flags.DEFINE_integer("episodes", 5, "how many", flag_values=values)
  run = parse(f"--config={path}", "--episodes=9", flag_values=values)
  assert run.flags.episodes == 9


def test_help_says_what_there_is(path, capsys):
  values = flags.FlagValues()
  flags.DEFINE_integer("episodes", 5, "how many", flag_values=values)
  with pytest.raises(SystemExit) as stop:
    parse("--help", flag_values=values)
  assert stop.value.code == 0
  shown = capsys.readouterr().out
  assert "Does it." in shown
  assert "--episodes: how many (default 5)" in shown


MISTAKES = {
  "field": (
    ["--config.rl.learning_rte=1"],
    "unknown config field 'rl.learning_rte'; did you mean rl.learning_rate?",
  ),
  "section": (
    ["--config.learning_rate=1"],
    "'learning_rate'; did you mean rl.learning_rate?",
  ),
  "nothing near": (
    ["--config.zzz=1"],
    "known: model.d_model, model.tied, name",
  ),
  "whole section": (["--config.model=1"], "is a section, not a field"),
  "int": (
    ["--config.model.d_model=1.5"],
    "config field model.d_model: expected int (like 64), got '1.5'",
  ),
  "float": (
    ["--config.rl.learning_rate=fast"],
    "config field rl.learning_rate: expected float (like 0.0001), got 'fast'",
  ),
  "bool": (
    ["--config.model.tied=maybe"],
    "config field model.tied: expected bool (like True), got 'maybe'",
  ),
  "tuple": (
    ["--config.rl.buckets=small"],
    "config field rl.buckets: expected a tuple of int (like (64, 128)), got",
  ),
  "tuple of text": (
    ["--config.rl.scales=a"],
    "config field rl.scales: expected a tuple of float (like (0.5, 1.0)), got",
  ),
  "no value": (["--workdir"], "--workdir has no value"),
  "flag": (["--wrkdir=x"], "unknown flag --wrkdir; did you mean --workdir?"),
  "bare field": (["--seed=1"], "unknown flag --seed; did you mean --config.s"),
  "positional": (["smoke"], "unexpected argument 'smoke'"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_clear_line(path, mistake):
  args, line = MISTAKES[mistake]
  with pytest.raises(UserError) as error:
    parse(f"--config={path}", *args)
  assert line in str(error.value)
  assert "\n" not in str(error.value)


def test_unknown_argument_lists_the_valid_ones(path):
  with pytest.raises(UserError, match=r"'smok'; valid: smoke, wide"):
    config_lib.load_config(f"{path}:smok")
  with pytest.raises(UserError, match="twice"):
    config_lib.load_config(f"{path}:smoke,smoke")


def test_missing_or_broken_config_files(path):
  with pytest.raises(UserError, match=r"did you mean .*tiny\.py\?"):
    config_lib.load_config(str(path.with_name("tny.py")))
  with pytest.raises(UserError, match="--config is missing"):
    parse("--workdir=x")
  path.write_text("def get_config(:")
  with pytest.raises(UserError, match=r"tiny\.py, line 1"):
    config_lib.load_config(str(path))
  path.write_text("x = 1")
  with pytest.raises(UserError, match="no get_config"):
    config_lib.load_config(str(path))
  path.write_text("def get_config(): pass")
  with pytest.raises(UserError, match="takes no argument"):
    config_lib.load_config(f"{path}:smoke")


def test_a_fault_of_the_config_itself_keeps_its_traceback(path):
  path.write_text("def get_config(): return 1 / 0")
  with pytest.raises(ZeroDivisionError):
    config_lib.load_config(str(path))


def test_workdir_takes_the_same_config_again(path, tmp_path):
  config = config_lib.load_config(str(path))
  workdir = config_lib.claim_workdir(tmp_path / "run", config, source="x")
  before = (workdir / "config.json").read_bytes()
  assert config_lib.claim_workdir(workdir, config) == workdir
  assert (workdir / "config.json").read_bytes() == before
  assert config_lib.read_config(workdir).to_dict() == config.to_dict()


def test_workdir_of_another_config_is_refused_with_what_differs(path, tmp_path):
  config_lib.claim_workdir(tmp_path / "run", config_lib.load_config(str(path)))
  wide = config_lib.load_config(f"{path}:wide")
  with pytest.raises(UserError, match=r"model\.d_model \(64 there, 256 here\)"):
    config_lib.claim_workdir(tmp_path / "run", wide)
  more = config_dict.ConfigDict({**wide.to_dict(), "extra": 1})
  with pytest.raises(UserError, match=r"extra \(absent there, 1 here\)"):
    config_lib.claim_workdir(tmp_path / "run", more)


def test_workdir_of_an_unknown_run_is_refused(path, tmp_path):
  (tmp_path / "metrics.jsonl").write_text("")
  with pytest.raises(UserError, match=r"metrics\.jsonl.*no config\.json"):
    config_lib.claim_workdir(tmp_path, config_lib.load_config(str(path)))
  (tmp_path / "config.json").write_text("{")
  with pytest.raises(UserError, match="damaged"):
    config_lib.claim_workdir(tmp_path, config_lib.load_config(str(path)))


def test_workdir_that_cannot_be_made_or_has_no_room(path, tmp_path):
  config = config_lib.load_config(str(path))
  (tmp_path / "file").write_text("")
  with pytest.raises(UserError, match=r"file/run cannot be used: Not a dir"):
    config_lib.claim_workdir(tmp_path / "file" / "run", config)
  with pytest.raises(UserError, match=r"needs \d+ MB, its disk has"):
    config_lib.claim_workdir(tmp_path / "run", config, free_mb=10**12)
  assert not (tmp_path / "run" / "config.json").exists()


def test_user_errors_names_the_place():
  with pytest.raises(UserError, match=r"config section model: bad heads"):
    with config_lib.user_errors("config section model"):
      raise ValueError("bad heads")
  with pytest.raises(TypeError):
    with config_lib.user_errors("config section model"):
      raise TypeError("a fault")


def test_program_maps_errors_to_exit_codes(capsys):
  class RoomError(Exception):
    pass

  def program(error):
    def main(argv):
      raise error

    return config_lib.run_program(main, expected=(RoomError,), argv=["p"])

  assert config_lib.run_program(lambda argv: None, argv=["p"]) == 0
  assert config_lib.run_program(lambda argv: 3, argv=["p"]) == 3
  assert program(UserError("no\n  such thing")) == 2
  assert capsys.readouterr().err == "error: no such thing\n"
  assert program(RoomError("namespaces")) == 2
  assert program(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/x")) == 2
  assert "cannot write /x: No space left" in capsys.readouterr().err
  assert program(KeyboardInterrupt()) == 130
  with pytest.raises(KeyError):
    program(KeyError("a fault"))


def test_a_mistake_ends_a_real_program_without_a_traceback(path, tmp_path):
  program = tmp_path / "program.py"
  program.write_text(
    "import sys\n"
    "from t1jax import config\n"
    "def main(argv):\n"
    "  run = config.parse_command_line(argv, description='')\n"
    "  config.claim_workdir(run.workdir, run.config)\n"
    "sys.exit(config.run_program(main))\n"
  )

  def run(*args):
    return subprocess.run(
      [sys.executable, program, f"--config={path}", *args],
      capture_output=True,
      text=True,
    )

  workdir = f"--workdir={tmp_path / 'run'}"
  assert run(workdir).returncode == 0
  stored = json.loads((tmp_path / "run" / "config.json").read_text())
  assert stored["config"]["rl"]["buckets"] == [64, 128]
  for bad in ("--config.sed=1", "--config.seed=x", "--config.seed=1"):
    ended = run(workdir, bad)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("error: ")


def test_a_notebook_shows_the_message_alone():
  error = UserError("no\n  such thing")
  assert error._render_traceback_() == ["error: no such thing"]
