"""A bucket on the loopback device, for what tests and programs do alike.

gcp-storage-emulator, and the conditions on an object's generation that it
lacks: TensorStore, which writes the checkpoints, goes by them.
"""

import contextlib
import functools
import http.server
import os
import re
import threading
from collections.abc import Iterator
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

BUCKET = "bucket"
_OBJECT = re.compile(r"(?:/upload)?/storage/v1/b/([^/]+)/o(?:/([^/]+))?")


class _Server(http.server.HTTPServer):
  request_queue_size = 128  # it answers one request at a time

  def handle_error(self, request, client_address):
    pass  # a client that was killed does not wait for its answer


@contextlib.contextmanager
def bucket() -> Iterator[dict[str, str]]:
  """Serves gs://bucket; yields the environment in which programs find it.

  Skips the test, with the reason, where the emulator is not installed.
  """
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
      name = unquote(match[2] or query.get("name", ""))
      there = store.objects.get(match[1], {}).get(name, {})
      self.generation = there.get("generation", "0")
      status = None
      if query.get("ifGenerationNotMatch") == self.generation:
        status = 304
      elif query.get("ifGenerationMatch", self.generation) != self.generation:
        status = 412
      if status is None:
        return True
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
  buckets.create_bucket(BUCKET, store)
  # Else it keeps, and writes down at each request, all that was ever deleted.
  store.buckets[BUCKET]["softDeletePolicy"]["retentionDurationSeconds"] = "0"
  with _Server(("127.0.0.1", 0), functools.partial(Handler, store)) as server:
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
      yield {**os.environ, **_settings(server.server_address[1])}
    finally:
      server.shutdown()
      thread.join()


def _settings(port: int) -> dict[str, str]:
  url = f"http://127.0.0.1:{port}"
  return {
    "STORAGE_EMULATOR_HOST": url,  # for gcsfs, below epath
    "TENSORSTORE_GCS_HTTP_URL": url,  # for TensorStore, below Orbax
    # Nobody is to look for credentials outside this machine.
    "NO_GCE_CHECK": "true",
    "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
    # It would ask Google, not the emulator, what kind of bucket this is.
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
  }
