//! `memtrace run --past-oom`: a program continues when the simulated GPU is full.

use serde_json::Value;
use tempfile::TempDir;

use crate::common::torch::{self, Torch, exit_of, scripts, text};

/// A card that is too small for `past_oom.py`, and otherwise equal to [`LARGE`], so that libraries and
/// context take the same memory on both.
const SMALL: &str = "h100-80g,mem=6g";
const LARGE: &str = "h100-80g";

/// A run of `past_oom.py`.
struct Run {
    status: i32,
    stderr: String,
    /// The allocator's peak of reserved bytes, its retries, and its OOMs.
    counts: Vec<u64>,
    summary: Value,
    oom: Value,
}

impl Run {
    fn new(torch: &Torch, card: &str, past_oom: bool, conf: &str) -> Run {
        let out = TempDir::new().unwrap();
        let trace = out.path().join("trace");
        let mut command = torch::memtrace();
        command.args(["run", "--phantom", card, "-o"]).arg(&trace);
        if past_oom {
            command.arg("--past-oom");
        }
        command.arg("--").arg(&torch.python).arg(scripts().join("phantom/past_oom.py"));
        let output = command.env("PYTORCH_CUDA_ALLOC_CONF", conf).output().unwrap();
        let json = |report: &str| -> Value {
            let output = torch::memtrace().arg(report).arg(&trace).arg("--json").output().unwrap();
            serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", text(&output.stderr)))
        };
        Run {
            status: exit_of(&output),
            stderr: text(&output.stderr),
            counts: text(&output.stdout).split_whitespace().map(|word| word.parse().unwrap()).collect(),
            summary: json("summary")["processes"][0].clone(),
            oom: json("oom")["ooms"][0].clone(),
        }
    }

    fn needed(&self) -> f64 {
        self.summary["needed_bytes"].as_f64().unwrap_or_else(|| panic!("{}", self.stderr))
    }

    /// Returns the highest use of the device, in bytes.
    fn used(&self) -> f64 {
        self.summary["devices"][0]["peak_used"]["bytes"].as_f64().unwrap()
    }
}

/// Returns true if two sizes differ by at most 1%.
fn are_near(a: f64, b: f64) -> bool {
    (a - b).abs() <= 0.01 * b
}

#[test]
fn past_oom_measures_what_a_large_card_uses_and_names_the_moment() {
    Torch::on_main(|torch| {
        let (small, large) = (Run::new(torch, SMALL, true, ""), Run::new(torch, LARGE, false, ""));
        assert_eq!((small.status, large.status), (0, 0), "{}\n{}", small.stderr, large.stderr);
        assert!(are_near(small.needed(), large.used()), "{} for {}", small.needed(), large.used());
        // The peak of used memory must equal the needed memory, although the small card itself was full.
        assert!(are_near(small.used(), small.needed()), "{} for {}", small.used(), small.needed());
        // The allocator must have freed its cache and retried (`counts[1]`), and must not have raised an OOM
        // (`counts[2]`).
        assert!(small.counts[1] > 0 && small.counts[2] == 0, "{:?}", small.counts);
        assert_eq!(small.summary["events"]["oom"], 1);
        assert_eq!(
            (&small.oom["phase"], &small.oom["step"]),
            (&"forward".into(), &0.into()),
            "{:#}",
            small.oom
        );
        assert_eq!(small.oom["requested_bytes"], 512 << 20, "{:#}", small.oom);
        for part in [
            "would have run out of memory on GPU 0: 512.00 MiB were requested by Layers for float32 [",
            "]; the program goes on (--past-oom)",
            "; this card has 6.00 GiB: ",
            " too little; would have died in Layers of forward, step 0",
        ] {
            assert!(small.stderr.contains(part), "{part}: {}", small.stderr);
        }
        assert!(
            large.summary["needed_bytes"].is_null() && !large.stderr.contains("needs "),
            "{}",
            large.stderr
        );
    });
}

#[test]
fn past_oom_needs_the_smallest_card_on_which_the_program_fits_with_expandable_segments_too() {
    Torch::on_main(|torch| {
        for conf in ["", "expandable_segments:True"] {
            let past = Run::new(torch, SMALL, true, conf);
            assert_eq!(past.status, 0, "{conf}: {}", past.stderr);
            let card = |mib: f64| format!("h100-80g,mem={}m", mib as u64);
            let mib = past.needed() / f64::from(1 << 20);
            let fits = Run::new(torch, &card(mib.ceil()), false, conf);
            assert_eq!((fits.status, fits.counts[2]), (0, 0), "{conf}: {}", fits.stderr);
            let too_small = Run::new(torch, &card(mib * 0.98), false, conf);
            assert_ne!(too_small.status, 0, "{conf}: {}", too_small.stderr);
        }
    });
}

#[test]
fn past_oom_is_off_unless_it_is_asked_for() {
    Torch::on_main(|torch| {
        let run = Run::new(torch, SMALL, false, "");
        assert_ne!(run.status, 0);
        assert!(run.stderr.contains("memtrace: out of memory on GPU 0: "), "{}", run.stderr);
        assert!(run.summary["needed_bytes"].is_null() && !run.stderr.contains("needs "), "{}", run.stderr);
    });
}

#[test]
fn past_oom_grants_a_request_at_once_if_pytorch_does_not_retry_it() {
    Torch::on_main(|torch| {
        let run = Run::new(torch, SMALL, true, "backend:cudaMallocAsync");
        assert_eq!(run.status, 0, "{}", run.stderr);
        assert_eq!(run.summary["events"]["oom"], 1);
        assert!(run.needed() > (6u64 << 30) as f64, "{}", run.needed());
    });
}

#[test]
fn memtrace_phantom_past_oom_needs_a_simulated_gpu_and_a_valid_value() {
    let refused = torch::memtrace().args(["run", "--past-oom", "--", "true"]).output().unwrap();
    assert_eq!(exit_of(&refused), 2);
    assert!(text(&refused.stderr).contains("--phantom"), "{}", text(&refused.stderr));
    for value in ["yes", "2", "-1", " 1"] {
        let mut run = torch::memtrace();
        run.args(["run", "--phantom", "a10", "--", "true"]).env("MEMTRACE_PHANTOM_PAST_OOM", value);
        let output = run.output().unwrap();
        assert_eq!(exit_of(&output), 2, "{value}");
        let why = "MEMTRACE_PHANTOM_PAST_OOM: it must be 0 or 1";
        assert!(text(&output.stderr).contains(why), "{value}: {}", text(&output.stderr));
    }
}
