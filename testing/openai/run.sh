#!/usr/bin/env bash
# The server example, tried with the official OpenAI client of Python, which this installs into a
# folder that it removes again. Says so and ends well where there is no Python or no package index.
#
#     cargo build --example server && bash testing/openai/run.sh target/debug/examples/server
set -euo pipefail
server=${1:?"expected the path of the server example"}
client=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/client.py

scratch=$(mktemp -d)
server_pid=""
cleanup() {
    [ -z "$server_pid" ] || kill "$server_pid" 2>/dev/null || true
    rm -rf "$scratch"
}
trap cleanup EXIT

if ! python3 -m venv "$scratch/venv" >/dev/null 2>&1; then
    echo "skipped: python3 with venv is not installed"
    exit 0
fi
if ! timeout 300 "$scratch/venv/bin/pip" install -q --disable-pip-version-check "openai>=2,<4" >"$scratch/pip.log" 2>&1; then
    echo "skipped: the package openai cannot be installed: $(tail -n 1 "$scratch/pip.log")"
    exit 0
fi

"$server" --port 0 --threads 2 --parallel 8 2>"$scratch/server.log" &
server_pid=$!
for _ in $(seq 100); do
    address=$(sed -n 's/^listening on //p' "$scratch/server.log")
    [ -z "$address" ] || break
    sleep 0.1
done
[ -n "$address" ] || { cat "$scratch/server.log" >&2; exit 1; }
timeout 300 "$scratch/venv/bin/python" "$client" "$address"
