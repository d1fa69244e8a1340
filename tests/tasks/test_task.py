"""The task directory: round trips, real tasks, and one clear line each."""

import pathlib
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t1jax.tasks import task as tasks

_REAL = pathlib.Path(__file__).parents[3] / "shared" / "tasks"


def _minimal(**changes):
  values = {
    "name": "one",
    "instruction": "Do it.\n",
    "environment": {"Dockerfile": b"FROM ubuntu:24.04\n"},
    "tests": {"test.sh": b"#!/bin/sh\n"},
  }
  return tasks.Task(**(values | changes))


def _bytes_below(root):
  return {
    path.relative_to(root).as_posix(): (
      path.read_bytes(),
      path.stat().st_mode & 0o777,
    )
    for path in root.rglob("*")
    if path.is_file()
  }


_text = st.text(
  st.characters(blacklist_categories=["Cs"], blacklist_characters="\r"),
  max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(
  instruction=_text.filter(str.strip),
  slots=st.dictionaries(_text.filter(bool), _text, max_size=3),
  blob=st.binary(max_size=20),
  oracle=st.lists(_text.filter(str.strip), max_size=3),
  env=st.dictionaries(_text.filter(bool), _text, max_size=2),
  note=_text,
)
def test_round_trips_byte_for_byte(
  tmp_path_factory, instruction, slots, blob, oracle, env, note
):
  task = _minimal(
    instruction=instruction,
    environment={"Dockerfile": b"FROM x\n", "a/b c": blob},
    executables=("environment/a/b c", "tests/test.sh"),
    slots=slots,
    oracle=tuple(oracle),
    hygiene=("kept",),
    metadata={"note": note, "tags": [note, "b"], "deep": {"x": [1, 2.5]}},
    config=tasks.TaskConfig(environment_env=env, workdir="/app"),
  )
  first = tasks.write_task(task, tmp_path_factory.mktemp("first"))
  again = tasks.read_task(first)
  assert again == task
  second = tasks.write_task(again, tmp_path_factory.mktemp("second"))
  assert _bytes_below(first) == _bytes_below(second)
  record = tasks.to_bytes(task)
  assert tasks.from_bytes(record) == task
  assert tasks.to_bytes(tasks.from_bytes(record)) == record


@pytest.mark.skipif(not _REAL.is_dir(), reason="no public tasks here")
def test_reads_public_tasks(tmp_path):
  read = 0
  for folder in sorted(path for path in _REAL.iterdir() if path.is_dir()):
    if folder.name == "cookbook__multi-step":
      with pytest.raises(tasks.TaskError, match=r"\[\[steps\]\]"):
        tasks.read_task(folder)
      continue
    task = tasks.read_task(folder)
    written = tasks.write_task(task, tmp_path)
    assert tasks.read_task(written) == task
    kept, given_files = _bytes_below(written), _bytes_below(folder)
    for path, content in given_files.items():
      if path.startswith(("environment/", "tests/", "solution/")):
        assert kept[path][0] == content[0], path
    assert kept["instruction.md"][0] == given_files["instruction.md"][0]
    read += 1
  assert read == 18


def test_reads_sizes_with_units(tmp_path):
  root = tasks.write_task(_minimal(), tmp_path)
  toml = root / "task.toml"
  text = toml.read_text().replace("memory_mb = 2048", 'memory = "4G"')
  toml.write_text(text.replace("storage_mb = 10240", 'storage = "512M"'))
  config = tasks.read_task(root).config
  assert (config.memory_mb, config.storage_mb) == (4096, 512)


_BROKEN = {
  "no directory": (lambda r: shutil.rmtree(r), "no such task directory"),
  "no task.toml": (lambda r: (r / "task.toml").unlink(), "task.toml: missing"),
  "broken toml": (
    lambda r: (r / "task.toml").write_text("[agent\n"),
    "task.toml: not valid TOML",
  ),
  "not utf-8": (
    lambda r: (r / "task.toml").write_bytes(b"a = '\xff'"),
    "byte 5 is not UTF-8",
  ),
  "no instruction": (
    lambda r: (r / "instruction.md").unlink(),
    "instruction.md: missing",
  ),
  "empty instruction": (
    lambda r: (r / "instruction.md").write_text(" \n"),
    "instruction.md is empty",
  ),
  "no tests": (lambda r: shutil.rmtree(r / "tests"), "tests: missing"),
  "no test.sh": (
    lambda r: (r / "tests/test.sh").rename(r / "tests/other.sh"),
    "tests/test.sh is missing",
  ),
  "no Dockerfile": (
    lambda r: (r / "environment/Dockerfile").unlink(),
    "environment/Dockerfile is missing",
  ),
  "compose": (
    lambda r: (r / "environment/docker-compose.yaml").write_text("x"),
    "compose files are not supported",
  ),
  "bad commands": (
    lambda r: (
      (r / "solution").mkdir(),
      (r / "solution/commands.json").write_text('["ls", 3]'),
    ),
    "expected a list of commands",
  ),
  "link": (
    lambda r: (r / "tests/x").symlink_to("/etc/passwd"),
    "tests/x: is a link",
  ),
}


@pytest.mark.parametrize("case", _BROKEN)
def test_a_broken_directory_is_one_line(tmp_path, case):
  root = tasks.write_task(_minimal(), tmp_path)
  breaks, expected = _BROKEN[case]
  breaks(root)
  with pytest.raises(tasks.TaskError) as caught:
    tasks.read_task(root)
  assert expected in str(caught.value)
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
  "line",
  [
    'agent = "x"',
    "agent = {timeout_sec = -1}",
    "agent = {timeout_sec = nan}",
    "agent = {timeout_sec = true}",
    'agent = {timeout_sec = "60"}',
    "environment = {cpus = 0}",
    'environment = {memory = "lots"}',
    "environment = {allow_internet = 1}",
    'environment = {os = "windows"}',
    'environment = {network_mode = "lan"}',
    "environment = {env = {A = 1}}",
    "metadata = {hygiene = 'x'}",
    "metadata = {slots = {a = 1}}",
  ],
)
def test_a_bad_field_is_named(tmp_path, line):
  root = tasks.write_task(_minimal(), tmp_path)
  (root / "task.toml").write_text(line)
  with pytest.raises(tasks.TaskError) as caught:
    tasks.read_task(root)
  message = str(caught.value)
  table = line.split(" ")[0]
  assert "task.toml" in message and table in message and "expected" in message


@pytest.mark.parametrize("path", ["../x", "/x", "a//b", "a/../b", ""])
def test_paths_stay_inside(path):
  with pytest.raises(tasks.TaskError, match="stays inside"):
    _minimal(tests={"test.sh": b"", path: b""})


def test_write_never_overwrites(tmp_path):
  tasks.write_task(_minimal(), tmp_path)
  with pytest.raises(tasks.TaskError, match="already there"):
    tasks.write_task(_minimal(), tmp_path)


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"environment": {}}'])
def test_a_broken_record_is_refused(data):
  with pytest.raises(tasks.TaskError, match="task record"):
    tasks.from_bytes(data)


def test_kinds():
  task = _minimal(hygiene=("a",), gates=("b",))
  kinds = [task.kind(name) for name in "abc"]
  assert kinds == ["hygiene", "gate", "semantic"]
