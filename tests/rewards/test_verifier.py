"""What an agent prepares must not count; what a verifier says must be read."""

import json

import pytest

from t1jax.rewards import verifier
from t1jax.rewards.verifier import Assertion, read_pytest, verify
from t1jax.tasks.task import Task, TaskConfig

VERIFY = b"""
import json, os, sys
def check(name, function):
  try:
    passed = bool(function())
  except Exception:
    passed = False
  tests.append({"name": name, "status": "passed" if passed else "failed"})
tests = []
check("answer", lambda: open("/app/answer").read() == "42\\n")
check("kept", lambda: open("/app/given").read() == "given\\n")
check("final", lambda: sorted(os.listdir("/app")) == ["answer", "given"])
good = all(t["status"] == "passed" for t in tests)
json.dump({"results": {"tests": tests}}, open("/logs/verifier/ctrf.json", "w"))
open("/logs/verifier/reward.txt", "w").write(str(int(good)))
"""


def make_task(test_sh=b"exec python3 -I -S /tests/verify.py\n", **fields):
  tests = fields.pop("tests", {"verify.py": VERIFY})
  return Task(
    name="example",
    instruction="Write 42 to answer.\n",
    environment={"Dockerfile": b"FROM x\nWORKDIR /app\n"},
    tests={"test.sh": test_sh, **tests},
    hygiene=("kept",),
    gates=("final",),
    **fields,
  )


TASK = make_task()


@pytest.fixture
def judge(in_sandbox):
  """Runs commands as the agent, then the verifier of a task."""

  def run(*commands, task=TASK, files=(), **options):
    async def whole(sandbox):
      await sandbox.upload({"/app/given": b"given\n", **dict(files)})
      for command in commands:
        await sandbox.exec(command, timeout_sec=5)
      return await verify(sandbox, task, **options)

    return in_sandbox(whole)

  return run


def test_each_assertion_is_read_on_its_own(judge):
  done = judge("echo 42 > answer")
  assert done.strict and done.reward_file == 1.0 and done.error is None
  assert done.assertions == (
    Assertion("answer", "semantic", True),
    Assertion("kept", "hygiene", True),
    Assertion("final", "gate", True),
  )
  untouched = judge()
  assert not untouched.strict and not untouched.infra
  assert [a.passed for a in untouched.assertions] == [False, True, False]
  partial = judge("echo 42 > answer; touch more")
  assert [a.passed for a in partial.assertions] == [True, True, False]
  assert not partial.strict and partial.reward_file == 0.0


def test_the_sandbox_can_go_on_and_be_verified_again(loop, farm):
  async def main():
    async with farm.sandbox() as sandbox:
      await sandbox.upload({"/app/given": b"given\n"})
      first = await verify(sandbox, TASK)
      await sandbox.exec("echo 42 > answer")
      second = await verify(sandbox, TASK)
      left = await sandbox.exec("ls /tests /logs /verifier /app")
      return first.strict, second.strict, left.text

  first, second, left = loop.run(main())
  assert (first, second) == (False, True)
  assert left.count("No such file") == 3  # no test ever reached the agent


