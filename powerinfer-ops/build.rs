//! With the feature `cuda`: compiles the kernels in `src/cuda` to PTX, with CUDA's compiler.
//!
//! `NVCC` names the compiler; else it is looked for where `CUDA_HOME` says, and then on the path.
//! Without the feature, and where documentation is hosted, nothing is compiled.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Each is one operator, and becomes one module on the device.
const KERNELS: [&str; 12] = [
    "attention",
    "compact",
    "gate_estimate",
    "norm",
    "quantize",
    "residual",
    "rotary",
    "sparse_axpy",
    "sparse_matvec",
    "tiled_axpy",
    "tiled_matvec",
    "token_norms",
];
/// The oldest GPUs that the kernels run on (Ampere); drivers compile PTX for newer ones.
const ARCHITECTURE: &str = "compute_80";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    println!("cargo::rerun-if-changed=src/cuda");
    for name in ["NVCC", "CUDA_HOME", "NVCC_STUB", "DOCS_RS"] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it for build scripts"));
    for kernel in KERNELS {
        let ptx = out.join(kernel).with_extension("ptx");
        if env::var_os("DOCS_RS").is_some() {
            std::fs::write(&ptx, "").expect("OUT_DIR can be written");
        } else {
            compile(&Path::new("src/cuda").join(kernel).with_extension("cu"), &ptx);
        }
    }
}

fn compile(source: &Path, ptx: &Path) {
    let nvcc = nvcc();
    let status = Command::new(&nvcc)
        // products and sums are fused where kernels say so: the same bits in every instance of one
        .args(["-ptx", "-O3", "-std=c++17", "-lineinfo", "-fmad=false"])
        .arg(format!("-arch={ARCHITECTURE}"))
        .arg("-o")
        .args([ptx, source])
        .status();
    match status {
        Ok(status) if status.success() => {}
        Ok(status) => panic!("{} failed on {}: {status}", nvcc.display(), source.display()),
        Err(error) => panic!(
            "the feature `cuda` needs CUDA's compiler: cannot run {}: {error}; set NVCC or CUDA_HOME",
            nvcc.display()
        ),
    }
}

fn nvcc() -> PathBuf {
    let in_home = |home| PathBuf::from(home).join("bin/nvcc");
    let given = env::var_os("NVCC").map(PathBuf::from);
    given.or_else(|| env::var_os("CUDA_HOME").map(in_home)).unwrap_or_else(|| PathBuf::from("nvcc"))
}
