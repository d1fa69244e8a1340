"""Dockerfiles: every form that tasks use, and refusals with their line."""

import pathlib
import subprocess

import pytest

from t1jax.tasks.dockerfile import DockerfileError, copied_files, parse
from t1jax.tasks.task import read_task

_REAL = pathlib.Path(__file__).parents[3] / "shared" / "tasks"


def _steps(text):
  return [(step.kind, step.args) for step in parse(text)]


def test_instructions():
  text = r"""# syntax=docker/dockerfile:1
FROM --platform=linux/amd64 ubuntu:24.04 AS base

ENV A=1 B="two words" PATH=/opt/bin:$PATH
ENV C three words
WORKDIR /srv
WORKDIR app/$A
RUN ["echo", "a b"]
run echo one && \
    # a comment in between

    echo two
COPY --chmod=755 x.sh y.sh ./
COPY data/ /data
USER nobody
CMD ["/bin/sh"]
"""
  path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
  assert _steps(text) == [
    ("from", ("ubuntu:24.04",)),
    ("env", ("A", "1")),
    ("env", ("B", "two words")),
    ("env", ("PATH", f"/opt/bin:{path}")),
    ("env", ("C", "three words")),
    ("workdir", ("/srv",)),
    ("workdir", ("/srv/app/1",)),
    ("exec", ("echo", "a b")),
    ("run", ("echo one &&     echo two",)),
    ("copy", ("x.sh", "y.sh", "/srv/app/1/")),
    ("copy", ("data/", "/data")),
    ("user", ("nobody",)),
  ]
  assert parse(text)[9].mode == 0o755
  assert parse(text)[8].line == 9


def test_variables():
  text = "FROM x\nENV A=1\nENV B=$A A=2\nENV C=${A}${D:-no}$E\\$A\n"
  assert _steps(text)[1:] == [
    ("env", ("A", "1")),
    ("env", ("B", "1")),
    ("env", ("A", "2")),
    ("env", ("C", "2no$A")),
  ]
  quoted = (
    'FROM x\nENV A=1 B=\'$A \\n\' C="$A \\n \\"" D=a\\ b\nWORKDIR "/a b"\n'
  )
  assert _steps(quoted)[1:] == [
    ("env", ("A", "1")),
    ("env", ("B", "$A \\n")),
    ("env", ("C", ' \\n "')),
    ("env", ("D", "a b")),
    ("workdir", ("/a b",)),
  ]


@pytest.mark.parametrize(
  "text, output",
  [
    ("RUN <<'END'\necho $((1+1))\necho \\\nb\nEND\n", "2\nb\n"),
    ("RUN cat << END\na # b\n\nEND\n", "a # b\n\n"),
    ("RUN cat <<-END | tr a b && \\\n  echo c\n\ta\n\tEND\n", "b\nc\n"),
    ("RUN cat <<A; cat <<B\n1\nA\n2\nB\n", "1\n2\n"),
  ],
)
def test_heredocs_mean_to_a_shell_what_they_say(text, output):
  (_, step) = parse("FROM x\n" + text)
  done = subprocess.run(["sh", "-c", step.args[0]], capture_output=True)
  assert done.stdout.decode() == output


@pytest.mark.parametrize(
  "text, line, expected",
  [
    ("", None, "empty"),
    ("RUN x\n", 1, "RUN before FROM"),
    ("FROM a\nFROM b\n", 2, "a second FROM"),
    ("FROM a\n\nADD x /\n", 3, "ADD is not supported"),
    ("FROM a\nCOPY --from=b x /\n", 2, "--from=b is not supported"),
    ("FROM a\nCOPY x\n", 2, "needs a source and a target"),
    ("FROM a\nCOPY <<E /x\nE\n", 2, "COPY of a heredoc"),
    ("FROM a\nRUN --mount=type=cache x\n", 2, "flags are not supported"),
    ("FROM a\nRUN cat <<E\nx\n", 2, "has no end"),
    ("FROM a\nRUN <<E\n#!/usr/bin/python3\nE\n", 2, "interpreter"),
    ("FROM a\nRUN [1]\n", 2, 'expected ["word", "word"]'),
    ("FROM a\nENV A\n", 2, "has no value"),
    ("FROM a\nENV A=1 B\n", 2, "expected NAME=VALUE"),
    ("FROM a\nENV A='1\n", 2, "check the quotes"),
    ("FROM a\nWORKDIR\n", 2, "needs arguments"),
  ],
)
def test_refusals_name_the_line(text, line, expected):
  with pytest.raises(DockerfileError) as caught:
    parse(text)
  message = str(caught.value)
  assert expected in message
  assert line is None or f"line {line}:" in message


@pytest.mark.parametrize(
  "line, placed",
  [
    ("COPY a.txt /x", ["/x"]),
    ("COPY a.txt /x/", ["/x/a.txt"]),
    ("COPY a.txt .", ["/w/a.txt"]),
    ("COPY d /x", ["/x/b.txt", "/x/e/c.txt"]),
    ("COPY ./d/ ./", ["/w/b.txt", "/w/e/c.txt"]),
    ("COPY d/e/c.txt a.txt /x/", ["/x/a.txt", "/x/c.txt"]),
    ("COPY *.txt /x/", ["/x/a.txt"]),
    ("COPY d/* /x/", ["/x/b.txt", "/x/c.txt"]),
    ("COPY . /x", ["/x/a.txt", "/x/d/b.txt", "/x/d/e/c.txt"]),
  ],
)
def test_copy_places_files_as_docker_does(line, placed):
  files = {
    "a.txt": (b"a", 0o644),
    "d/b.txt": (b"b", 0o755),
    "d/e/c.txt": (b"c", 0o644),
  }
  step = parse(f"FROM x\nWORKDIR /w\n{line}\n")[-1]
  found = copied_files(step, files)
  assert sorted(found) == placed
  for path, content in found.items():
    name = path.rsplit("/", 1)[1]
    assert name == "x" or content in files.values()


def test_copy_of_nothing_is_an_error():
  step = parse("FROM x\nCOPY gone /x\n")[-1]
  with pytest.raises(DockerfileError, match="line 2: COPY gone"):
    copied_files(step, {"Dockerfile": (b"", 0o644)})


@pytest.mark.skipif(not _REAL.is_dir(), reason="no public tasks here")
def test_parses_public_dockerfiles():
  for folder in sorted(path for path in _REAL.iterdir() if path.is_dir()):
    if (folder / "steps").is_dir():
      continue
    task = read_task(folder)
    for step in parse(task.environment["Dockerfile"].decode()):
      if step.kind == "copy":
        assert copied_files(step, task.room("environment"))
