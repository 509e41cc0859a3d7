#!/bin/sh
# Makes a virtual environment and installs depthroute into it with the pinned versions and the CPU build of torch.
# Usage: scripts/setup.sh VENV [EXTRA]        EXTRA: dev, for the tests
set -eu
venv=$1
extra=${2:+[$2]}
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "depthroute needs Python 3.11 or newer; $python is $("$python" --version). Set PYTHON=python3.11 (or newer)." >&2
  exit 2
}
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

torch=$(sed -n 's/^torch==//p' constraints.txt)
if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
  case "$(uname -s)-$(uname -m)" in
    Linux-x86_64)
      # The plain Linux build brings gigabytes of CUDA. First a CPU build that pip is already configured to find, then the one that
      # uv knows where to get, and the plain build only if neither can be had.
      echo "installing the CPU build of torch $torch"
      pip install -q "torch==$torch+cpu" 2>/dev/null || {
        pip install -q "uv>=0.8,<1" &&
          UV_HTTP_TIMEOUT=60 "$venv/bin/uv" pip install -q --python "$venv/bin/python" --torch-backend cpu "torch==$torch" 2>/dev/null
      } || {
        echo "no CPU build of torch could be had; installing the plain one, which is large"
        pip install -q "torch==$torch"
      }
      ;;
    *) pip install -q "torch==$torch" ;;
  esac
fi
echo "installing depthroute$extra"
pip install -q -c constraints.txt -e ".$extra"
