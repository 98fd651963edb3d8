#!/usr/bin/env bash
# Programs as a stranger writes them: a crate outside the workspace that depends on `powerinfer` by
# path, with the README's program and one for each thing that an application does.
#
#     bash testing/outside/run.sh
#
# Builds with the workspace's lock file, so that the versions are those that were tested.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$root/target}/outside"

crate=$(mktemp -d)
trap 'rm -rf "$crate"' EXIT
mkdir -p "$crate/src/bin"
cp "$root/Cargo.lock" "$crate/"
cp "$root"/testing/outside/*.rs "$crate/src/bin/"
# the first Rust program of the README
awk '/^```rust$/ { inside = 1; next } /^```$/ { if (inside) exit } inside' "$root/README.md" >"$crate/src/bin/readme.rs"
lines=$(grep -c . "$crate/src/bin/readme.rs")
[ "$lines" -gt 0 ] && [ "$lines" -le 12 ] || { echo "error: the README's program has $lines lines" >&2; exit 1; }

cat >"$crate/Cargo.toml" <<TOML
[package]
name = "outside"
version = "0.0.0"
edition = "2024"
publish = false

[dependencies]
powerinfer = { path = "$root" }

[workspace]

[profile.dev]
opt-level = 1
debug = false

[profile.dev.package."*"]
opt-level = 2
debug = false
TOML

cargo build --manifest-path "$crate/Cargo.toml"
# where a model path as the README has it leads to the model
cd "$root"
for program in readme two_threads cancel chat own_sampler; do
    echo "== $program"
    "$CARGO_TARGET_DIR/debug/$program"
    echo
done
