"""What a command printed: a bounded head and tail of it."""

import os
import time


class Output:
  """Keeps the head and the tail of a stream, and counts the rest."""

  def __init__(self, cap: int) -> None:
    self.half = max(1, cap // 2)
    self.head = bytearray()
    self.tail = bytearray()
    self.total = 0

  def add(self, data: bytes) -> None:
    """Appends `data`; forgets what is neither head nor tail."""
    self.total += len(data)
    room = self.half - len(self.head)
    if room > 0:
      self.head += data[:room]
      data = data[room:]
    self.tail += data
    if len(self.tail) > 4 * self.half:
      del self.tail[: -self.half]

  def result(self) -> tuple[bytes, int]:
    """What was kept, with a line for what was not, and the bytes dropped."""
    tail = self.tail[-self.half :]
    dropped = self.total - len(self.head) - len(tail)
    if not dropped:
      return bytes(self.head + tail), 0
    gap = b"\n[... %d bytes omitted ...]\n" % dropped
    return bytes(self.head + gap + tail), dropped

  def drain(self, reader: int) -> bool:
    """Adds what a pipe already holds; whether its last writer is gone."""
    stop = time.monotonic() + 0.05  # a daemon may write faster than we read
    while time.monotonic() < stop:
      try:
        chunk = os.read(reader, 1 << 16)
      except BlockingIOError:
        return False
      if not chunk:
        return True
      self.add(chunk)
    return False
