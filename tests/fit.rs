//! `memtrace fit` on the simulated GPU: with plain calls of the runtime, and with torch.

use std::process::Output;

use serde_json::Value;
use tempfile::TempDir;

#[path = "common/torch.rs"]
#[expect(dead_code, unused_macros, unused_imports, reason = "each test crate uses its own part")]
mod harness;
use harness::{Torch, memtrace, scripts, text};

struct Fit {
    output: Output,
    folder: TempDir,
}

impl Fit {
    /// Runs a search in its own folder.
    fn of(arguments: &[&str]) -> Fit {
        Fit::on("mem=1g,cc=8.0,context=0", arguments)
    }

    fn on(card: &str, arguments: &[&str]) -> Fit {
        let folder = TempDir::new().unwrap();
        let mut command = memtrace();
        command.args(["fit", "--phantom", card]).args(arguments);
        let output = command.current_dir(folder.path()).output().unwrap();
        Fit { output, folder }
    }

    fn status(&self) -> i32 {
        self.output.status.code().unwrap()
    }

    fn text(&self) -> String {
        text(&self.output.stdout)
    }

    fn stderr(&self) -> String {
        text(&self.output.stderr)
    }

    fn json(&self) -> Value {
        serde_json::from_slice(&self.output.stdout)
            .unwrap_or_else(|error| panic!("{error}: {}", self.stderr()))
    }

