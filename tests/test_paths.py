import pytest
from etils import epath

from t1jax import paths
from t1jax.paths import PathError


def test_what_a_user_writes_becomes_absolute(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert paths.parse("runs/x") == epath.Path(tmp_path / "runs" / "x")
  assert str(paths.parse("gs://bucket/x")) == "gs://bucket/x"
  assert paths.is_remote("gs://bucket/x") and not paths.is_remote(tmp_path)


@pytest.mark.parametrize("text", ["gs:/b/x", "gs://", "s3://b/x", "http://b/x"])
def test_other_urls_are_refused(text):
  with pytest.raises(PathError, match="expected a local one or gs://BUCKET"):
    paths.parse(text)


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
  path = tmp_path / "file"
  paths.write_atomically(path, "old")
  with pytest.raises(ValueError, match="half way"):
    with paths.to_write(path) as file:
      file.write_text("ne")
      raise ValueError("half way")
  assert path.read_text() == "old"
  paths.write_atomically(path, b"new")
  assert path.read_text() == "new"
  assert list(tmp_path.iterdir()) == [path]


def test_local_files_are_not_copied(tmp_path):
  with paths.to_read(tmp_path / "file") as file:
    assert file == epath.Path(tmp_path / "file")
  mirror = paths.Mirror(tmp_path / "new")
  assert mirror.local == epath.Path(tmp_path / "new")
  mirror.close()
  assert mirror.local.exists()
