#!/usr/bin/env bash
# Compiles every kernel with CUDA's compiler and reports what each takes on a GPU: registers, shared
# memory, spills. Fails if one spills, since spilled registers are memory traffic that nobody sees.
#
#   source TOOLCHAIN/env.sh                      # of testing/cuda/toolchain.sh
#   bash testing/cuda/ptx.sh [ARCH...]           # sm_80 and sm_90 unless given
#
# Prints CSV: kernel, architecture, registers, shared bytes, stack bytes, spill stores, spill loads.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../powerinfer-ops/src/cuda"
nvcc=${NVCC:-${CUDA_HOME:-/usr/local/cuda}/bin/nvcc}
[ "${NVCC_STUB:-0}" != 1 ] || { echo "NVCC_STUB compiles nothing" >&2; exit 1; }
[ $# -gt 0 ] || set -- sm_80 sm_90
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
spilled=0
echo "kernel,arch,registers,shared_bytes,stack_bytes,spill_store_bytes,spill_load_bytes"
for arch in "$@"; do
    for source in *.cu; do
        # the PTX that is embedded, then from it what a driver would make
        "$nvcc" -ptx -arch=compute_80 -O3 -std=c++17 -lineinfo -fmad=false -o "$work/kernel.ptx" "$source"
        "$nvcc" -cubin -arch="$arch" -Xptxas -v -o "$work/kernel.cubin" "$work/kernel.ptx" \
            >"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
        awk -v arch="$arch" '
            /Compiling entry function/ { match($0, /function .[a-z0-9_]+/); name = substr($0, RSTART + 10, RLENGTH - 10) }
            /bytes stack frame/ {
                for (i = 1; i < NF; i++) {
                    if ($(i + 1) == "bytes" && $(i + 2) ~ /^stack/) stack = $i
                    if ($(i + 1) == "bytes" && $(i + 3) ~ /^stores/) stores = $i
                    if ($(i + 1) == "bytes" && $(i + 3) ~ /^loads/) loads = $i
                }
            }
            /Used [0-9]+ registers/ {
                shared = 0
                for (i = 1; i < NF; i++) {
                    if ($i == "Used") registers = $(i + 1)
                    if ($(i + 1) == "bytes" && $(i + 2) ~ /^smem/) shared = $i
                }
                print name "," arch "," registers "," shared "," stack "," stores "," loads
            }' "$work/log" >"$work/rows"
        [ -s "$work/rows" ] || { echo "no kernel seen in $source" >&2; exit 1; }
        cat "$work/rows"
        awk -F, '$6 + $7 > 0 { exit 1 }' "$work/rows" || spilled=1
    done
done
[ $spilled = 0 ] || { echo "a kernel spills registers" >&2; exit 1; }
