#!/usr/bin/env bash
# One machine with eight GPUs: the Low-Rank paper's 1B shape, parameters in shards. DATA holds shards made by `depthroute data`.
# A process that dies ends them all; --max-restarts starts them again, and they go on from the last checkpoint.
set -euo pipefail
data=$1
out=${2:-runs/one-machine}

torchrun --standalone --nproc-per-node 8 --max-restarts 3 -m depthroute train "$out" --data "$data" --recipe lr-1b \
    --parallel fsdp --set train.device=cuda --set train.precision=bf16 --set train.microbatch=4
