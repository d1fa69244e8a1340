"""A Dockerfile becomes the state of a sandbox, or one clear line."""

import pytest

from t1jax.sandbox import base
from t1jax.sandbox.environment import MissingTool, install_environment
from t1jax.tasks.task import Task, TaskConfig


def make_task(dockerfile, config=None, **files):
  return Task(
    name="example",
    instruction="Do it.\n",
    environment={"Dockerfile": dockerfile.encode(), **files},
    tests={"test.sh": b"true\n"},
    executables=("environment/run.sh",),
    config=config or TaskConfig(),
  )


def test_files_directories_variables_and_commands(in_sandbox):
  task = make_task(
    """FROM ubuntu:24.04
ENV COLOUR=blue
WORKDIR /srv/site
COPY run.sh data.bin ./
ENV GREETING="hello $COLOUR"
RUN echo "$GREETING from $PWD" > made && export LOST=1 && cd /
RUN ["sh", "-c", "echo [$LOST] >> made; sleep 1000 & echo $! > pid"]
RUN <<EOF
pwd >> made
useradd --help > /dev/null; echo extra >> /etc/services
mkdir -p /usr/local/lib/own && echo tool > /usr/local/lib/own/tool
rm /etc/magic
EOF
COPY data.bin /late/
""",
    TaskConfig(environment_env={"LAST": "word"}),
    **{"run.sh": b"echo ran\n", "data.bin": b"\0\xff"},
  )

  async def test(sandbox):
    await install_environment(sandbox, task)
    result = await sandbox.exec("cat made; ./run.sh; pwd; echo $GREETING $LAST")
    assert result.text == (
      "hello blue from /srv/site\n[]\n/srv/site\nran\n/srv/site\n"
      "hello blue word\n"
    )
    assert await sandbox.download("/late/data.bin") == b"\0\xff"
    # A build leaves no process behind.
    assert "sleep" not in (await sandbox.exec("ps axo args")).text
    # What it wrote into system directories is part of the image, so the
    # verifier sees it; what is written now is not.
    await sandbox.exec("echo later > /etc/later; rm -r /usr/local/lib/own")
    await sandbox.open_verifier()
    look = "tail -1 /etc/services; ls /etc; cat /usr/local/lib/own/tool"
    listed = await sandbox.exec_verifier(
      ["/bin/sh", "-c", look],
      timeout_sec=10, cwd="/", env={"PATH": "/usr/bin:/bin"}, output_bytes=9999,
    )  # fmt: skip
    names = listed.text.split()
    assert names[0] == "extra" and names[-1] == "tool", listed
    assert "passwd" in names and not {"later", "magic"} & set(names)

  in_sandbox(test)


def test_installers_name_everything_that_is_missing(in_sandbox):
  task = make_task("""FROM ubuntu:24.04
RUN apt-get update && apt-get install -y --no-install-recommends \\
    bash coreutils procps frobnicate=1.2 tmux-recorder && rm -rf /var/lib/apt
RUN pip install --no-cache-dir no-such-package==3.1 'other-missing>=2'
""")

  async def test(sandbox):
    with pytest.raises(MissingTool) as caught:
      await install_environment(sandbox, task, unneeded=["tmux-recorder"])
    assert caught.value.missing == (
      "command frobnicate (package frobnicate)",
      "Python package no-such-package==3.1",
      "Python package other-missing>=2",
    )
    assert "example" in str(caught.value) and "frobnicate" in str(caught.value)

  in_sandbox(test)


def test_installers_are_gone_when_the_agent_starts(in_sandbox):
  task = make_task("FROM x\nRUN apt-get install -y coreutils\n")

  async def test(sandbox):
    await install_environment(sandbox, task)
    result = await sandbox.exec("ls /run; echo $PATH; type -p apt-get pip")
    assert "installers" not in result.text

  in_sandbox(test)


@pytest.mark.parametrize(
  "dockerfile, words",
  [
    ("FROM x\nRUN echo why >&2; exit 7\n", "line 2: RUN exited with 7.*why"),
    ("FROM x\nRUN sleep 100\n", "line 2: RUN ran out of time"),
    (
      "FROM x\nRUN python3 -c 'import socket as s; s.getaddrinfo(\"a.b\",1)'\n",
      "line 2: RUN needs the network, which a sandbox has not",
    ),
    ("FROM x\nUSER nobody\n", "line 2: USER nobody is not supported"),
    ("FROM x\nCOPY none /app/\n", "line 2: COPY none: nothing of this name"),
  ],
)
def test_a_set_up_that_fails_is_one_line(in_sandbox, dockerfile, words):
  task = make_task(dockerfile, TaskConfig(build_timeout_sec=2))

  async def test(sandbox):
    with pytest.raises((base.SandboxError, ValueError), match=words) as caught:
      await install_environment(sandbox, task)
    assert "\n" not in str(caught.value)

  in_sandbox(test)
