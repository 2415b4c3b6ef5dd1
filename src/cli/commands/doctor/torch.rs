//! Checks the answers of the probe about torch and the device.

use memtrace_trace::counts::counted;
use memtrace_trace::units::Unit;
use serde_json::Value;

use super::findings::{Findings, State};

/// Checks the version and build of torch.
pub(super) fn check_torch(findings: &mut Findings, probe: &Value) {
    let field = |index: usize| probe["torch"][index].as_str().unwrap_or_default();
    let (version, cuda, hip) = (field(0), field(1), field(2));
    if !hip.is_empty() {
        findings.add(
            "torch",
            State::Missing,
            format!("{version} for ROCm {hip}"),
            "memtrace does not support ROCm",
        );
        return;
    }
    if cuda.is_empty() {
        findings.add(
            "torch",
            State::Missing,
            format!("{version}, a build without CUDA"),
            "install a build with CUDA",
        );
        return;
    }
    let mut numbers = version.split(['.', '+']).map(|part| part.parse::<u32>().unwrap_or(0));
    let number = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let version_text = format!("{version}, CUDA {cuda}");
    if number < (2, 1) {
        findings.add(
            "torch",
            State::Degraded,
            format!("{version_text}, older than 2.1"),
            "only 2.1 and later are tested",
        );
    } else {
        findings.ok("torch", version_text);
    }
    let cudart = probe["cudart"].as_array().map_or(0, Vec::len);
    findings.check(
        "runtime",
        cudart > 0,
        "torch uses a shared libcudart, so its calls are traced",
        (
            State::Degraded,
            "torch contains a static CUDA runtime, so its calls are not traced",
            "segments are inferred from the allocator's totals",
        ),
    );
}

/// Checks the devices that torch sees, and how a simulated device answers.
pub(super) fn check_device(findings: &mut Findings, probe: &Value, phantom: bool) {
    if probe["cuda"] != true {
        let advice = if phantom {
            "see the errors below"
        } else {
            "to check on a simulated GPU: memtrace doctor --phantom"
        };
        let state = if phantom { State::Missing } else { State::Degraded };
        findings.add("device", state, "torch finds no GPU, so no training step was traced", advice);
        return;
    }
    let driver = probe["driver"].as_str().unwrap_or("unknown");
    for (ordinal, device) in probe["devices"].as_array().into_iter().flatten().enumerate() {
        let bytes = Unit::Auto.show(device[1].as_i64().unwrap_or(0));
        let name = device[0].as_str().unwrap_or_default();
        findings.ok("device", format!("{ordinal}: {name}, {bytes}, driver {driver}"));
    }
    if let Some(card) = probe["phantom"]["card"].as_str() {
        let calls_of = |name: &str| -> Vec<String> {
            let calls = probe["phantom"][name].as_object();
            calls.map_or(Vec::new(), |calls| calls.iter().map(|(call, n)| format!("{call} {n}x")).collect())
        };
        let (estimated, refused) = (calls_of("guessed_calls"), calls_of("refused_calls"));
        findings.add("phantom", State::Note, format!("a simulated {card}; its kernels compute nothing"), "");
        if !estimated.is_empty() {
            findings.add(
                "phantom",
                State::Note,
                format!("estimated results in this step: {}", estimated.join(", ")),
                "",
            );
        }
        if !refused.is_empty() {
            findings.add(
                "phantom",
                State::Note,
                format!("refused calls in this step: {}", refused.join(", ")),
                "",
            );
        }
        check_phantom_answers(findings, &probe["answers"]);
        findings.phantom_answers = probe["answers"].clone();
    }
}

/// Adds findings on how the simulated GPU answers the functions of CUDA and its libraries, according to its
/// own table.
fn check_phantom_answers(findings: &mut Findings, answers: &Value) {
    let names = |kind: &str| -> Vec<&str> {
        answers[kind].as_array().into_iter().flatten().filter_map(Value::as_str).collect()
    };
    for (kind, noun, meaning) in [
        ("real", "function", "with the memory effects of the real library"),
        ("success", "function", "with a status of success and no computation"),
        ("guess", "function", "with estimated results"),
        ("unsupported", "function", "refused by name"),
        ("passed", "name pattern", "passed to the real library"),
    ] {
        let all = names(kind);
        let shown = if kind == "guess" { format!(": {}", first_names(&all)) } else { String::new() };
        let counted = counted(all.len() as u64, noun);
        findings.add("answers", State::Note, format!("{counted} {meaning}{shown}"), "");
    }
    let (missing, wanted) = (names("missing"), names("wanted").len());
    findings.check(
        "answers",
        missing.is_empty(),
        format!("all {wanted} functions that this torch imports are simulated; --json lists them"),
        (
            State::Degraded,
            &format!(
                "{} of the {wanted} functions that this torch imports are not simulated: {}",
                missing.len(),
                first_names(&missing)
            ),
            "a program that calls one of them ends there; --json lists all; please report this version of torch",
        ),
    );
}

/// Returns the first names of a list, and the number of the remaining names.
fn first_names(names: &[&str]) -> String {
    const SHOWN: usize = 6;
    let shown = names[..names.len().min(SHOWN)].join(", ");
    match names.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more; --json lists them"),
    }
}

/// Checks that torch exports the symbols that the hooks need. This is for a machine without a device.
pub(super) fn check_symbols(findings: &mut Findings, probe: &Value) {
    for (subject, symbol, hook, effect) in [
        ("reports", "blocks", "the caching allocator's reports", "blocks are not traced"),
        ("ooms", "ooms", "its OOM reports", "OOMs are not traced"),
        ("requested", "allocator", "the allocator's requests", "requested_bytes is -1"),
        ("streams", "streams", "the current stream", "stream is 0"),
        ("ops", "ops", "op callbacks", "ops are not traced"),
        ("ops", "op_names", "op names", "ops are not traced"),
    ] {
        let state = if symbol == "blocks" { State::Missing } else { State::Degraded };
        let there = probe["symbols"][symbol] == true;
        findings.check(
            subject,
            there,
            format!("torch exports {hook}"),
            (
                state,
                &format!("torch does not export {hook}, so {effect}"),
                "please report this version of torch",
            ),
        );
    }
    check_nvtx(findings, probe, None);
}

/// Checks NVTX. `traced` is true if the trace has ranges of NVTX, and `None` if no step was traced.
pub(super) fn check_nvtx(findings: &mut Findings, probe: &Value, traced: Option<bool>) {
    let flavour = match probe["nvtx"].as_str() {
        Some("legacy") => "legacy library, its calls are intercepted",
        Some("header") => "header-only, through NVTX_INJECTION64_PATH",
        _ => "none in this torch",
    };
    match traced {
        Some(false) => {
            findings.add("ranges", State::Degraded, format!("NVTX ranges are not traced ({flavour})"), "");
        }
        _ => findings.ok("ranges", format!("NVTX: {flavour}")),
    }
}
