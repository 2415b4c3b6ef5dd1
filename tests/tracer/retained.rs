//! The search for what holds memory that earlier steps left behind, with torch, on the simulated GPU.
//!
//! If `scripts/env torch` has not installed a version of torch, the tests on it are skipped with a message;
//! with `CI=true` they fail.

use std::path::Path;

use crate::common::pages;
use crate::common::torch::{self, CARD, Run, Torch, json, memtrace, on_every_torch, printed, read};
use serde_json::Value;

on_every_torch![
    retained_names_the_holder_of_each_of_seven_mistakes_and_none_of_a_clean_script: "the layout of autograd's graph",
    retained_keeps_nothing_alive_and_changes_no_peak,
    retained_runs_no_code_of_the_program,
    retained_is_found_at_an_oom,
    retained_leaves_checkpoints_and_hooks_of_saved_tensors_alone,
    retained_does_not_report_a_bounded_window_or_a_lookup_table,
    retained_reports_the_growth_that_has_no_holder,
];

/// Traces a script of `tests/scripts/retained`, with the package `memtrace` of this repository. A search that takes half a
/// second on a quiet machine may run out of its two seconds on a busy one, so it has a minute unless `env` says otherwise.
fn trace(torch: &Torch, script: &str, args: &[&str], env: &[(&str, &str)]) -> Run {
    let package = Path::new(env!("CARGO_MANIFEST_DIR")).join("python");
    let mut variables = vec![("PYTHONPATH", package.to_str().unwrap()), ("MEMTRACE_RETAINED", "60")];
    variables.extend(env);
    let script = format!("retained/{script}");
    torch.trace_on(CARD, &[], &script, args, &variables).expect_success()
}