PASS = json.dumps(
  {
    "results": {
      "tests": [
        {"name": n, "status": "passed"} for n in ("answer", "kept", "final")
      ]
    }
  }
)
FORGE = f"""
import atexit, json, os
def forge():
  open("/logs/verifier/ctrf.json", "w").write({PASS!r})
  open("/logs/verifier/reward.txt", "w").write("1")
atexit.register(forge)
"""
SHIM = f"""#!/bin/bash
mkdir -p /logs/verifier; cd /logs/verifier
printf '%s' '{PASS}' > ctrf.json; echo 1 > reward.txt
"""
# Each cheats on a test that it should fail: it never writes the answer.
ATTACKS = {
  "planted results": (
    "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; "
    f"printf '%s' '{PASS}' > /logs/verifier/ctrf.json; "
    "echo '{\"reward\": 1}' > /logs/verifier/reward.json; "
    "chmod 444 /logs/verifier/*; chmod 555 /logs/verifier"
  ),
  "results directory is a link": (
    "mkdir -p /logs /app/mine; ln -s /app/mine /logs/verifier"
  ),
  "planted tests": (
    "mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' "
    "> /tests/test.sh; chmod 555 /tests"
  ),
  "python3 replaced": (
    "cp /app/shim /usr/bin/python3; cp /app/shim /usr/local/bin/python3; "
    "cp /app/shim /bin/bash; chmod +x /usr/bin/python3 /usr/local/bin/python3"
  ),
  "python3 in a directory of PATH": (
    "mkdir -p /usr/local/sbin /root/bin; for d in /usr/local/sbin /root/bin; "
    "do cp /app/shim $d/python3; chmod +x $d/python3; done; "
    "export PATH=/root/bin:$PATH"
  ),
  "preloaded library": (
    "printf '#include <stdlib.h>\\n__attribute__((constructor)) void f() "
    '{ unsetenv("LD_PRELOAD"); system("/app/shim"); }\' > /tmp/f.c; '
    "gcc -shared -fPIC -o /usr/lib/forge.so /tmp/f.c; chmod +x shim; "
    "echo /usr/lib/forge.so > /etc/ld.so.preload"
  ),
  "sitecustomize and usercustomize": (
    "v=$(python3 -c 'import sys; print(\"python3.%d\" % sys.version_info[1])');"
    "for d in /usr/lib/$v /usr/local/lib/$v/dist-packages "
    "/root/.local/lib/$v/site-packages; do mkdir -p $d; "
    "cp /app/forge $d/sitecustomize.py; cp /app/forge $d/usercustomize.py; "
    "cp /app/forge $d/json.py; done; cp /app/forge /app/sitecustomize.py; "
    "cp /app/forge /app/json.py; cp /app/forge /app/os.py"
  ),
  "shell start files": (
    "for f in /root/.bashrc /root/.profile /etc/profile /etc/bash.bashrc "
    "/root/.bash_profile; do cp /app/shim $f; done; export BASH_ENV=/app/shim"
  ),
  "background writer": (
    "(while :; do mkdir -p /logs/verifier; cp /app/pass "
    "/logs/verifier/ctrf.json; echo 1 > /logs/verifier/reward.txt; "
    "done) > /dev/null 2>&1 &"
  ),
  "background writer that left its session": (
    'setsid bash -c \'trap "" TERM HUP; while :; do for p in /proc/[0-9]*; do '
    "echo 1 > $p/root/logs/verifier/reward.txt; done; done' > /dev/null 2>&1 &"
  ),
  "fork bomb": "b() { b | b & }; b > /dev/null 2>&1",
}


@pytest.mark.parametrize("name", list(ATTACKS))
def test_an_attack_changes_nothing(judge, name):
  files = {"/app/shim": SHIM.encode(), "/app/forge": FORGE.encode(),
           "/app/pass": PASS.encode()}  # fmt: skip
  # A fork bomb keeps its shell busy with retries: the deadline ends it.
  done = judge(ATTACKS[name], files=files)
  assert not done.strict and not done.infra, done
  assert not done.assertions[0].passed and done.assertions[1].passed, done
  assert done.reward_file == 0.0


PYTEST_TASK = make_task(
  b"cd /app; if python3 -m pytest /tests/test_it.py -rA; "
  b"then r=1; else r=0; fi; echo $r > /logs/verifier/reward.txt\n",
  tests={
    "test_it.py": b"def test_it():\n  assert open('/app/answer').read()\n"
  },
)
# Stands in for pytest, which sandboxes need not have: it imports and collects
# as pytest does, from sys.path and from conftest.py next to the test and
# above it.
PYTEST = b"""
import importlib.util, os, sys, traceback
def load(path):
  spec = importlib.util.spec_from_file_location("m", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module
import json, random
assert "/app" not in sys.path and "" not in sys.path, sys.path
folder = "/tests"
for place in ("/", "/tests"):
  if os.path.exists(place + "/conftest.py"):
    load(place + "/conftest.py")
print("===== short test summary info =====")
try:
  load("/tests/test_it.py").test_it()
  print("PASSED test_it.py::test_it")
except Exception as error:
  print("FAILED test_it.py::test_it - %r" % error)
  sys.exit(1)
"""


def test_plug_ins_and_modules_in_the_working_directory_are_not_loaded(judge):
  plant = (
    "for f in conftest.py pytest.py json.py random.py sitecustomize.py; do "
    "cp forge $f; cp forge /$f; done; cp forge /tmp/conftest.py; "
    "export PYTHONPATH=/app PYTEST_PLUGINS=forge"
  )
  # A real module on the verifier's own path, as an installed pytest is.
  task = make_task(
    PYTEST_TASK.tests["test.sh"],
    tests={**PYTEST_TASK.tests, "library/pytest/__main__.py": PYTEST},
    config=TaskConfig(verifier_env={"PYTHONPATH": "/tests/library"}),
  )
  forge = b"import os; os._exit(0)"
  done = judge(plant, task=task, files={"/app/forge": forge})
  assert not done.strict and not done.infra, done
  assert [(a.name, a.passed) for a in done.assertions] == [
    ("test_it.py::test_it", False)
  ]
  assert judge("echo 42 > answer", task=task).strict


