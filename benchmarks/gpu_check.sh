#!/usr/bin/env bash
# Build, test, check and measure on the GPU of this machine in under eight minutes; --dry-run does without one.
# PYTHON names the interpreter that has torch, OUT the folder of the results.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" -m benchmarks.gpu_check "$@"
