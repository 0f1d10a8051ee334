#!/usr/bin/env bash
# bash ./run_clm_synthetic.sh [BS=16] [MEMCAP=0] [MODEL=125m] [GPUNUM=1]
# Further options go to run_clm.py.
set -euo pipefail

BS=${1:-16}
MEMCAP=${2:-0} # GB of each GPU, 0 for all
MODEL=${3:-125m}
GPUNUM=${4:-1}

cd "$(dirname "$0")"
OUT=${OUT:-./logs}
mkdir -p "$OUT"

torchrun --standalone --nproc_per_node "$GPUNUM" run_clm.py -s \
  --output_dir "$OUT" \
  --mem_cap "$MEMCAP" \
  --model_name_or_path "facebook/opt-$MODEL" \
  --per_device_train_batch_size "$BS" "${@:5}" 2>&1 | tee "$OUT/colo_${MODEL}_bs_${BS}_cap_${MEMCAP}_gpu_${GPUNUM}.log"