    /// The folders of traces that the search left.
    fn left(&self) -> Vec<String> {
        let Ok(entries) = std::fs::read_dir(self.folder.path().join("out")) else { return Vec::new() };
        let folders = entries.map(Result::unwrap).filter(|entry| entry.path().is_dir());
        let mut names: Vec<String> = folders.map(|entry| entry.file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

/// A script of `tests/scripts/fit`.
fn script(name: &str) -> String {
    scripts().join("fit").join(name).to_str().unwrap().to_owned()
}

#[test]
fn fit_finds_the_largest_number_and_keeps_both_traces() {
    let calls = script("plain_calls.py");
    let fit = Fit::of(&["--json", "-o", "out", "--within", "0", "--", "python3", &calls, "{}"]);
    let json = fit.json();
    assert_eq!(
        (fit.status(), json["fits"].as_str(), json["too_big"].as_str()),
        (0, Some("1024"), Some("1025"))
    );
    assert_eq!(fit.left(), ["1024", "1025"]);
    assert_eq!(json["phantom"], true);
    assert_eq!(json["trials"][2]["peak_used_bytes"], 32 << 20);
    assert_eq!(json["values_between"], false);
    assert!(json["trials"].as_array().unwrap().len() <= 12, "{json}");
    // A line for each run as it ends, on stderr and in a file.
    let lines = fit.stderr();
    assert_eq!(lines.lines().count(), json["trials"].as_array().unwrap().len(), "{lines}");
    assert!(
        lines.starts_with("1: fits, peak 1.00 MiB, ") && lines.contains("\n1025: out of memory, "),
        "{lines}"
    );
    assert_eq!(std::fs::read_to_string(fit.folder.path().join("out/trials.txt")).unwrap(), lines);
    // The suggested command works unchanged.
    let next = json["next"].as_array().unwrap().last().unwrap().as_str().unwrap();
    let words: Vec<&str> = next.split(' ').skip(1).collect();
    let peak = memtrace().args(words).current_dir(fit.folder.path()).output().unwrap();
    assert!(peak.status.success() && String::from_utf8_lossy(&peak.stdout).contains("1.00 GiB"), "{peak:?}");

    let fit = Fit::of(&["-o", "out", "--multiple-of", "100", "--", "python3", &calls, "{}"]);
    let text = fit.text();
    assert!(text.contains("to spare (") && text.contains("not counted on a simulated GPU"), "{text}");
    assert!(text.contains("1000 fits, 1100 does not") && text.contains("(simulated GPU)"), "{text}");
    let fit = Fit::of(&["-o", "out", "--within", "5%", "--", "python3", &calls, "{}"]);
    let text = fit.text();
    assert!(text.contains("the values between were not tried; --within 0 finds the largest"), "{text}");
    let left: Vec<u32> = fit.left().iter().map(|value| value.parse().unwrap()).collect();
    let [fits, too_big] = *left.as_slice() else { panic!("{left:?}") };
    assert!(fits <= 1024 && too_big > 1024 && too_big - fits <= fits / 20, "{left:?}");
    assert!(fit.stderr().lines().count() <= 7, "{}", fit.stderr());
    for wrong in ["51%", "two", "nan", ""] {
        let fit = Fit::of(&["--within", wrong, "--", "python3", &calls, "{}"]);
        assert_eq!(fit.status(), 2, "{wrong}");
        assert!(fit.stderr().contains("a number from 0 to 50, in percent"), "{}", fit.stderr());
    }
    let fit = Fit::of(&["--max", "50", "-o", "out", "--", "python3", &calls, "{}"]);
    assert!(fit.text().contains("50 fits, the largest value that you gave"), "{}", fit.text());
    let fit =
        Fit::of(&["--json", "--values", "100, 900,1500,3000", "-o", "out", "--", "python3", &calls, "{}"]);
    assert_eq!(fit.json()["fits"], "900");
    assert_eq!(fit.left(), ["1500", "900"]);
}

#[test]
fn fit_shows_a_failure_that_is_no_oom_and_gives_no_answer() {
    let calls = script("plain_calls.py");
    let fit = Fit::of(&["-o", "out", "--", "python3", &calls, "{}", "fails-at-8"]);
    let text = fit.text();
    assert_eq!(fit.status(), 1, "{text}");
    assert!(text.contains("with value 32 the program failed for a reason other than memory"), "{text}");
    assert!(text.contains("status 1") && text.contains("the data set has 7 samples"), "{text}");
    assert!(!text.contains("does not"), "{text}");
    assert_eq!(fit.left(), ["2", "32"]);

    let fit = Fit::of(&["-o", "out", "--min", "2000", "--", "python3", &calls, "{}"]);
    assert_eq!(fit.status(), 3);
    assert!(fit.text().contains("even 2000, the smallest value, does not fit"), "{}", fit.text());
    let fit = Fit::of(&["-o", "out", "--", "python3", &calls, "{}", "ignores"]);
    assert_eq!(fit.status(), 1);
    assert!(fit.text().contains("the program does not use the value of {}"), "{}", fit.text());
    let fit = Fit::of(&["-o", "out", "--", "python3", &calls, "{}", "nothing"]);
    assert!(fit.text().contains("allocated no GPU memory"), "{}", fit.text());
    let fit = Fit::of(&["-o", "out", "--", "python3", &calls, "12"]);
    assert_eq!((fit.status(), fit.left().len()), (2, 0));
    assert!(fit.stderr().contains("write {} in its place"), "{}", fit.stderr());
    let fit = Fit::of(&["-o", "out", "--", "/nowhere/python", "{}"]);
    assert_eq!((fit.status(), fit.left().len()), (2, 0));
}

#[test]
fn fit_counts_an_oom_of_torch_as_too_large_and_shows_the_holders() {
    Torch::run("2.11.0", |torch| {
        let gpt = script("gpt.py");
        let fit =
            Fit::of(&["--values", "2,8,64", "-o", "out", "--", torch.python.to_str().unwrap(), &gpt, "{}"]);
        let text = fit.text();
        assert_eq!(fit.status(), 0, "{text}{}", fit.stderr());
        assert!(text.contains("8 fits, 64 does not"), "{text}");
        assert!(
            text.contains("with 64 memory ran out when the program asked for 256.00 MiB by aten::"),
            "{text}"
        );
        assert!(text.contains("activation") && text.contains("next: memtrace oom out/64"), "{text}");
    });
}

#[test]
fn fit_and_oom_say_when_the_answer_lies_inside_the_range_of_the_context() {
    // The context takes 612 MiB here, and 518 to 614 on a real card: 7580 MiB are free, or 7578 to 7674.
    let tensor = script("one_tensor.py");
    Torch::run("2.11.0", |torch| {
        let python = torch.python.to_str().unwrap();
        let near = ["--values", "4000,7580,7600", "-o", "out", "--json", "--", python, &tensor, "{}"];
        let fit = Fit::on("mem=8g,cc=9.0", &near);
        let json = fit.json();
        assert_eq!(
            (json["fits"].as_str(), json["too_big"].as_str()),
            (Some("7580"), Some("7600")),
            "{json:#}"
        );
        assert_eq!(json["inside_range"], serde_json::json!(["7580", "7600"]), "{json:#}");
        let mib = |value: &Value| value.as_u64().unwrap() >> 20;
        assert_eq!(mib(&json["free_at_start_bytes"]), 7580);
        let [least, most] = &json["free_at_start_range_bytes"].as_array().unwrap()[..] else { panic!() };
        assert_eq!((mib(least), mib(most)), (7578, 7674));
        let oom = |how: &str| {
            let mut command = memtrace();
            let output = command.arg("oom").arg(fit.folder.path().join("out/7600")).arg(how).output();
            text(&output.unwrap().stdout)
        };
        let told: Value = serde_json::from_str(&oom("--json")).unwrap();
        assert_eq!(told["ooms"][0]["inside_range"], true, "{told:#}");
        assert_eq!(told["ooms"][0]["context_range_bytes"], serde_json::json!([518 << 20, 614 << 20]));
        let told = oom("--top=1");
        assert!(told.contains("inside the range: 20.00 MiB lacked"), "{told}");

        // Far from the limit, and with a context that the request sets, nothing is said.
        for (card, values) in [("mem=8g,cc=9.0", "4000,7900"), ("mem=8g,cc=9.0,context=612m", "7580,7600")] {
            let fit = Fit::on(card, &["--values", values, "-o", "out", "--", python, &tensor, "{}"]);
            assert!(fit.text().contains("free at the start: 7.40 GiB"), "{}", fit.text());
            assert!(!fit.text().contains("inside the range"), "{card}: {}", fit.text());
        }
        let text = Fit::on("mem=8g,cc=9.0", &[&near[..4], &near[5..]].concat()).text();
        assert!(text.contains("free at the start: 7.40 GiB (7.40 to 7.49)"), "{text}");
        assert!(text.contains("7580 may not fit on a real card"), "{text}");
        assert!(text.contains("7600 may fit on a real card"), "{text}");
    });
}

#[test]
fn fit_ends_on_a_signal_with_what_it_knows() {
    let calls = script("plain_calls.py");
    let folder = TempDir::new().unwrap();
    let mut command = memtrace();
    command.args(["fit", "--phantom", "mem=1g,cc=8.0,context=0", "-o", "out", "--values", "10,20,30"]);
    command.args(["--", "python3", &calls, "{}", "waits-at-30"]).current_dir(folder.path());
    command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let child = command.spawn().unwrap();
    // The last run waits: its folder has the process's id.
    let waits = folder.path().join("out/30/stdout.txt");
    for _ in 0..6000 {
        if std::fs::read_to_string(&waits).is_ok_and(|text| text.contains("waits")) {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    let kill = std::process::Command::new("kill").args(["-TERM", &child.id().to_string()]).status();
    assert!(kill.unwrap().success());
    let output = child.wait_with_output().unwrap();
    use std::os::unix::process::ExitStatusExt;
    assert_eq!(output.status.signal(), Some(15), "{output:?}");
    let answer = text(&output.stdout);
    assert!(answer.contains("ended by SIGTERM; so far 20 fits, no value was too large yet"), "{answer}");
    assert!(!folder.path().join("out/30").exists() && folder.path().join("out/20").exists());
}

#[test]
fn fit_ask_prints_a_figure_of_the_program_for_each_card_and_value() {
    let calls = script("plain_calls.py");
    let ask = |arguments: &[&str]| {
        let folder = TempDir::new().unwrap();
        let mut command = memtrace();
        command.args(["fit", "--ask", "room for ([0-9,]+) blocks"]).args(arguments);
        let output = command.current_dir(folder.path()).output().unwrap();
        Fit { output, folder }
    };
    let program = ["--", "python3", &calls, "{}", "says"];
    let fit = ask(&[&["--cards", "l4,a100-40g", "--values", "10,20", "--json"], &program[..]].concat());
    let json = fit.json();
    assert_eq!(fit.status(), 0, "{json:#}");
    let runs: Vec<_> = json["runs"].as_array().unwrap().iter().collect();
    let told = |run: &Value| (run["card"].clone(), run["value"].clone(), run["figure"].clone());
    assert_eq!(runs.len(), 4);
    assert_eq!(told(runs[0]), ("l4".into(), "10".into(), "1,010".into()));
    assert_eq!(told(runs[3]), ("a100-40g".into(), "20".into(), "1,020".into()));
    assert!(runs[3]["capacity_bytes"].as_i64() > runs[0]["capacity_bytes"].as_i64());

    let fit = ask(&["--phantom", "l4", "-o", "out", "--", "python3", &calls, "5", "says"]);
    assert!(fit.text().contains("1,005") && fit.status() == 0, "{}{}", fit.text(), fit.stderr());
    // Nothing is printed that matches, and the program fails.
    let fit = ask(&["--phantom", "l4", "--", "python3", &calls, "5"]);
    assert!(fit.text().contains("not printed") && fit.status() == 1, "{}", fit.text());
    let fit = ask(&["--phantom", "l4", "--", "python3", &calls, "9", "fails-at-8"]);
    assert!(fit.text().contains("the data set has 7 samples") && fit.status() == 1, "{}", fit.text());
    // Wrong requests.
    for (arguments, hint) in [
        (&["--phantom", "l4", "--", "python3", &calls, "{}"][..], "give both or neither"),
        (&["--values", "1,2", "--", "python3", &calls, "5"], "give both or neither"),
        (&["--cards", "l5", "--", "python3", &calls, "5"], "l5"),
        (&["--ask", "(", "--", "python3", &calls, "5"], "--ask"),
    ] {
        let fit = ask(arguments);
        assert!(fit.status() == 2 && fit.stderr().contains(hint), "{arguments:?}: {}", fit.stderr());
    }
}
