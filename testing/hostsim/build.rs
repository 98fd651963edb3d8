//! Compiles the kernels as C++: once as they are, and once for each planted fault.
//!
//! Without a C++ compiler, or on a system whose threads of control cannot be switched as the shim
//! does it, the tests are ignored and say so; with `HOSTSIM_REQUIRED` set this fails instead.

use std::path::Path;

/// A planted fault: its define, and the file that has it.
const MUTANTS: [(&str, &str); 25] = [
    ("MISSING_GUARD", "sparse_matvec.cu"),
    ("SHORT_REDUCTION", "sparse_matvec.cu"),
    ("UNPICKED_NAN", "sparse_matvec.cu"),
    ("STRICT_THRESHOLD", "sparse_matvec.cu"),
    ("MISSING_GUARD", "sparse_axpy.cu"),
    ("WRONG_PART", "sparse_axpy.cu"),
    ("MISSING_BARRIER", "compact.cu"),
    ("MISSING_GUARD", "compact.cu"),
    ("WRONG_TALLY", "compact.cu"),
    ("MISSING_BARRIER", "quantize.cu"),
    ("SHORT_REDUCTION", "quantize.cu"),
    ("WRONG_ORDER", "gate_estimate.cu"),
    ("MISSING_BARRIER", "norm.cu"),
    ("MISSING_GUARD", "residual.cu"),
    ("MISSING_BARRIER", "token_norms.cu"),
    ("MISSING_GUARD", "rotary.cu"),
    ("MISSING_BARRIER", "attention.cu"),
    ("SHORT_REDUCTION", "attention.cu"),
    ("FUTURE_SEEN", "attention.cu"),
    ("MISSING_BARRIER", "tiled_matvec.cu"),
    ("MISSING_GUARD", "tiled_matvec.cu"),
    ("WRONG_ORDER", "tiled_matvec.cu"),
    ("MISSING_BARRIER", "tiled_axpy.cu"),
    ("MISSING_GUARD", "tiled_axpy.cu"),
    ("WRONG_GROUP", "tiled_axpy.cu"),
];

fn main() {
    println!("cargo::rustc-check-cfg=cfg(no_shim)");
    println!("cargo::rerun-if-env-changed=HOSTSIM_REQUIRED");
    println!("cargo::rerun-if-changed=src");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed={KERNELS}");
    if let Err(reason) = compile() {
        let required = std::env::var_os("HOSTSIM_REQUIRED").is_some();
        assert!(!required, "the kernels cannot be run on this machine's CPU: {reason}");
        println!("cargo::warning=tests of CUDA kernels are ignored: {reason}");
        println!("cargo::rustc-cfg=no_shim");
    }
}

const KERNELS: &str = "../../powerinfer-ops/src/cuda";

fn compile() -> Result<(), String> {
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() != Ok("linux") {
        return Err("the shim switches threads as Linux does".to_owned());
    }
    object("all.cu", "hostsim_kernels", None)?;
    for (fault, file) in MUTANTS {
        let stem = Path::new(file).file_stem().and_then(|stem| stem.to_str()).unwrap_or(file);
        object(file, &format!("hostsim_{stem}_{}", fault.to_lowercase()), Some(fault))?;
    }
    Ok(())
}

/// Compiles one file of kernels; `entry` is the function that launches them.
fn object(file: &str, entry: &str, mutant: Option<&str>) -> Result<(), String> {
    let mut build = cc::Build::new();
    build.cpp(true).std("c++17").opt_level(1).warnings(false).file("src/host.cpp");
    // a fused multiply-add is one where the kernels say so, and only there
    build.flag("-ffp-contract=off").include(KERNELS).include("src");
    build.define("HOST_SOURCE", format!("\"{file}\"").as_str()).define("HOST_ENTRY", entry);
    if let Some(mutant) = mutant {
        build.define(&format!("MUTANT_{mutant}"), None);
    }
    build.try_compile(entry).map_err(|error| error.to_string())
}
