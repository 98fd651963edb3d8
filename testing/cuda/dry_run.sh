#!/usr/bin/env bash
# The programs that `device.sh pack` made, on a driver that runs kernels on the CPU: all of the GPU's side runs,
# with candle and cudarc, up to the calls of the driver (testing/hostsim/src/driver.cpp). Takes minutes.
#
#   bash testing/cuda/dry_run.sh FOLDER [CHECK...]   # every check but the sweep unless some are named
#
# Work is done once when somebody waits for it, and with DRIVER_EAGER=1 as early as it may be.
set -euo pipefail
[ -f "${1:-}/programs.tar.xz" ] || { echo "usage: dry_run.sh FOLDER [CHECK...], FOLDER made by device.sh pack" >&2; exit 2; }
packed=$1/programs.tar.xz
shift
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tar -xJf "$packed" -C "$work"
mkdir "$work/driver"
"${CXX:-g++}" -std=c++17 -O2 -w -ffp-contract=off -fPIC -shared -pthread -Wl,-soname,libcuda.so.1 \
    -I"$here/../../powerinfer-ops/src/cuda" -I"$here/../hostsim/src" \
    -o "$work/driver/libcuda.so.1" "$here/../hostsim/src/driver.cpp"
export LD_LIBRARY_PATH=$work/driver:$work/lib:$work/stand-ins DRIVER_REPORT=1
cd "$work"
[ $# -gt 0 ] || set -- $(./ops-tests --ignored --list 2>/dev/null | sed -n 's/^cuda::tests::\([a-z_]*\): test$/\1/p')
status=0
for check in "$@"; do
    began=$SECONDS
    if ./ops-tests --ignored --exact "cuda::tests::$check" --test-threads 1 >log 2>&1 && grep -q "1 passed" log; then
        said=passed
    else
        said=FAILED status=1
        tail -20 log >&2
    fi
    echo "$check $said in $((SECONDS - began)) s: $(grep '^driver: .* launches' log || true)"
done
./bench --synthetic tiny --density 0.03 --hot-share 0.17 --distinct-layers 2 --dtype f16 --kv-dtype f16 \
    --device cuda --budgets 40,70 --arrangements everything/exact,layers/dense,layers/exact,dense/exact,whole/dense \
    -p 16 -n 2 --repetitions 1 --json 2>log | grep -q '"left_out":\[\]' || { cat log >&2; status=1; }
[ $status != 0 ] || echo "bench passed: $(grep '^driver: .* launches' log)"
exit $status
