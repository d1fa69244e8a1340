"""Frames between a sandbox's init and the program that uses it.

A frame is two lengths, a JSON object and a blob of raw bytes. Both ends use
this module; init has no other way to talk.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

HEADER = struct.Struct("!II")


def encode(message: dict[str, Any], blob: bytes = b"") -> bytes:
  """One frame as bytes."""
  head = json.dumps(message).encode()
  return HEADER.pack(len(head), len(blob)) + head + blob


def _read_exactly(sock: socket.socket, count: int) -> bytes:
  buffer = bytearray()
  while len(buffer) < count:
    chunk = sock.recv(min(count - len(buffer), 1 << 20))
    if not chunk:
      raise EOFError("the other end closed the socket")
    buffer += chunk
  return bytes(buffer)


def receive(sock: socket.socket) -> tuple[dict[str, Any], bytes]:
  """Reads one frame from a blocking socket; EOFError when it is closed."""
  head_length, blob_length = HEADER.unpack(_read_exactly(sock, HEADER.size))
  head = _read_exactly(sock, head_length)
  return json.loads(head), _read_exactly(sock, blob_length)
