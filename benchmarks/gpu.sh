#!/usr/bin/env bash
# On a machine with an NVIDIA GPU, in less than ten minutes: tests the Triton kernels compiled,
# tunes them, measures them, and writes the result files.
#
#     benchmarks/gpu.sh [FOLDER]        default: benchmarks/results/<machine>/
#
# torch with CUDA (and the Triton that it brings) must be there already: PYTHON names the
# interpreter that has it. What else is missing is installed beside it, into .venv-gpu; where all
# is there, nothing is fetched.
set -euo pipefail
cd "$(dirname "$0")/.."
began=$SECONDS
PYTHON=${PYTHON:-python3}
LIMIT=${LIMIT:-600}

say() { printf '\n== %s (%d s) ==\n' "$1" $((SECONDS - began)); }

# What is left of the limit, less some to write the files; `timeout` takes no zero.
left() { echo $((LIMIT - (SECONDS - began) > 30 ? LIMIT - (SECONDS - began) : 30)); }

say "environment"
"$PYTHON" - <<'PY' || { echo "needs torch with CUDA and triton in $PYTHON, and a GPU" >&2; exit 1; }
import torch
import triton

assert torch.cuda.is_available(), "torch sees no GPU"
print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
PY
if ! "$PYTHON" -c 'import matplotlib, pytest, rich, typer' 2>/dev/null; then
    # torch, triton and the packages of CUDA stay as they are.
    pins=$(mktemp)
    grep -vE '^(torch|triton|nvidia-|numpy|sympy|networkx|fsspec|jinja2|filelock)' constraints.txt >"$pins"
    "$PYTHON" -m venv --system-site-packages .venv-gpu
    PYTHON=$PWD/.venv-gpu/bin/python
    "$PYTHON" -m pip install --quiet --disable-pip-version-check -c "$pins" \
        'matplotlib>=3.9' 'pytest>=8.3' 'rich>=13' 'typer>=0.15'
    rm "$pins"
fi
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}
export HF_HUB_OFFLINE=1 SUBQUAD_TRITON=1
unset TRITON_INTERPRET
out=${1:-$("$PYTHON" -c '
from subquad.arena.machine import machine
print("benchmarks/results/" + machine(threads=1, device="cuda")["slug"])')}
mkdir -p "$out"

say "tests"
tests=0
workers=$("$PYTHON" -c 'import importlib.util as u; print("-n 8" if u.find_spec("xdist") else "")')
# shellcheck disable=SC2086  # two words, or none
timeout "$(left)" "$PYTHON" -m pytest -q -p no:cacheprovider $workers \
    tests/kernel/triton_cases.py -k "not sizes and not everything or at_once" |
    tee "$out/gpu-tests.txt" || tests=$?

say "tuning"
# The block sizes of the kernels that the benchmark runs, kept on disk by Triton.
timeout "$(left)" "$PYTHON" benchmarks/tune_triton.py "$out/triton-blocks.json"

say "measuring"
timeout "$(left)" "$PYTHON" -c 'from subquad.cli import main; main()' \
    bench speed --device cuda --quick --out "$out"

say "done: $out"
exit "$tests"