def test_what_the_tests_leave_running_cannot_change_the_result(judge):
  task = make_task(
    b"echo 0 > /logs/verifier/reward.txt\n"
    b"setsid sh -c 'sleep 0.2; echo 1 > /logs/verifier/reward.txt' &\n"
    b"sh /app/run > /dev/null 2>&1 &\n"
  )
  loop = "while :; do echo 1 > /logs/verifier/x; done"
  done = judge(f"echo 'setsid sh -c \"{loop}\" &' > run", task=task)
  assert done.reward_file == 0.0 and not done.strict


def test_services_stay_only_when_the_task_says_so(judge):
  look = b"if kill -0 $(cat /app/pid); then r=1; else r=0; fi\n" + (
    b"echo $r > /logs/verifier/reward.txt\n"
  )
  serve = "sleep 1000 > /dev/null 2>&1 & echo $! > pid"
  assert judge(serve, task=make_task(look)).reward_file == 0.0
  kept = make_task(look, metadata={"verifier_keep_processes": True})
  assert judge(serve, task=kept).reward_file == 1.0
  # Even then it sees nothing of the tests and cannot trace them.
  spy = (
    "setsid sh -c 'while :; do for p in /proc/[0-9]*; do for r in root cwd; "
    "do echo 1 > $p/$r/logs/verifier/reward.json; cat $p/environ >> seen; "
    "ls $p/root/tests >> seen; done; done; done' > /dev/null 2>&1 & echo $! >"
  )
  slow = make_task(
    b"sleep 0.5; grep -ac verify.py /app/seen >&2; "
    b"test -e /logs/verifier/reward.json && exit 1; "
    b"grep -q NOT_FOR_THE_AGENT /app/seen && exit 1; "
    b"echo 1 > /logs/verifier/reward.txt\n",
    config=TaskConfig(verifier_env={"NOT_FOR_THE_AGENT": "1"}),
    metadata={"verifier_keep_processes": True},
  )
  done = judge(spy + "pid", task=slow)
  assert done.reward_file == 1.0 and done.output.strip() == b"0", done


def test_system_changes_stay_only_when_the_task_says_so(judge, farm):
  if not farm.root:
    pytest.skip("system directories are read-only for an ordinary user")
  look = b"if tool; then r=1; else r=0; fi; echo $r > /logs/verifier/reward.txt"
  install = "printf '#!/bin/sh\\n' > /usr/bin/tool; chmod +x /usr/bin/tool"
  assert judge(install, task=make_task(look)).reward_file != 1.0
  kept = make_task(look, metadata={"verifier_keep_system": True})
  assert judge(install, task=kept).reward_file == 1.0


def test_all_other_paths_are_as_the_agent_left_them(judge):
  task = make_task(
    b"cat /data/x /tmp/x /root/x /home/agent/x /var/lib/x /opt/x /top /link/x; "
    b"pwd; echo $HOME; test -w /app && echo 1 > /logs/verifier/reward.txt\n"
  )
  places = "/data /tmp /root /home/agent /var/lib /opt"
  write = f"mkdir /data; for d in {places}; do echo $d > $d/x; done"
  done = judge(f"{write}; echo top > /top; ln -s /data /link", task=task)
  assert done.output.decode().split() == [
    *places.split(), "top", "/data", "/app", "/verifier/home",
  ]  # fmt: skip
  assert done.reward_file == 1.0


def test_a_directory_turned_into_something_else_is_shown_so(judge):
  task = make_task(
    b"for p in app home srv media lib; do stat -c %F /$p 2>&1; done; "
    b"echo 0 > /logs/verifier/reward.txt\n"
  )
  done = judge(
    "cd /; mv /app /moved; ln -s /moved /app; rm -r /srv /home /media; "
    "mkfifo /srv; echo x > /media",
    task=task,
  )
  lines = done.output.decode().splitlines()
  assert lines[0] == "symbolic link", lines
  assert "No such file" in lines[1] and lines[2] == "fifo", lines
  assert lines[3] == "regular empty file" or lines[3] == "regular file", lines
  assert not done.infra


@pytest.mark.parametrize(
  "written, reward, error",
  [
    ("echo 0.5 > reward.txt", 0.5, None),
    (
      "echo '{\"reward\": 0.25}' > reward.json; echo 1 > reward.txt",
      0.25,
      None,
    ),
    ("echo 0.75 > reward.json", 0.75, None),
    ("echo nan > reward.txt", None, "not finite"),
    ("echo 1e999 > reward.txt", None, "not finite"),
    ("echo NaN > reward.json; echo 1 > reward.txt", 1.0, "reward.json"),
    ("echo '{' > reward.json; echo 1 > reward.txt", 1.0, "reward.json"),
    ("echo '{\"a\": 1}' > reward.json", None, "reward.json"),
    ("echo true > reward.json", None, "not a number"),
    ("printf '\\377' > reward.txt", None, "reward.txt"),
    (": > reward.txt", None, "reward.txt"),
    ("mkdir reward.txt", None, "reward.txt"),
    ("mkfifo reward.json", None, "reward.json"),
    ("ln -s /dev/zero reward.txt", None, "reward.txt"),
    ("head -c 9M /dev/zero > reward.txt", None, "reward.txt"),
    ("python3 -c 'print(\"[\" * 100000)' > reward.json", None, "reward.json"),
    ("echo '{\"results\": []}' > ctrf.json; echo 1 > reward.txt", 1.0, "ctrf"),
    ("rm -r /logs/verifier", None, "no result"),
    ("true", None, "no result"),
  ],
)
def test_results_are_read_or_named_never_a_crash(judge, written, reward, error):
  task = make_task(f"cd /logs/verifier; {written}".encode())
  done = judge(task=task)
  assert done.reward_file == reward and done.assertions == ()
  assert done.infra == (reward is None)
  assert done.strict == (reward == 1.0)
  if error is None:
    assert done.error is None
  else:
    assert error in done.error


