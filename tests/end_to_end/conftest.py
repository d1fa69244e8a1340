"""A bucket on the loopback device, as programs see one in the cloud.

gcp-storage-emulator, and the conditions on an object's generation that it
lacks: TensorStore, which writes the checkpoints, goes by them.
"""

import dataclasses
import functools
import http.server
import os
import re
import threading
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

NAME = "bucket"
LOCKED = "locked"  # the name of a bucket that lets nobody in
_OBJECT = re.compile(r"(?:/upload)?/storage/v1/b/([^/]+)/o(?:/([^/]+))?")


class _Server(http.server.HTTPServer):
  request_queue_size = 128  # it answers one request at a time

  def handle_error(self, request, client_address):
    pass  # a client that was killed does not wait for its answer


@dataclasses.dataclass(frozen=True)
class Bucket:
  """gs://bucket."""

  environment: dict[str, str]  # in which programs find it
  _store: Any

  @property
  def generations(self) -> dict[str, str]:
    """The objects there, and what changes when one is written again."""
    objects = dict(self._store.objects.get(NAME, {}))
    return {name: o["generation"] for name, o in objects.items()}

  def read(self, name: str) -> bytes:
    return self._store.get_file(NAME, name)


@pytest.fixture(scope="module")
def bucket():
  """Serves an empty bucket; skips where the emulator is not installed."""
  emulator = pytest.importorskip(
    "gcp_storage_emulator.server", reason="gcp-storage-emulator is missing"
  )
  from gcp_storage_emulator import storage
  from gcp_storage_emulator.handlers import buckets

  class Handler(emulator.RequestHandler):
    timeout = 10  # a client that says nothing keeps no others waiting

    def parse_request(self):
      return super().parse_request() and self.conditions_hold()

    def conditions_hold(self):
      """Answers in place of the emulator when the generation is another."""
      self.generation = None
      url = urlsplit(self.path)
      query = {k: v[0] for k, v in parse_qs(url.query).items()}
      match = _OBJECT.fullmatch(url.path)
      if not match:
        return True
      if match[1] == LOCKED:
        return self.answer(401)
      name = unquote(match[2] or query.get("name", ""))
      there = store.objects.get(match[1], {}).get(name, {})
      self.generation = there.get("generation", "0")
      status = None
      if query.get("ifGenerationNotMatch") == self.generation:
        status = 304
      elif query.get("ifGenerationMatch", self.generation) != self.generation:
        status = 412
      return True if status is None else self.answer(status)

    def answer(self, status):
      self.rfile.read(int(self.headers.get("Content-Length", 0)))
      self.send_response(status)
      self.send_header("Content-Length", "0")
      self.end_headers()
      return False

    def end_headers(self):
      if self.command == "GET" and self.generation:
        self.send_header("x-goog-generation", self.generation)
      super().end_headers()

  store = storage.Storage(use_memory_fs=True)
  buckets.create_bucket(NAME, store)
  # Else it keeps, and writes down at each request, all that was ever deleted.
  store.buckets[NAME]["softDeletePolicy"]["retentionDurationSeconds"] = "0"
  with _Server(("127.0.0.1", 0), functools.partial(Handler, store)) as server:
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
      yield Bucket(_environment(server.server_address[1]), store)
    finally:
      server.shutdown()
      thread.join()


def _environment(port: int) -> dict[str, str]:
  url = f"http://127.0.0.1:{port}"
  # The programs run as users run them, not under the tests' strict rules.
  mine = {k: v for k, v in os.environ.items() if not k.startswith("JAX_NUMPY_")}
  return mine | {
    "STORAGE_EMULATOR_HOST": url,  # for gcsfs, below epath
    "TENSORSTORE_GCS_HTTP_URL": url,  # for TensorStore, below Orbax
    # Nobody is to look for credentials outside this machine.
    "NO_GCE_CHECK": "true",
    "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
    # It would ask Google, not the emulator, what kind of bucket this is.
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
  }
