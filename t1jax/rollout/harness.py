"""The plain-bash protocol: one command a turn, its output, and `submit`.

A harness turns the bytes of an action into a step in a sandbox and the step
into the bytes of an observation. It knows nothing of tokens.
"""

import dataclasses

from t1jax.sandbox.base import Sandbox

SUBMIT = "submit"


@dataclasses.dataclass(frozen=True)
class Limits:
  """Bounds of one episode.

  Attributes:
    max_turns: tool-call turns (T1: 60).
    max_tokens: ids of the whole episode, prompt and observations included.
    max_action_tokens: ids of one action, its stop id included.
    command_seconds: wall-clock limit of one command.
    episode_seconds: wall-clock limit of the agent; the task's own limit holds
      too when it is smaller.
    observation_bytes: longer outputs keep head and tail and say what went.
  """

  max_turns: int = 60
  max_tokens: int = 4096
  max_action_tokens: int = 512
  command_seconds: float = 60.0
  episode_seconds: float = 3600.0
  observation_bytes: int = 10_000

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.type is int and value < 1:
        raise ValueError(f"{field.name} is {value}; expected at least 1")
      if not value > 0:
        raise ValueError(f"{field.name} is {value}; expected more than 0")


@dataclasses.dataclass(frozen=True)
class Step:
  """What one action did.

  Attributes:
    observation: bytes that the policy sees next.
    done: the agent submitted.
    exit_code: of the command; None when nothing ran.
    seconds: wall-clock seconds in the sandbox.
  """

  observation: bytes
  done: bool = False
  exit_code: int | None = None
  seconds: float = 0.0


async def step(sandbox: Sandbox, action: bytes, limits: Limits) -> Step:
  """Runs one action.

  Args:
    sandbox: a started sandbox.
    action: bytes that the policy produced, without the stop id.
    limits: bounds of the command and its observation.

  Returns:
    The observation, or `done`.

  Raises:
    SandboxError: the sandbox failed; a failed command is an observation.
  """
  command = action.decode("utf-8", "replace").strip()
  if command == SUBMIT:
    return Step(b"", done=True)
  if not command:
    return Step(b"[no command: write one line of bash, or submit]\n")
  if "\x00" in command:
    return Step(b"[a command cannot hold a NUL byte]\n")
  result = await sandbox.exec(command, timeout_sec=limits.command_seconds)
  notes = b""
  if result.timed_out:
    notes = b"[stopped after %g s]\n" % result.timeout_sec
  elif result.outcome not in ("ok", "timeout"):
    notes = b"[stopped: %s]\n" % result.outcome.encode()
  elif result.exit_code:
    notes = b"[exit %d]\n" % result.exit_code
  output = shorten(result.output, limits.observation_bytes)
  if notes and output and not output.endswith(b"\n"):
    output += b"\n"
  return Step(
    output + notes, exit_code=result.exit_code, seconds=result.seconds
  )


def shorten(output: bytes, limit: int) -> bytes:
  """At most about `limit` bytes: head, tail, and how much went between."""
  if len(output) <= limit:
    return output
  head, tail = (limit + 1) // 2, limit // 2
  gone = len(output) - head - tail
  note = b"\n[... %d bytes omitted ...]\n" % gone
  return output[:head] + note + output[len(output) - tail :]


def too_long(limit: int) -> bytes:
  """The observation that answers an action cut at its token limit."""
  return b"[not run: longer than %d tokens]\n" % limit