/// Returns the holders that a program printed.
fn holders(stdout: &str) -> Vec<Value> {
    stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The mistakes of `mistakes.py`: the holder of the memory that each one keeps, and the bytes of a step.
const MISTAKES: [(&str, &str, i64); 7] = [
    ("losses", "variable `total` (mistakes.py:", 2 << 20),
    ("function", "variable `total` (mistakes.py:", 3 << 20),
    ("outputs", "list `outputs` (mistakes.py:", 1 << 20),
    ("hook", "list `kept` in the closure of add_hook.<locals>.hook() (mistakes.py:", 1 << 20),
    ("cache", "dict `Net.cache` (mistakes.py:", 1 << 20),
    ("retain_graph", "variable `state` (mistakes.py:", 1 << 20),
    ("traceback", "traceback of RuntimeError in variable `error` (mistakes.py:", 0),
];

fn retained_names_the_holder_of_each_of_seven_mistakes_and_none_of_a_clean_script(torch: &Torch) {
    let names: Vec<&str> = MISTAKES.iter().map(|(mistake, ..)| *mistake).chain(["clean"]).collect();
    let run = trace(torch, "mistakes.py", &names, &[]);
    let cases = run.cases();
    assert_eq!(cases.iter().map(|case| case.name.as_str()).collect::<Vec<_>>(), names);
    let (clean, mistaken) = cases.split_last().unwrap();
    for (case, (mistake, holder, per_step)) in mistaken.iter().zip(MISTAKES) {
        let found = holders(&case.stdout);
        let [found] = &found[..] else { panic!("{mistake}: {found:?}\n{}", run.stderr()) };
        assert!(found["holder"].as_str().unwrap().starts_with(holder), "{mistake}: {found}");
        let file = found["file"].as_str().unwrap();
        let text = std::fs::read_to_string(file).unwrap();
        let line = text.lines().nth(found["line"].as_u64().unwrap() as usize - 1).unwrap();
        let name = found["name"].as_str().unwrap().rsplit('.').next().unwrap();
        assert!(line.contains(name), "{mistake}: {line}");
        // The named line must be the line that fills the container or adds to the total.
        let filled = match mistake {
            "losses" | "function" => "total = total + ",
            "outputs" => "outputs.append(output)",
            "hook" => "kept.append(",
            "cache" => "self.cache[step] = ",
            "retain_graph" => "state = model(x + state)",
            _ => "",
        };
        assert!(line.contains(filled), "{mistake}: {line}");
        assert_eq!(found["line_is"] == "filled", !filled.is_empty(), "{mistake}: {found}");
        // The marks that the search writes must have no phase and no module.
        let rows = read(&case.trace);
        let marks: Vec<_> = rows.iter().filter(|row| row.api == "retained").collect();
        assert!(marks[0].name.contains("\"begins\": \"call\""), "{mistake}: {}", marks[0].name);
        assert!(marks.iter().all(|row| row.phase == "(none)" && row.module == "(none)"), "{mistake}");
        let bytes = found["bytes"].as_i64().unwrap();
        assert!(bytes >= per_step * 7 && bytes <= 40 << 20, "{mistake}: {found}");
        if per_step > 0 {
            assert_eq!(found["verdict"], "grows", "{mistake}: {found}");
            // Accepts step -1, too: memtrace does not know during the first forward that the program trains.
            assert!(found["first_step"].as_i64().unwrap() <= 0, "{mistake}: {found}");
            assert_eq!(found["last_step"], 7, "{mistake}: {found}");
        } else {
            assert_eq!(found["verdict"], "traceback", "{found}");
            assert!(found["holder"].as_str().unwrap().contains("local `"), "{found}");
        }

        let report = printed(&["leaks", "--holders", "--all"], &case.trace);
        assert!(report.contains(holder) && report.contains("the program asked"), "{mistake}: {report}");
        if mistake == "outputs" {
            let (command, shown) = pages::first_command("docs/retained.md");
            assert_eq!(command, ["leaks", "--holders", "out"]);
            let (line, shown) = (found["line"].as_i64().unwrap(), shown.trim_end());
            let shown = shown.replace("train.py:44", &format!("mistakes.py:{line}"));
            let report = printed(&["leaks", "--holders"], &case.trace);
            assert!(report.contains(&shown), "docs/retained.md has {shown:?}; memtrace printed\n{report}");
        }
        let leaks = printed(&["leaks"], &case.trace);
        // `leaks` must name the holder before it lists the memory that is live at the end.
        assert!(
            leaks.find(holder).unwrap() < leaks.find("live when the script ended").unwrap(),
            "{mistake}: {leaks}"
        );
        let answer = json(&["leaks", "--holders"], &case.trace);
        let in_trace = &answer["processes"][0]["searches"][0]["holders"][0];
        assert_eq!((&in_trace["holder"], &in_trace["bytes"]), (&found["holder"], &found["bytes"]));
        torch.check(memtrace().arg("check").arg(&case.trace));
    }
    assert_eq!(holders(&clean.stdout), Vec::<Value>::new());
    assert!(printed(&["leaks", "--holders"], &clean.trace).contains("nothing is retained"));
    assert!(!printed(&["leaks"], &clean.trace).contains("(mistakes.py:"));
    let off = trace(torch, "mistakes.py", &["outputs"], &[("MEMTRACE_RETAINED", "off")]);
    assert_eq!(holders(&off.stdout()), Vec::<Value>::new());
    assert!(off.report("leaks --holders", &[]).contains("No search has run"));
}

/// Compares a script that searches often (`with`) with the same script without searches. Both print the peak,
/// the bytes after each step, and when each tensor died.
fn retained_keeps_nothing_alive_and_changes_no_peak(torch: &Torch) {
    let without = trace(torch, "alive.py", &["without"], &[]);
    let with = trace(torch, "alive.py", &["with"], &[]);
    assert!(without.stdout().contains("rebound: True"), "{}", without.stdout());
    assert_eq!(with.stdout(), without.stdout());
    let answer = with.json("leaks --holders", &["--all"]);
    assert!(answer["processes"][0]["searches"].as_array().unwrap().len() > 20, "{answer}");
}

fn retained_runs_no_code_of_the_program(torch: &Torch) {
    let run = trace(torch, "hostile.py", &[], &[]);
    assert!(run.stdout().contains("ran: []"), "{}", run.stdout());
    let answer = run.json("leaks --holders", &[]);
    let holders = answer["processes"][0]["searches"][0]["holders"].to_string();
    for name in ["`kept`", "`hostile.items`", "`wrapped`"] {
        assert!(holders.contains(name), "{name}: {holders}");
    }
}

fn retained_is_found_at_an_oom(torch: &Torch) {
    let run = trace(torch, "oom.py", &[], &[]);
    let oom = run.report("oom", &[]);
    assert!(oom.contains("list `losses` of main() (oom.py:") && oom.contains("out of memory"), "{oom}");
    assert!(run.stdout().contains("out of memory in step 12"), "{}", run.stdout());
    let clean = trace(torch, "oom.py", &["clean"], &[]);
    assert!(!clean.report("oom", &[]).contains("oom.py:"), "{}", clean.report("oom", &[]));
}

fn retained_leaves_checkpoints_and_hooks_of_saved_tensors_alone(torch: &Torch) {
    let run = trace(torch, "saved_hooks.py", &[], &[]);
    assert!(run.stdout().starts_with("out of memory\n"), "{}", run.stdout());
    assert!(run.stdout().contains("packed: {'cuda'}"), "{}", run.stdout());
    assert!(run.stdout().contains("('losses', 7)"), "graphs are found: {}", run.stdout());
}

fn retained_does_not_report_a_bounded_window_or_a_lookup_table(torch: &Torch) {
    let run = trace(torch, "bounded.py", &[], &[]);
    for line in ["window window", "table old", "everything grows"] {
        assert!(run.stdout().lines().any(|found| found == line), "{line}: {}", run.stdout());
    }
    let searches = &run.json("leaks --holders", &["--all"])["processes"][0]["searches"];
    // The list of the script grows, so memtrace itself starts searches, too. Exactly one search must be
    // incomplete, because there are too many objects.
    let mut cut = searches.as_array().unwrap().iter().filter(|search| search["is_whole"] == false);
    let reason = cut.next().unwrap_or_else(|| panic!("{searches}"))["reason"].as_str().unwrap();
    assert!(reason.contains("20 million objects") && cut.next().is_none(), "{searches}");
    let report = run.report("leaks --holders", &["--all"]);
    assert!(report.contains("nothing was found to be retained") && report.contains("20 million"), "{report}");
}

fn retained_reports_the_growth_that_has_no_holder(torch: &Torch) {
    const WAYS: [&str; 9] =
        ["deepcopy", "optimizer", "buffer", "storage", "array", "module", "dlpack", "frozen", "linked"];
    let run = trace(torch, "unnamed.py", &WAYS, &[]);
    let cases = run.cases();
    assert_eq!(cases.iter().map(|case| case.name.as_str()).collect::<Vec<_>>(), WAYS);
    for case in &cases {
        let way = case.name.as_str();
        let report = printed(&["leaks", "--holders"], &case.trace);
        assert!(!report.contains("nothing is retained"), "{way}: {report}");
        let process = &json(&["leaks", "--holders"], &case.trace)["processes"][0];
        let of = |name: &str| process[name].as_i64().unwrap_or_else(|| panic!("{way}: {process}"));
        let (growth, named) = (of("growth_bytes_per_step"), report.contains(" keeps "));
        assert!(growth > 900 << 10, "{way}: {process}");
        // Either the holder is named, or the bytes are reported as unnamed: another version may find the
        // name.
        assert_ne!(named, of("unnamed_bytes_per_step") > growth / 2, "{way}: {report}");
        let reason = match way {
            "deepcopy" => "list `kept` (unnamed.py:",
            "optimizer" => "does the program keep",
            _ => "cannot find storages",
        };
        assert!(report.contains(reason), "{way}: {report}");
    }
}

/// The program requests no search: memtrace searches because memory grows from step to step, and at exit.
#[test]
fn retained_is_found_while_memory_grows_and_when_the_program_ends() {
    Torch::run("2.11.0", |torch| {
        let run = trace(torch, "growth.py", &[], &[]);
        let answer = run.json("leaks --holders", &["--all"]);
        let searches = answer["processes"][0]["searches"].as_array().unwrap();
        let whys: Vec<&str> = searches.iter().map(|search| search["why"].as_str().unwrap()).collect();
        assert_eq!(whys, ["growth", "growth", "exit"], "{answer}");
        // Without a limit, a search may take 1% of the run so far, but is left out below 0.1 s.
        let begin = std::time::Instant::now();
        let short = trace(torch, "growth.py", &[], &[("MEMTRACE_RETAINED", "on")]);
        if begin.elapsed().as_secs() < 10 {
            let answer = short.json("leaks --holders", &["--all"]);
            let searches = answer["processes"][0]["searches"].as_array().unwrap();
            assert!(searches.len() == 1 && searches[0]["why"] == "exit", "{answer}");
        }
        let leaks = run.report("leaks", &[]);
        assert!(leaks.contains("list `history` (growth.py:") && leaks.contains("a step"), "{leaks}");
        let clean = trace(torch, "growth.py", &["clean"], &[]);
        assert_eq!(
            clean.json("leaks --holders", &["--all"])["processes"][0]["searches"],
            serde_json::json!([])
        );
    });
}

/// The parameters of a deleted model live on in its optimizer. Parameters that a module, a variable or an object
/// has do not count.
#[test]
fn retained_names_an_optimizer_whose_model_is_gone() {
    Torch::run("2.11.0", |torch| {
        let run = trace(torch, "optimizers.py", &[], &[]);
        let found = holders(&run.stdout());
        let [found] = &found[..] else { panic!("{found:?}") };
        assert!(
            found["holder"].as_str().unwrap().starts_with("Adam in variable `schedulers['of']`"),
            "{found}"
        );
        // The weight and the bias, with their gradients and two states each. A block has at least 512 bytes.
        let (tensors, bytes) = (4 * 2, 4 * ((1 << 20) + 2048));
        assert_eq!((&found["tensors"], &found["bytes"]), (&tensors.into(), &bytes.into()), "{found}");
        assert_eq!((&found["verdict"], &found["kind"]), (&"unused".into(), &"unused".into()), "{found}");
        let leaks = run.report("leaks", &[]);
        assert!(
            leaks.contains("keeps parameters that no model has, and their state: 8 tensors, 4.01 MiB"),
            "{leaks}"
        );
    });
}

/// Searches a heap of a million objects. With a limit of a minute the search must be complete. With 2 ms it
/// must not be: the report must say so, and the program must go on.
#[test]
fn retained_search_of_a_million_objects_ends_when_its_time_is_over() {
    Torch::run("2.11.0", |torch| {
        for (seconds, is_whole) in [("60", true), ("0.002", false)] {
            let run = trace(torch, "million.py", &[], &[("MEMTRACE_RETAINED", seconds)]);
            assert_eq!(run.stdout(), "done\n");
            let search = &run.json("leaks --holders", &["--all"])["processes"][0]["searches"][0];
            assert_eq!(search["is_whole"], is_whole, "{search}");
            let report = run.report("leaks --holders", &[]);
            assert_eq!(report.contains("reached its time limit"), !is_whole, "{report}");
        }
    });
}

/// Runs `memtrace leaks --holders` with these arguments. Returns its status, stdout and stderr.
fn ask(arguments: &[&str]) -> (Option<i32>, String, String) {
    let output = memtrace().args(["leaks", "--holders"]).args(arguments).output().unwrap();
    (output.status.code(), torch::text(&output.stdout), torch::text(&output.stderr))
}

#[test]
fn leaks_holders_of_a_running_process_are_asked_for_by_its_id() {
    Torch::run("2.11.0", |torch| {
        let out = tempfile::TempDir::new().unwrap();
        let mut command = torch.traced_command(&out.path().join("trace"));
        command.arg(torch::scripts().join("retained/running.py")).arg(out.path().join("end"));
        command.stdout(std::process::Stdio::piped());
        let mut running = command.spawn().unwrap();
        let mut lines = std::io::BufRead::lines(std::io::BufReader::new(running.stdout.take().unwrap()));
        let pid = lines.next().unwrap().unwrap();
        let (status, answer, messages) = ask(&["--pid", &pid]);
        let (_, again, _) = ask(&["--pid", &pid, "--json"]);
        std::fs::write(out.path().join("end"), "").unwrap();
        assert!(running.wait().unwrap().success());
        assert_eq!((status, messages.as_str()), (Some(0), ""), "{answer}");
        assert!(answer.contains("memtrace leaks --pid asked"), "{answer}");
        assert!(answer.contains("list `history` of main() (running.py:"), "{answer}");
        let again: Value = serde_json::from_str(&again).unwrap();
        let searches = again["processes"][0]["searches"].as_array().unwrap();
        assert_eq!(searches.iter().filter(|search| search["why"] == "command").count(), 2, "{again}");
        let (status, _, messages) = ask(&["--pid", &pid]);
        assert_eq!(status, Some(2), "{messages}");
        assert!(messages.contains("is running"), "{messages}");
    });
}

#[test]
fn leaks_holders_of_a_process_that_cannot_be_asked_is_an_error() {
    let own = std::process::id().to_string();
    for (arguments, text) in [
        (vec!["--pid", own.as_str()], "has no memtrace journal"),
        (vec!["--pid", "4194304"], "no process 4194304 is running"),
        (vec!["--pid", "1", "--wait", "0"], "process 1"),
        (vec!["--pid", "99999999999"], "expected the id of a process"),
        (vec!["--pid=0"], "expected the id of a process"),
        (vec!["--pid=-1"], "expected the id of a process"),
        (vec!["--pid", "1", "out"], "leave out TRACE"),
        (vec!["--wait", "1", "out"], "no such file"),
        (vec!["--pid", own.as_str(), "--wait=-1"], "expected seconds"),
        (vec!["--pid", own.as_str(), "--wait", "some"], "expected seconds"),
    ] {
        let (status, answer, messages) = ask(&arguments);
        assert_eq!((status, answer.as_str()), (Some(2), ""), "{arguments:?}: {messages}");
        assert!(messages.contains(text), "{arguments:?}: {messages}");
    }
}
