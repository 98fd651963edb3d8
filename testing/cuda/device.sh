#!/usr/bin/env bash
# Everything that needs a GPU, in one folder and one run.
#
#   source TOOLCHAIN/env.sh                     # of toolchain.sh, without --slim or with
#   bash testing/cuda/device.sh pack FOLDER     # builds, here: stripped release programs, under 64 MiB
#   bash testing/cuda/device.sh run FOLDER      # on a machine with a GPU; nothing else is needed there
#   bash testing/cuda/device.sh list            # says what would run
#
# `run` takes under six minutes and writes FOLDER/results.json, or where OUT says. It ends with status 3
# at once where there is no GPU.
set -euo pipefail

readonly MAX_BYTES=$((64 * 1024 * 1024))
# One place for all limits, in seconds: they add up to less than six minutes.
readonly CHECK_S=30 PARITY_S=90 SWEEP_S=90 BENCH_S=40
readonly PARITY=(
    networks_are_the_cpu_s
    a_low_bit_copy_picks_what_it_picks_on_the_cpu
    parts_of_a_network_on_both_sides_add_up_to_the_whole
    memory_is_given_back_and_a_budget_is_kept
    work_that_is_given_up_disturbs_nobody
    operators_on_gpu_tensors_are_the_cpu_s
)
readonly SWEEP=sweep::operators_over_density_shape_and_format
# A model and what the GPU may take of it; llama-7b in f16 is 13 GB.
readonly BENCHES=("llama-7b cpu -" "llama-7b hybrid 5GiB" "llama-7b hybrid 9GiB")

pack() {
    local folder=$1 built size
    cd "$(dirname "${BASH_SOURCE[0]}")/../.."
    mkdir -p "$folder"
    folder=$(cd "$folder" && pwd)
    cargo test --release -p powerinfer-ops --features cuda --lib --no-run \
        --message-format=json >"$folder/build.json"
    built=$(grep -o '"executable":"[^"]*"' "$folder/build.json" | tail -1 | cut -d'"' -f4)
    rm "$folder/build.json"
    strip -o "$folder/ops-tests" "$built"
    cargo build --release --features cuda --example bench
    strip -o "$folder/bench" "${CARGO_TARGET_DIR:-target}/release/examples/bench"
    # Each holds candle's kernels as well: compressed they are less than a third.
    gzip -f "$folder/ops-tests" "$folder/bench"
    cp testing/cuda/device.sh "$folder/"
    size=$(du -sb "$folder" | cut -f1)
    echo "$size bytes of $MAX_BYTES in $folder"
    [ "$size" -lt "$MAX_BYTES" ] || { echo "too large to be carried" >&2; exit 1; }
}

list() {
    printf 'parity: %s\n' "${PARITY[@]}"
    echo "sweep: $SWEEP"
    printf 'bench: %s\n' "${BENCHES[@]}"
}

# Runs one of the ignored tests.
one_test() {
    local limit=$1 name=$2
    timeout "$limit" ./ops-tests --ignored --exact "cuda::tests::$name" --nocapture --test-threads 1
}

# Lines of JSON as the elements of a list.
joined() {
    grep -E '^\{.*\}$' | paste -sd, - || true
}

run() {
    cd "$1"
    local program
    for program in *.gz; do
        [ ! -e "$program" ] || { gunzip -f "$program" && chmod +x "${program%.gz}"; }
    done
    # The toolkit's libraries, never the stubs that the programs were linked with.
    local toolkit
    for toolkit in /usr/local/cuda/lib64 /usr/local/cuda-13*/lib64; do
        [ ! -d "$toolkit" ] || export LD_LIBRARY_PATH="$toolkit${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    done
    local out=${OUT:-.} device parity="" sweep benches="" name status
    if ! device=$(one_test $CHECK_S device_is_there 2>&1); then
        echo "no GPU that these programs can use:" >&2
        grep -m1 'no GPU:' <<<"$device" >&2 || head -5 <<<"$device" >&2
        exit 3
    fi
    device=$(joined <<<"$device")
    echo "$device"
    status=0
    for name in "${PARITY[@]}"; do
        if one_test $PARITY_S "$name" >"$name.log" 2>&1; then
            parity+="\"$name\":true,"
        else
            parity+="\"$name\":false,"
            status=1
            tail -20 "$name.log" >&2
        fi
        echo "$name: $([ $status = 0 ] && echo green || echo see above)"
    done
    sweep=$(one_test $SWEEP_S "$SWEEP" 2>sweep.log | joined)
    for name in "${BENCHES[@]}"; do
        local model kind budget flags json
        read -r model kind budget <<<"$name"
        flags=(--synthetic "$model" --density 0.03 --dtype f16 -p 16 -n 32 --repetitions 3 --json)
        [ "$kind" = cpu ] || flags+=(--device "$kind" --vram-budget "$budget")
        json=$(timeout $BENCH_S ./bench "${flags[@]}" 2>>bench.log) || json='null'
        benches+="{\"case\":\"$name\",\"result\":$json},"
    done
    printf '{"device":%s,"parity":{%s},"sweep":[%s],"bench":[%s]}\n' \
        "$device" "${parity%,}" "$sweep" "${benches%,}" | tee "$out/results.json"
    exit $status
}

case ${1:-} in
    pack) pack "${2:?usage: device.sh pack FOLDER}" ;;
    run) run "${2:?usage: device.sh run FOLDER}" ;;
    list) list ;;
    *) echo "usage: device.sh pack FOLDER | run FOLDER | list" >&2; exit 2 ;;
esac