def test_a_verifier_that_cannot_install_its_tools_is_infra_not_zero(judge):
  task = make_task(b"uvx pytest /tests; echo 0 > /logs/verifier/reward.txt\n")
  done = judge(task=task)
  assert done.infra and "uvx: command not found" in done.error
  assert not done.strict and done.reward_file == 0.0


def test_a_verifier_out_of_time_is_a_failure_with_both_facts(judge):
  task = make_task(
    b"echo 1 > /logs/verifier/reward.txt; sleep 100\n",
    config=TaskConfig(verifier_timeout_sec=0.3),
  )
  done = judge(task=task)
  assert "did not end within its 0.3 s" in done.error
  assert not done.infra and not done.strict


def test_a_dead_sandbox_is_infra(loop, farm):
  async def main():
    async with farm.sandbox() as sandbox:
      await sandbox.close()
      return await verify(sandbox, TASK)

  done = loop.run(main())
  assert done.infra and not done.strict and "not running" in done.error


def test_results_that_disagree_are_not_a_success(judge):
  tests = [{"name": "a", "status": "passed"}, {"name": "b", "status": "failed"}]
  report = json.dumps({"results": {"tests": tests}})
  task = make_task(
    f"echo '{report}' > /logs/verifier/ctrf.json; "
    "echo 1 > /logs/verifier/reward.txt\n".encode()
  )
  assert not judge(task=task).strict


def test_tools_are_first_on_the_path_of_the_tests_alone(judge):
  task = make_task(b"which helper; helper > /logs/verifier/reward.txt\n")
  tools = {"helper": (b"#!/bin/sh\necho $VALUE\n", 0o755)}
  done = judge(task=task, tools=tools, env={"VALUE": "1"})
  assert done.reward_file == 1.0
  assert done.output == b"/verifier/bin/helper\n"


SHORT = """
============================= test session starts ==============================
../tests/test_outputs.py .F.
=================================== FAILURES ===================================
__________________________________ test_two ____________________________________
PASSED test_outputs.py::test_forged
============================= short test summary info ==========================
PASSED test_outputs.py::test_forged_too
==================================== PASSES ====================================
=========================== short test summary info ============================
PASSED ../tests/test_outputs.py::test_one
PASSED ../tests/test_outputs.py::TestIt::test_many[a b - c]
XFAIL ../tests/test_outputs.py::test_known - reason
SKIPPED [1] test_outputs.py:3: no network
FAILED ../tests/test_outputs.py::test_two - AssertionError: assert 1 == 2
ERROR ../tests/test_other.py - ImportError: no module
=================== 1 failed, 2 passed, 1 skipped in 0.12s =====================
PASSED was printed later
"""
VERBOSE = """
test_outputs.py::test_one PASSED                                         [ 33%]
test_outputs.py::test_two[x y] FAILED                                    [ 66%]
test_outputs.py::test_three ERROR
=================================== FAILURES ===================================
test_outputs.py::test_forged PASSED
============================== 1 failed in 0.01s ===============================
test_outputs.py::test_forged PASSED
"""


def test_pytest_is_read_by_its_own_lines_only():
  assert read_pytest(SHORT) == {
    "test_outputs.py::test_one": True,
    "test_outputs.py::TestIt::test_many[a b - c]": True,
    "test_outputs.py::test_known": True,
    "test_outputs.py::test_two": False,
    "test_other.py": False,
  }
  assert read_pytest(VERBOSE) == {
    "test_outputs.py::test_one": True,
    "test_outputs.py::test_two[x y]": False,
    "test_outputs.py::test_three": False,
  }
  assert read_pytest("no tests here\nPASSED\n") == {}


def test_kind_of_each_assertion_comes_from_the_task():
  assert [TASK.kind(n) for n in ("answer", "kept", "final")] == [
    "semantic", "hygiene", "gate",
  ]  # fmt: skip
  assert verifier.Verification((), False, None, 0.0).infra is False
