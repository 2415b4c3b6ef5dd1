//! `scripts/real-gpu`: the simulated GPU against figures that were recorded on a real one.

use std::path::Path;
use std::process::Command;

use crate::common::torch::{Torch, VERSIONS, built};

#[test]
fn real_gpu_figures_of_ops_and_programs_are_met_or_have_a_cause() {
    built("libmemtrace_phantom.so");
    if Torch::installed(VERSIONS[0]).is_none() {
        return;
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/real-gpu");
    let output = Command::new("python3").arg(script).arg("--ci").output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{printed}{}", String::from_utf8_lossy(&output.stderr));
    assert!(printed.contains("48 programs: ") && printed.contains("1280 ops: "), "{printed}");
}
