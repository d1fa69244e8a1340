"""System calls that no namespace confines, refused to every command.

A virtual machine's socket to its host (`AF_VSOCK`) ignores network namespaces,
keys are counted per user of the whole machine, and what is left is kernel
code that a task has no use for. Each call fails as it would on a kernel that
lacks it, so programs fall back. Sources: seccomp(2), linux/seccomp.h,
linux/audit.h, asm/unistd.h.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

from t1jax.sandbox import kernel

_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # in struct seccomp_data
_X32 = 0x40000000  # on x86-64, from here on the numbers of another interface
_AF_VSOCK = 40

# machine -> its audit number and its numbers of `socket` and of what is
# refused: add_key, request_key, keyctl, bpf, perf_event_open, userfaultfd,
# io_uring_setup.
_MACHINES = {
  "x86_64": (0xC000003E, 41, (248, 249, 250, 321, 298, 323, 425)),
  "aarch64": (0xC00000B7, 198, (217, 218, 219, 280, 241, 282, 425)),
}


def program(machine: str) -> bytes:
  """The filter as `struct sock_filter`s; empty for an unknown machine."""
  if machine not in _MACHINES:
    return b""
  architecture, socket, refused = _MACHINES[machine]
  absent, no_family = _ERRNO | errno.ENOSYS, _ERRNO | errno.EAFNOSUPPORT
  steps = [
    (_LOAD, 0, 0, _ARCHITECTURE),
    (_EQUAL, 1, 0, architecture),
    (_RETURN, 0, 0, absent),
    (_LOAD, 0, 0, _NUMBER),
    (_AT_LEAST, 0, 1, _X32),
    (_RETURN, 0, 0, absent),
  ]
  for number in refused:
    steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, absent)]
  steps += [
    (_EQUAL, 0, 3, socket),
    (_LOAD, 0, 0, _FIRST_ARGUMENT),  # its low half: both are little-endian
    (_EQUAL, 0, 1, _AF_VSOCK),
    (_RETURN, 0, 0, no_family),
    (_RETURN, 0, 0, _ALLOW),
  ]
  return b"".join(struct.pack("HBBI", *step) for step in steps)


def confine() -> None:
  """Applies the filter to this thread and all that it starts, for good.

  Raises OSError where the kernel has no filters or does not allow this one.
  """
  code = program(platform.machine())
  if code:
    steps = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(steps))
    held = ctypes.create_string_buffer(header, len(header))
    kernel.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(held))
