#!/usr/bin/env bash
# A CUDA 13.0 build toolchain (nvcc + headers + link libraries) from PyPI wheels only.
# No GPU, driver, or system CUDA needed.
#
#   bash testing/cuda/toolchain.sh DEST         # install (idempotent): 660 MB to download, 1.2 GB on disk
#   bash testing/cuda/toolchain.sh --slim DEST  # no cuBLAS, cuRAND and NVRTC, but stubs to link against:
#                                               # 105 MB; programs still run on a machine with CUDA 13
#   source DEST/env.sh                          # then: cargo build --features cuda
#
# 13.0 is pinned on purpose: PTX made by a newer nvcc (13.1+) is refused by a 580-series driver.
set -euo pipefail
slim=0; [ "${1:-}" = --slim ] && { slim=1; shift; }
dest=${1:?usage: testing/cuda/toolchain.sh [--slim] DEST}
mkdir -p "$dest"; dest=$(cd "$dest" && pwd)
root=$dest/site/nvidia/cu13
stamp=$dest/.done-$slim

compile_pkgs=(                      # what nvcc itself needs
  nvidia-cuda-nvcc==13.0.88         # nvcc, cudafe++, ptxas, fatbinary, nvlink
  nvidia-nvvm==13.0.88              # cicc, libdevice
  nvidia-cuda-crt==13.0.88          # crt/*.h
  nvidia-cuda-runtime==13.0.96      # cuda.h, cuda_runtime.h, cuda_fp16.h, libcudart, libcudadevrt
  nvidia-cuda-cccl==13.0.85         # cub, thrust, libcu++ headers
)
lib_pkgs=(                          # only linked against (candle asks for cublas, cublasLt, curand, nvrtc)
  nvidia-cuda-nvrtc==13.0.88
  nvidia-cublas==13.0.2.14
  nvidia-curand==10.4.0.35
)
# What cuRAND's headers declare is needed for the slim stub too; its wheel is only 60 MB, but the
# candle link needs just the symbols below.
if [ ! -e "$stamp" ]; then
  rm -rf "$dest/site"
  pkgs=("${compile_pkgs[@]}"); [ $slim = 1 ] || pkgs+=("${lib_pkgs[@]}")
  python3 -m pip install -q --no-deps --only-binary=:all: --root-user-action=ignore \
    --target "$dest/site" "${pkgs[@]}"
  cd "$root"
  # The wheels have lib/libX.so.N alone: linkers want libX.so, nvcc and cudaforge want lib64.
  ln -sfn lib lib64
  for f in lib/lib*.so.*; do
    b=$(basename "$f"); ln -sfn "$b" "lib/${b%%.so.*}.so"
  done
  # The driver library comes with a driver, never with a wheel: make a link stub. Each entry
  # answers CUDA_ERROR_NO_DEVICE (100), so a program that is started on it fails cleanly.
  mkdir -p lib/stubs
  stub() { # name soname symbols...
    local name=$1 soname=$2; shift 2
    printf 'int %s(void){return 100;}\n' "$@" | \
      cc -shared -fPIC -w -x c - -Wl,-soname,"$soname" -o "lib/stubs/$soname"
    ln -sfn "$soname" "lib/stubs/$name.so"
  }
  stub libcuda libcuda.so.1 $(grep -oE '\bcu[A-Z][A-Za-z0-9_]*' include/cuda.h | sort -u)
  if [ $slim = 1 ]; then
    # Names come from the bindings that will be linked: the unpacked cudarc crate.
    src=$(ls -d "${CARGO_HOME:-$HOME/.cargo}"/registry/src/*/cudarc-0.19.* 2>/dev/null | tail -1)
    [ -n "$src" ] || { echo "run 'cargo fetch' in the workspace first" >&2; exit 1; }
    names() { grep -ohE "\bfn $2[A-Za-z0-9_]*" "$src/src/$1/sys/mod.rs" | sed 's/^fn //' | sort -u; }
    stub libnvrtc   libnvrtc.so.13   $(names nvrtc nvrtc)
    stub libcublas  libcublas.so.13  $(names cublas cublas)
    stub libcublasLt libcublasLt.so.13 $(names cublaslt cublasLt)
    stub libcurand  libcurand.so.10  $(names curand curand)
  fi
  touch "$stamp"
fi
cat > "$dest/env.sh" <<EOF
export CUDA_HOME="$root" CUDA_PATH="$root"   # cudarc: -L \$CUDA_HOME/{lib,lib64,lib/stubs}
export NVCC="$root/bin/nvcc"                 # cudaforge's first choice
export PATH="$root/bin:\$PATH"               # cudarc's build script runs 'nvcc --version'
export CUDARC_CUDA_VERSION=13000             # or skip that call
export CUDA_COMPUTE_CAP=\${CUDA_COMPUTE_CAP:-90}   # no nvidia-smi here; 90 -> sm_90a
EOF
echo "CUDA toolchain ready: source $dest/env.sh"
