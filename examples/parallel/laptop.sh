#!/usr/bin/env bash
# A rehearsal on the CPU: two processes over gloo, four chunks of a small model, a minute. The same command goes on where it was stopped.
set -euo pipefail
out=${1:-runs/laptop}

depthroute data prepare multi-hop --out "$out/data" --documents 400
OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 -m depthroute train "$out/run" --data "$out/data" --recipe small \
    --residual block:4 --parallel pp:2,virtual=2 \
    --set train.device=cpu --set train.steps=10 --set train.sequences=8 --set train.evaluation_tokens=4096 --set train.threads=1 \
    --set model.width=48 --set model.heads=4 --set model.mlp_width=96

depthroute gather "$out/run"
