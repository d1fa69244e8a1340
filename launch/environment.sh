# shellcheck shell=bash
# Sourced by the launch scripts: makes the virtual environment and installs the
# package into it, and does neither a second time unless something changed.
#
# Read from the environment: PYTHON (interpreter that makes the environment),
# VENV (where it lives; default .venv).

VENV="${VENV:-.venv}"

# Prints the scripts' own header comment: the lines after the shebang.
print_help() {
  sed -n '2,/^[^#]/{/^#/!d;s/^# \{0,1\}//;p;}' "$1"
}

is_supported() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

# Prints the interpreter to use; explains and fails when there is none.
find_python() {
  if [[ -n "${PYTHON:-}" ]]; then
    if ! is_supported "$PYTHON"; then
      echo "error: PYTHON=$PYTHON does not run, or is older than Python 3.11." \
        "Point PYTHON at a Python 3.11 or newer." >&2
      return 2
    fi
    echo "$PYTHON"
    return
  fi
  local candidate
  for candidate in python3.11 python3.12 python3.13 python3; do
    if is_supported "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  echo "error: no Python 3.11 or newer found (tried python3.11, python3.12," \
    "python3.13, python3). Install one, or say PYTHON=/path/to/python3." >&2
  return 2
}

# What an installation depends on: if this is unchanged, so is the environment.
installation_key() {
  { pwd && cat setup.py pyproject.toml && "$VENV/bin/python" -VV; } |
    "$VENV/bin/python" -c '
import hashlib, sys
print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

# install_package [EXTRA]: `.` or `.[EXTRA]`, editable, into $VENV.
install_package() {
  local extra="${1:-}" python key stamp
  if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    python="$(find_python)" || return
    echo "Making $VENV with $("$python" --version)..." >&2
    if ! "$python" -m venv --clear "$VENV"; then
      echo "error: '$python -m venv $VENV' failed (see above). On Debian and" \
        "Ubuntu the venv module is a package of its own: python3-venv." >&2
      return 2
    fi
  fi
  key="$(installation_key)"
  stamp="$VENV/.installed${extra:+-$extra}"
  if [[ -f "$stamp" && "$(<"$stamp")" == "$key" ]]; then
    return
  fi
  echo "Installing .${extra:+[$extra]} into $VENV (a minute the first time)..." >&2
  # setuptools warns that a folder of the package's name may shadow it: it is it.
  if ! PYTHONWARNINGS=ignore "$VENV/bin/python" -m pip install --quiet \
    --disable-pip-version-check --editable ".${extra:+[$extra]}"; then
    echo "error: pip could not install t1jax (see above). It needs the" \
      "Python package index or a mirror of it; run this again once that" \
      "is reached: what is installed already is kept." >&2
    return 2
  fi
  echo "$key" >"$stamp"
  # An extra brings the plain package with it.
  echo "$key" >"$VENV/.installed"
}
