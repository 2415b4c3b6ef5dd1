//! Runs every report and export on one trace file. None may panic, whatever the file contains.

use std::path::{Path, PathBuf};

use memtrace_analysis::exports::{self, EXPORTS};
use memtrace_analysis::options::Options;
use memtrace_analysis::read::input::Input;
use memtrace_analysis::reports::with_views;

/// Returns a path for a file of this process, in memory if possible.
pub fn place() -> PathBuf {
    let shm = Path::new("/dev/shm");
    let folder = if shm.is_dir() { shm.to_owned() } else { std::env::temp_dir() };
    folder.join(format!("memtrace-fuzz-{}.csv", std::process::id()))
}

/// Runs all reports and exports on a trace of these bytes.
pub fn run(bytes: &[u8]) {
    let path = place();
    if std::fs::write(&path, bytes).is_err() {
        return;
    }
    let Ok(input) = Input::open(&path) else { return };
    for report in with_views() {
        for lenient in [false, true] {
            let mut options = Options { lenient, ..Options::default() };
            for flag in report.flags().iter().filter(|flag| !flag.default.is_empty()) {
                options.values.insert(flag.name, flag.default.to_owned());
            }
            let inputs = vec![input.clone(); report.inputs().len()];
            if let Ok(answer) = report.run(&inputs, &options) {
                assert!(!answer.text().is_empty());
                assert!(answer.to_json(report.name()).is_object());
            }
        }
    }
    let place = path.with_extension("exports");
    for export in EXPORTS {
        let mut options = Options { lenient: true, ..Options::default() };
        for flag in export.flags().iter().filter(|flag| !flag.default.is_empty()) {
            options.values.insert(flag.name, flag.default.to_owned());
        }
        if export.name() == "plots" {
            // Rasterizing takes a hundred times longer than everything else.
            options.values.insert("image", "svg".to_owned());
        }
        if let Ok(answer) = exports::run(*export, &input, &options, Some(&place.join(export.name()))) {
            assert!(answer.to_json("export").is_object());
        }
        std::fs::remove_dir_all(&place).ok();
    }
}
