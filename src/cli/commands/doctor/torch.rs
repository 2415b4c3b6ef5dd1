//! Judges what the Python said of its torch and of its device.

use memtrace_trace::units::Unit;
use serde_json::Value;

use super::findings::{Findings, State};

pub(super) fn torch(found: &mut Findings, answer: &Value) {
    let word = |index: usize| answer["torch"][index].as_str().unwrap_or_default();
    let (version, cuda, hip) = (word(0), word(1), word(2));
    if !hip.is_empty() {
        found.add("torch", State::Missing, format!("{version} for ROCm {hip}"), "ROCm is out of scope");
        return;
    }
    if cuda.is_empty() {
        found.add(
            "torch",
            State::Missing,
            format!("{version}, a build without CUDA"),
            "install one with CUDA",
        );
        return;
    }
    let mut numbers = version.split(['.', '+']).map(|part| part.parse::<u32>().unwrap_or(0));
    let number = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let says = format!("{version}, CUDA {cuda}");
    if number < (2, 1) {
        found.add(
            "torch",
            State::Degraded,
            format!("{says}: older than 2.1"),
            "only 2.1 and later are tested",
        );
    } else {
        found.ok("torch", says);
    }
    let cudart = answer["cudart"].as_array().map_or(0, Vec::len);
    found.check(
        "runtime",
        cudart > 0,
        "torch uses a shared libcudart: its calls are seen",
        (
            State::Degraded,
            "torch has a static CUDA runtime in it",
            "segments are told from the allocator's totals",
        ),
    );
}

pub(super) fn device(found: &mut Findings, answer: &Value, phantom: bool) {
    if answer["cuda"] != true {
        let todo = if phantom { "see the errors below" } else { "without a GPU: memtrace doctor --phantom" };
        let state = if phantom { State::Missing } else { State::Degraded };
        found.add("device", state, "torch sees no GPU here, so nothing was tried", todo);
        return;
    }
    let driver = answer["driver"].as_str().unwrap_or("unknown");
    for (ordinal, device) in answer["devices"].as_array().into_iter().flatten().enumerate() {
        let bytes = Unit::Auto.show(device[1].as_i64().unwrap_or(0));
        let name = device[0].as_str().unwrap_or_default();
        found.ok("device", format!("{ordinal}: {name}, {bytes}, driver {driver}"));
    }
    if let Some(card) = answer["phantom"]["card"].as_str() {
        let list = |name: &str| -> Vec<String> {
            let calls = answer["phantom"][name].as_object();
            calls.map_or(Vec::new(), |calls| calls.iter().map(|(call, n)| format!("{call} {n}x")).collect())
        };
        let (guessed, refused) = (list("guessed_calls"), list("refused_calls"));
        found.add(
            "phantom",
            State::Note,
            format!("this is {card}, which is not there; kernels compute nothing"),
            "",
        );
        if !guessed.is_empty() {
            found.add("phantom", State::Note, format!("guessed in this step: {}", guessed.join(", ")), "");
        }
        if !refused.is_empty() {
            found.add("phantom", State::Note, format!("refused in this step: {}", refused.join(", ")), "");
        }
        answers(found, &answer["answers"]);
        found.answers = answer["answers"].clone();
    }
}

/// How the phantom answers what a program may ask, from its own table.
fn answers(found: &mut Findings, answers: &Value) {
    let names = |kind: &str| -> Vec<&str> {
        answers[kind].as_array().into_iter().flatten().filter_map(Value::as_str).collect()
    };
    for (kind, means) in [
        ("real", "names are answered as the real library would, as far as memory can tell"),
        ("success", "do nothing and succeed: the device would have done the work"),
        ("guess", "are answered by a guess"),
        ("unsupported", "are refused, by name"),
        ("passed", "are left to the real library"),
    ] {
        let all = names(kind);
        let shown = if kind == "guess" { format!(": {}", all.join(", ")) } else { String::new() };
        found.add("answers", State::Note, format!("{} {means}{shown}", all.len()), "");
    }
    let (missing, wanted) = (names("missing"), names("wanted").len());
    found.check(
        "answers",
        missing.is_empty(),
        format!("nothing of the {wanted} names that this torch wants is missing; --json lists all"),
        (
            State::Degraded,
            &format!("missing of the {wanted} names that this torch wants: {}", missing.join(", ")),
            "a program that calls one of them ends there; please report this version",
        ),
    );
}

/// With no device nothing can be tried: what the hooks need is there, or it is not.
pub(super) fn symbols(found: &mut Findings, answer: &Value) {
    for (what, symbol, lost) in [
        ("reports", "blocks", "no blocks of the caching allocator"),
        ("ooms", "ooms", "no OOMs"),
        ("requested", "allocator", "requested_bytes is -1"),
        ("streams", "streams", "stream is 0"),
        ("ops", "ops", "no ops"),
        ("ops", "op_names", "no ops"),
    ] {
        let state = if symbol == "blocks" { State::Missing } else { State::Degraded };
        let there = answer["symbols"][symbol] == true;
        found.check(
            what,
            there,
            format!("this torch has what is hooked ({symbol})"),
            (
                state,
                &format!("this torch has no symbol for it ({symbol}): {lost}"),
                "please report this version",
            ),
        );
    }
    nvtx_flavour(found, answer, None);
}

pub(super) fn nvtx_flavour(found: &mut Findings, answer: &Value, seen: Option<bool>) {
    let flavour = match answer["nvtx"].as_str() {
        Some("legacy") => "the legacy library, its calls interposed",
        Some("header") => "header-only, through NVTX_INJECTION64_PATH",
        _ => "none in this torch",
    };
    match seen {
        Some(false) => {
            found.add("ranges", State::Degraded, format!("NVTX ranges are not seen ({flavour})"), "");
        }
        _ => found.ok("ranges", format!("NVTX: {flavour}")),
    }
}
