#!/usr/bin/env bash
# bash ./run_clm.sh CHECKPOINT_FOLDER TRAIN_FILE [BS=16] [MEMCAP=0] [GPUNUM=1]
# Further options go to run_clm.py.
set -euo pipefail

if [ $# -lt 2 ]; then
  echo "usage: bash ./run_clm.sh CHECKPOINT_FOLDER TRAIN_FILE [BS=16] [MEMCAP=0] [GPUNUM=1]" >&2
  exit 2
fi
CHECKPOINT=$(realpath "$1")
TRAIN_FILE=$(realpath "$2")
BS=${3:-16}
MEMCAP=${4:-0} # GB of each GPU, 0 for all
GPUNUM=${5:-1}

cd "$(dirname "$0")"
OUT=${OUT:-./logs}
mkdir -p "$OUT"

torchrun --standalone --nproc_per_node "$GPUNUM" run_clm.py \
  --output_dir "$OUT" \
  --mem_cap "$MEMCAP" \
  --model_name_or_path "$CHECKPOINT" \
  --train_file "$TRAIN_FILE" \
  --per_device_train_batch_size "$BS" "${@:6}" 2>&1 | tee "$OUT/colo_bs_${BS}_cap_${MEMCAP}_gpu_${GPUNUM}.log"
