//! `memtrace fit` on the simulated GPU: with plain calls of the runtime, and with torch.

use std::process::Output;

use serde_json::Value;
use tempfile::TempDir;

use crate::common::command::root;
use crate::common::pages;
use crate::common::torch::{Torch, memtrace, scripts, text};

struct Fit {
    output: Output,
    folder: TempDir,
}

impl Fit {
    /// Runs a search in its own folder, on a card of 1 GiB.
    fn run(arguments: &[&str]) -> Fit {
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

    /// Returns the names of the trace folders that the search left.
    fn left(&self) -> Vec<String> {
        let Ok(entries) = std::fs::read_dir(self.folder.path().join("out")) else { return Vec::new() };
        let folders = entries.map(Result::unwrap).filter(|entry| entry.path().is_dir());
        let mut names: Vec<String> = folders.map(|entry| entry.file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

/// Returns the path of a script of `tests/scripts/fit`.
fn script(name: &str) -> String {
    scripts().join("fit").join(name).to_str().unwrap().to_owned()
}

#[test]
fn fit_finds_the_largest_number_and_keeps_both_traces() {
    let calls = script("plain_calls.py");
    let one_by_one = ["--json", "-o", "out", "--within", "0", "--jobs", "1", "--", "python3", &calls, "{}"];
    let fit = Fit::run(&one_by_one);
    let json = fit.json();
    assert_eq!(
        (fit.status(), json["fits"].as_str(), json["too_big"].as_str()),
        (0, Some("1024"), Some("1025"))
    );
    assert_eq!(fit.left(), ["1024", "1025"]);
    assert_eq!(json["phantom"], true);
    assert_eq!(json["trials"][2]["peak_used_bytes"], 32 << 20);
    assert_eq!(json["values_between"], false);
    let trials = json["trials"].as_array().unwrap();
    assert!(trials.len() <= 12, "{json}");
    // The answer names the folders that are still there, and no others.
    let named: Vec<&str> = trials.iter().filter_map(|trial| trial["folder"].as_str()).collect();
    assert_eq!(
        (named.len(), named.contains(&"out/1024"), named.contains(&"out/1025")),
        (2, true, true),
        "{json}"
    );
    // There must be one line for each run, on stderr and in trials.txt.
    let lines = fit.stderr();
    assert_eq!(lines.lines().count(), trials.len(), "{lines}");
    assert!(lines.starts_with("1: fits, peak ") && lines.contains("\n1025: out of memory, "), "{lines}");
    assert_eq!(std::fs::read_to_string(fit.folder.path().join("out/trials.txt")).unwrap(), lines);
    // The command that the answer suggests must work unchanged.
    let next = json["next"].as_array().unwrap().last().unwrap().as_str().unwrap();
    let words: Vec<&str> = next.split(' ').skip(1).collect();
    let peak = memtrace().args(words).current_dir(fit.folder.path()).output().unwrap();
    assert!(peak.status.success() && String::from_utf8_lossy(&peak.stdout).contains("1.00 GiB"), "{peak:?}");

    let fit = Fit::run(&["-o", "out", "--multiple-of", "100", "--", "python3", &calls, "{}"]);
    let text = fit.text();
    assert!(text.contains("to spare (") && text.contains("not counted on a simulated GPU"), "{text}");
    assert!(text.contains("1000 fits, 1100 does not") && text.contains("(simulated GPU)"), "{text}");
    let fit = Fit::run(&["-o", "out", "--within", "5%", "--", "python3", &calls, "{}"]);
    let text = fit.text();
    assert!(text.contains("the values in between were not tried; --within 0 finds the largest"), "{text}");
    let left: Vec<u32> = fit.left().iter().map(|value| value.parse().unwrap()).collect();
    let [fits, too_big] = *left.as_slice() else { panic!("{left:?}") };
    assert!(fits <= 1024 && too_big > 1024 && too_big - fits <= fits / 20, "{left:?}");
    assert!(fit.stderr().lines().count() <= 8, "{}", fit.stderr());
    for wrong in ["51%", "two", "nan", ""] {
        let fit = Fit::run(&["--within", wrong, "--", "python3", &calls, "{}"]);
        assert_eq!(fit.status(), 2, "{wrong}");
        assert!(fit.stderr().contains("a number from 0 to 50, in percent"), "{}", fit.stderr());
    }
    let fit = Fit::run(&["--max", "50", "-o", "out", "--", "python3", &calls, "{}"]);
    assert!(fit.text().contains("50 fits, the largest value that you gave"), "{}", fit.text());
    let fit =
        Fit::run(&["--json", "--values", "100, 900,1500,3000", "-o", "out", "--", "python3", &calls, "{}"]);
    assert_eq!(fit.json()["fits"], "900");
    assert_eq!(fit.left(), ["1500", "900"]);
    let unordered = ["--values", "100,101,2000,500", "--jobs", "2", "--", "python3", &calls, "{}"];
    let fit = Fit::on("h100-80g,mem=1g,context=0", &unordered);
    let text = fit.text();
    assert!(text.contains("memory does not grow with the value here: 500 fits, but 2000"), "{text}");
    assert!(!text.contains("the values in between"), "{text}");
}

/// The values of a second search would have the folders of the first. A trial that a killed search left has no line
/// in the list.
#[test]
fn fit_refuses_a_folder_with_trials_of_an_earlier_search_before_it_begins() {
    let calls = script("plain_calls.py");
    let fit = Fit::run(&["-o", "out", "--values", "1,2", "--", "python3", &calls, "{}"]);
    assert_eq!((fit.status(), fit.left()), (0, vec!["2".to_owned()]), "{}", fit.stderr());
    let out = fit.folder.path().join("out");
    let again = |more: &[&str]| {
        let mut command = memtrace();
        command.args(["fit", "--phantom", "l4", "-o", "out"]).args(more);
        command.args(["--", "python3", &calls]).args((more.len() == 2).then_some("{}"));
        let output = command.current_dir(&fit.folder).output().unwrap();
        (output.status.code(), text(&output.stderr))
    };
    let before = std::fs::read(out.join("trials.txt")).unwrap();
    for more in [&["--values", "4,5"][..], &["--ask", "x", "--json"]] {
        let (status, stderr) = again(more);
        assert_eq!(status, Some(2), "{stderr}");
        assert!(
            stderr.contains("-o out: this folder has the trials of an earlier search; name a new"),
            "{stderr}"
        );
    }
    assert_eq!(std::fs::read(out.join("trials.txt")).unwrap(), before);
    std::fs::remove_file(out.join("trials.txt")).unwrap();
    assert_eq!(again(&["--values", "4,5"]).0, Some(2));
    std::fs::remove_dir_all(out.join("2")).unwrap();
    assert_eq!(again(&["--values", "4,5"]).0, Some(0));
}

/// `fit` skips its list of trials if the file is a pipe or a link: a pipe that nobody reads would block the
/// search forever, and a link could lead into another user's file.
#[test]
fn fit_writes_no_list_through_a_pipe_or_a_link() {
    let folder = TempDir::new().unwrap();
    let other = folder.path().join("other");
    std::fs::write(&other, "kept").unwrap();
    for kind in ["pipe", "link"] {
        let out = folder.path().join(kind);
        let list = out.join("trials.txt");
        std::fs::create_dir(&out).unwrap();
        if kind == "pipe" {
            let made = std::process::Command::new("mkfifo").arg(&list).status().unwrap();
            assert!(made.success());
        } else {
            std::os::unix::fs::symlink(&other, &list).unwrap();
        }
        let before = std::fs::symlink_metadata(&list).unwrap().file_type();
        let mut command = memtrace();
        command.args(["fit", "--phantom", "mem=1g,cc=8.0,context=0", "--values", "100,2000", "-o"]).arg(&out);
        let output = command.args(["--", "python3", &script("plain_calls.py"), "{}"]).output().unwrap();
        assert!(output.status.success() && text(&output.stdout).contains("100 fits"), "{kind}: {output:?}");
        assert_eq!(std::fs::symlink_metadata(&list).unwrap().file_type(), before, "{kind}");
    }
    assert_eq!(std::fs::read_to_string(&other).unwrap(), "kept");
}

#[test]
fn fit_shows_a_failure_that_is_no_oom_and_gives_no_answer() {
    let calls = script("plain_calls.py");
    let fit = Fit::run(&["-o", "out", "--", "python3", &calls, "{}", "fails-at-8"]);
    let text = fit.text();
    assert_eq!(fit.status(), 1, "{text}");
    assert!(text.contains("with value 32 the program failed for a reason other than memory"), "{text}");
    assert!(text.contains("status 1") && text.contains("the data set has 7 samples"), "{text}");
    assert!(!text.contains("does not"), "{text}");
    assert_eq!(fit.left(), ["2", "32"]);

    let fit = Fit::run(&["-o", "out", "--min", "2000", "--", "python3", &calls, "{}"]);
    assert_eq!(fit.status(), 3);
    assert!(fit.text().contains("even 2000, the smallest value, does not fit"), "{}", fit.text());
    let fit = Fit::run(&["-o", "out", "--", "python3", &calls, "{}", "ignores"]);
    assert_eq!(fit.status(), 1);
    assert!(fit.text().contains("the program seems to ignore {}"), "{}", fit.text());
    let fit = Fit::run(&["-o", "out", "--", "python3", &calls, "{}", "nothing"]);
    assert!(fit.text().contains("allocated no GPU memory"), "{}", fit.text());
    assert!(fit.text().contains("next: less out/1/stderr.txt") && fit.left() == ["1"], "{}", fit.text());
    let fit = Fit::run(&["-o", "out", "--", "python3", &calls, "12"]);
    assert_eq!((fit.status(), fit.left().len()), (2, 0));
    assert!(fit.stderr().contains("write {} in its place"), "{}", fit.stderr());
    let fit = Fit::run(&["-o", "out", "--", "/nowhere/python", "{}"]);
    assert_eq!((fit.status(), fit.left().len()), (2, 0));
}

#[test]
fn fit_without_a_gpu_proposes_a_simulated_one() {
    // The message of torch on a machine without a driver.
    let fails = "raise RuntimeError('Found no NVIDIA driver on your system.')";
    let hint = "without a GPU, add --phantom h100-80g";
    let folder = TempDir::new().unwrap();
    let here = memtrace()
        .args(["fit", "--", "python3", "-c", fails, "{}"])
        .current_dir(folder.path())
        .output()
        .unwrap();
    let said = text(&here.stdout);
    assert_eq!(here.status.code(), Some(1), "{said}");
    assert!(said.contains(hint), "{said}");
    let simulated = Fit::run(&["--", "python3", "-c", fails, "{}"]);
    assert!(!simulated.text().contains(hint), "{}", simulated.text());
}

#[test]
fn fit_counts_an_oom_of_torch_as_too_large_and_shows_the_holders() {
    Torch::run("2.11.0", |torch| {
        let gpt = script("gpt.py");
        let fit =
            Fit::run(&["--values", "2,8,64", "-o", "out", "--", torch.python.to_str().unwrap(), &gpt, "{}"]);
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
fn fit_and_oom_say_if_the_answer_depends_on_the_size_of_the_context() {
    // The simulated context takes 612 MiB, a real one 518 to 614 MiB. So 7580 MiB are free here, and 7578 to
    // 7674 MiB on a real card.
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
        assert!(told.contains("uncertain: only 20.00 MiB were missing"), "{told}");

        // No range is printed if the peak is far from the limit, or if the card sets the size of the context.
        for (card, values) in [("mem=8g,cc=9.0", "4000,7900"), ("mem=8g,cc=9.0,context=612m", "7580,7600")] {
            let fit = Fit::on(card, &["--values", values, "-o", "out", "--", python, &tensor, "{}"]);
            assert!(fit.text().contains("free at the start: 7.40 GiB"), "{}", fit.text());
            assert!(!fit.text().contains("free memory differs between real cards"), "{card}: {}", fit.text());
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
    // Wait until the last run, which does not end by itself, has started.
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
    assert!(answer.contains("ended by SIGTERM; so far 20 fits; no value tried was too large"), "{answer}");
    assert!(!folder.path().join("out/30").exists() && folder.path().join("out/20").exists());
}

#[test]
fn fit_finds_the_fewest_gpus() {
    let calls = script("shared_calls.py");
    let cards = "{}xh100-80g,mem=1g,context=0";
    let fit = Fit::on(cards, &["--max", "32", "-o", "out", "--", "python3", &calls, "{}"]);
    let text = fit.text();
    assert!(text.contains("32 GPUs are enough, 16 GPUs are not"), "{text}{}", fit.stderr());
    assert!(text.contains("the numbers in between were not tried; list them with --gpus"), "{text}");
    assert_eq!((fit.status(), fit.left()), (0, vec!["16".to_owned(), "32".to_owned()]));
    let listed = ["--gpus", "24, 12,20,24", "--json", "--", "python3", &calls, "{gpus}"];
    let json = Fit::on("{gpus}xh100-80g,mem=1g,context=0", &listed).json();
    assert_eq!((json["wanted"].as_str(), json["fits"].as_str()), (Some("gpus"), Some("20")), "{json:#}");
    assert_eq!(json["too_big"], "12");
    let fit = Fit::on(cards, &["--max", "16", "--", "python3", &calls, "{}"]);
    assert_eq!(fit.status(), 3);
    assert!(fit.text().contains("even 16 GPUs, the largest number that you gave, are not"), "{}", fit.text());

    // The program fails on 16 GPUs, so that number is left out of the search. If it fails on every number,
    // there is no answer, and the status is 1.
    let fit = Fit::on(cards, &["--max", "32", "--", "python3", &calls, "{}", "100", "fails-at-16"]);
    let text = fit.text();
    assert!(text.contains("32 GPUs are enough, 8 GPUs are not"), "{text}");
    assert!(text.contains("does not run on 16 GPUs: status 1, ValueError: 16 ranks"), "{text}");
    let fit = Fit::on(cards, &["--gpus", "32", "--", "python3", &calls, "{}", "100", "fails-at-32"]);
    assert_eq!(fit.status(), 1);
    assert!(fit.text().contains("on 32 GPUs the program failed"), "{}", fit.text());
    assert!(fit.text().contains("\n32 GPUs: status 1; the last lines of its stderr"), "{}", fit.text());

    // With `--ranks 0`, only rank 0 of the job runs for each number of GPUs.
    let launcher = ["python3", "-m", "torch.distributed.run", "--nnodes", "{nodes}"];
    let job = ["--nproc-per-node", "{per-node}", &calls, "{}"];
    let ranks = ["--ranks", "0", "--gpus", "16,32,64", "--json", "--"];
    let json = Fit::on(cards, &[&ranks[..], &launcher, &job].concat()).json();
    assert_eq!((json["fits"].as_str(), json["too_big"].as_str()), (Some("32"), Some("16")), "{json:#}");
}

#[test]
fn fit_makes_a_table_by_card_and_by_number_of_gpus() {
    let calls = script("shared_calls.py");
    let cards = "{gpus}xh100-80g,mem=1g,context=0";
    let axes = ["--gpus", "16,20,32", "--values", "10,100,300,600", "--jobs", "2", "--json", "--"];
    let json = Fit::on(cards, &[&axes[..], &["python3", &calls, "{gpus}", "{}"]].concat()).json();
    let rows = json["rows"].as_array().unwrap();
    let limits: Vec<_> = rows.iter().map(|row| (row["gpus"].as_u64(), row["fits"].as_str())).collect();
    assert_eq!(limits, [(Some(16), None), (Some(20), Some("100")), (Some(32), Some("300"))], "{json:#}");
    let trials: usize = rows.iter().map(|row| row["trials"].as_array().unwrap().len()).sum();
    assert!(trials <= 8, "{trials}: what one row shows is known in the others");

    // Without --values fit searches for the largest value. With two cards, each has a row.
    let program = ["--within", "2%", "--min", "10", "--", "python3", &calls, "{gpus}", "{}"];
    let fit = Fit::on(cards, &[&["--gpus", "20,32"][..], &program].concat());
    assert!(fit.status() == 0 && fit.text().contains("largest value"), "{}{}", fit.text(), fit.stderr());
    let cards = "h100-80g,mem=1g,context=0,l4,mem=300m";
    let fit = Fit::on(cards, &["--", "python3", &calls, "32", "10"]);
    let text = fit.text();
    let line = |card: &str| text.lines().find(|line| line.starts_with(card)).unwrap_or_default().to_owned();
    assert!(line("h100").contains("fits") && line("l4").contains("out of memory"), "{text}");
    assert_eq!(fit.status(), 0);
    let fit = Fit::on(cards, &["--json", "--", "python3", &calls, "32", "10"]);
    let fits: Vec<_> =
        fit.json()["rows"].as_array().unwrap().iter().map(|row| row["fits"].as_bool()).collect();
    assert_eq!(fits, [Some(true), Some(false)]);
}

#[test]
fn fit_with_prices_lists_the_cheapest_card_first() {
    let calls = script("shared_calls.py");
    let prices = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(prices.path(), "card,price\nh100-80g,2.5\nl4,0.8\n").unwrap();
    let of = ["--prices", prices.path().to_str().unwrap()];
    let program = ["--", "python3", &calls, "32", "10"];
    let cards = "h100-80g,mem=1g,context=0,a100-40g,l4,mem=900m,context=0";
    let text = Fit::on(cards, &[&of[..], &program].concat()).text();
    let rows: Vec<Vec<&str>> = text
        .lines()
        .filter(|line| ["l4", "h100", "a100"].iter().any(|card| line.starts_with(card)))
        .map(|line| line.split_whitespace().take(3).collect())
        .collect();
    let expected = [["l4,mem=900m,context=0", "0.80", "fits"], ["h100-80g,mem=1g,context=0", "2.50", "fits"]];
    assert_eq!(rows[..2], expected, "{text}");
    assert_eq!(rows[2], ["a100-40g", "-", "fits"], "a card without a price follows: {text}");
    let json = Fit::on(cards, &[&of[..], &["--json"], &program].concat()).json();
    let each: Vec<_> = json["rows"].as_array().unwrap().iter().map(|row| row["price"].as_f64()).collect();
    assert_eq!(each, [Some(0.8), Some(2.5), None]);
    let text =
        Fit::on("l4,mem=900m,context=0", &[&of[..], &["--", "python3", &calls, "32", "{}"]].concat()).text();
    assert!(text.lines().any(|line| line == "price: 0.80"), "one search: {text}");
    let fit = Fit::on(cards, &[&["--prices", "absent.csv"][..], &program].concat());
    assert!(fit.status() == 2 && fit.stderr().contains("--prices absent.csv"), "{}", fit.stderr());
}

#[test]
fn fit_refuses_numbers_of_gpus_that_cannot_be() {
    let cases: [(&str, &[&str], &str, &str); 21] = [
        (
            "{}xh100-80g",
            &[],
            "torchrun --nproc-per-node 8 t.py",
            "the command needs a placeholder for the number of GPUs, too: torchrun",
        ),
        (
            "8xh100-80g",
            &[],
            "torchrun --nproc-per-node {gpus} t.py {}",
            "--phantom needs a number of GPUs to vary",
        ),
        ("8xh100-80g", &[], "torchrun --nproc-per-node 8 t.py", "write {} in its place"),
        (
            "8xh100-80g",
            &["--gpus", "2,4"],
            "python t.py {}",
            "--gpus needs a placeholder for the GPUs in --phantom",
        ),
        ("h100-{}g", &[], "python t.py {}", "goes before the card"),
        ("{}xh100-80g,l4", &[], "python t.py {}", "the same way for each card"),
        ("{}xh100-81g", &[], "python t.py {}", "h100-81g"),
        ("{}xh100-80g", &["--gpus", "0"], "python t.py {}", "`0` is not a number of GPUs"),
        ("{}xh100-80g", &["--gpus", "8,two"], "python t.py {}", "`two` is not a number of GPUs"),
        ("{}xh100-80g", &["--gpus", ","], "python t.py {}", "no number of GPUs was given"),
        ("{}xh100-80g", &["--gpus", "64"], "python t.py {}", "from 1 to 32; more with --ranks"),
        ("{}xh100-80g", &["--gpus", "99999999999"], "python t.py {}", "is not a number of GPUs"),
        ("{}xh100-80g", &["--gpus", "8", "--values", "8"], "python t.py {}", "give only one of --gpus"),
        ("{gpus}xh100-80g", &[], "python t.py {gpus} {}", "list the numbers of GPUs for the table"),
        (
            "{gpus}xh100-80g",
            &["--gpus", "12", "--ranks", "0"],
            "torchrun --nnodes {nodes} t.py",
            "do not fill whole nodes of 8",
        ),
        ("{}xh100-80g", &["--ranks", "9", "--gpus", "8"], "python t.py {}", "no rank 9"),
        (",", &[], "python t.py {}", "--phantom names no card"),
        ("{}xh100-80g", &["--gpus", "8", "--max", "4"], "python t.py {}", "so that --max has no effect"),
        (
            "{}xh100-80g",
            &["--gpus", "8", "--within", "0"],
            "python t.py {}",
            "so that --within has no effect",
        ),
        ("h100-80g", &["--values", "a/b,a_b"], "python t.py {}", "would have the same folder, a_b"),
        ("h100-80g", &["--values", "trials.txt"], "python t.py {}", "cannot be the name of a folder"),
    ];
    for (cards, options, command, hint) in cases {
        let words: Vec<&str> = command.split(' ').collect();
        let fit = Fit::on(cards, &[options, &["--"], &words].concat());
        assert!(
            fit.status() == 2 && fit.stderr().contains(hint),
            "{cards} {options:?} {command}: {}",
            fit.stderr()
        );
        assert!(!fit.folder.path().join("memtrace-out").exists(), "{cards} {options:?} {command}");
    }
}

#[test]
fn fit_repeats_alone_a_run_that_failed_while_another_was_active() {
    let calls = script("shared_calls.py");
    let program = ["--jobs", "2", "--", "python3", &calls, "16", "100", "alone"];
    let fit = Fit::on("h100-80g,a100-40g", &program);
    assert_eq!(fit.status(), 0, "{}{}", fit.text(), fit.stderr());
    assert!(
        fit.stderr().contains("failed while another trial was active; it runs again, alone"),
        "{}",
        fit.stderr()
    );
    assert!(fit.stderr().contains("from now on, they run one at a time"), "{}", fit.stderr());
}

#[test]
fn fit_ends_all_processes_of_its_runs_on_a_signal() {
    let calls = script("shared_calls.py");
    let folder = TempDir::new().unwrap();
    let mut command = memtrace();
    command.args([
        "fit",
        "--phantom",
        "h100-80g,a100-40g",
        "--jobs",
        "2",
        "-o",
        "out",
        "--",
        "python3",
        &calls,
    ]);
    command.args(["16", "100", "waits"]).current_dir(folder.path());
    command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let child = command.spawn().unwrap();
    let mut pids: Vec<String> = Vec::new();
    for run in ["h100-80g", "a100-40g"] {
        let waits = folder.path().join("out").join(run).join("stdout.txt");
        for _ in 0..6000 {
            let text = std::fs::read_to_string(&waits).unwrap_or_default();
            if let Some(line) = text.strip_prefix("waits ").and_then(|line| line.strip_suffix('\n')) {
                pids.extend(line.split(' ').map(str::to_owned));
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }
    assert_eq!(pids.len(), 4);
    let kill = std::process::Command::new("kill").args(["-TERM", &child.id().to_string()]).status();
    assert!(kill.unwrap().success());
    let output = child.wait_with_output().unwrap();
    use std::os::unix::process::ExitStatusExt;
    assert_eq!(output.status.signal(), Some(15), "{output:?}");
    for pid in pids {
        let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        assert!(state.is_empty() || state.contains(") Z "), "{state}");
    }
    assert!(!folder.path().join("out/h100-80g").exists() && !folder.path().join("out/a100-40g").exists());
}

/// A program that needs less memory with a larger value: 40 blocks of 50 MiB, of which some are swapped out.
#[test]
fn fit_smallest_finds_the_fewest_blocks_to_swap() {
    let folder = TempDir::new().unwrap();
    let program = folder.path().join("swap.py");
    let code = format!(
        "import runpy, sys\nsys.argv = ['plain_calls.py', str(50 * (40 - int(sys.argv[1])) + 1)]\n\
         runpy.run_path({:?}, run_name='__main__')\n",
        script("plain_calls.py")
    );
    std::fs::write(&program, &code).unwrap();
    let program = program.to_str().unwrap();
    for (values, shown) in [("--min 0 --max 40", "20"), ("--values 0,8,16,24,32", "24")] {
        let mut arguments = vec!["--smallest", "-o", "out", "--json"];
        arguments.extend(values.split(' '));
        arguments.extend(["--", "python3", program, "{}"]);
        let fit = Fit::run(&arguments);
        let json = fit.json();
        assert_eq!(
            (fit.status(), json["fits"].as_str(), json["wanted"].as_str()),
            (0, Some(shown), Some("smallest")),
            "{json:#}"
        );
        assert!(json["trials"].as_array().unwrap().len() <= 9, "{json:#}");
    }
    // Here, blocks on the host take 16 MiB each. Host memory is measured once a second.
    let with_host = folder.path().join("swap_to_host.py");
    let held = "import atexit, sys, time\natexit.register(time.sleep, 1.5)\nheld = b'x' * (int(sys.argv[1]) << 24)\n";
    std::fs::write(&with_host, held.to_owned() + &code).unwrap();
    let with_host = with_host.to_str().unwrap();
    // Only the fewest blocks that fit on the card decide about the host: 32
    // blocks are too many for 480 MiB, and 24 are not.
    for (limit, status, fits, too_big) in [("480m", 0, Some("24"), "16"), ("200m", 3, None, "24")] {
        let mut arguments = vec!["--smallest", "--values", "0,8,16,24,32", "--host-mem", limit];
        arguments.extend(["-o", "out", "--json", "--", "python3", with_host, "{}"]);
        let fit = Fit::run(&arguments);
        let json = fit.json();
        assert_eq!(
            (fit.status(), json["fits"].as_str(), json["too_big"].as_str()),
            (status, fits, Some(too_big)),
            "{json:#}"
        );
    }
    for (values, part) in [
        ("--smallest", "give --max"),
        ("--smallest --min 1 --max 99999", "use --multiple-of"),
        ("--smallest --values a,b", "needs numbers in --values"),
        ("--min 0", "--min 0 is only for --smallest"),
    ] {
        let mut arguments: Vec<&str> = values.split(' ').collect();
        arguments.extend(["--", "python3", program, "{}"]);
        let fit = Fit::run(&arguments);
        assert_eq!((fit.status(), fit.stderr().contains(part)), (2, true), "{values}: {}", fit.stderr());
    }
}

#[test]
fn fit_worst_plans_for_the_largest_input_of_a_trace() {
    Torch::run("2.11.0", |torch| {
        let folder = TempDir::new().unwrap();
        let (out, python) = (folder.path().to_str().unwrap(), torch.python.to_str().unwrap());
        let program = script("lengths.py");
        let traced = memtrace()
            .args(["run", "--quiet", "--phantom", "l4", "-o", out, "--", python, &program])
            .output()
            .unwrap();
        assert!(traced.status.success(), "{}", text(&traced.stderr));
        let fit = |more: &[&str]| {
            let mut arguments = vec!["--worst", out, "--values", "1", "--json", "--", python, &program];
            arguments.extend(more);
            Fit::on("l4,l40s", &arguments)
        };
        let found = fit(&["{dim1}", "{}"]);
        let json = found.json();
        assert_eq!((found.status(), &json["command"][2]), (0, &Value::from("9000")), "{json:#}");
        let input = "int64 [2x9000] of Sequential";
        for (more, part) in [
            (
                &["{dim1}", "{}"],
                format!("the largest input of {out} is {input}; planning for {{dim0}} = 2, {{dim1}} = 9000"),
            ),
            (&["9000", "{}"], format!("no place for the input, {input}; write {{dim0}} to {{dim1}}")),
            (&["{dim2}", "{}"], format!("{{dim2}}: the input, {input}, has the dimensions 0 to 1")),
        ] {
            let fit = fit(more);
            assert!(fit.stderr().contains(&part), "{part}: {}", fit.stderr());
        }
        let file = TempDir::new().unwrap();
        let nothing = file.path().join("nothing.csv");
        std::fs::write(&nothing, "").unwrap();
        for (trace, part) in [
            ("missing", "missing: no such file or folder"),
            (file.path().to_str().unwrap(), "no trace here"),
            (nothing.to_str().unwrap(), "the file is empty"),
        ] {
            let refused = Fit::run(&["--worst", trace, "--", "true", "{}"]);
            assert!(
                refused.status() == 2 && refused.stderr().contains(part),
                "{trace}: {}",
                refused.stderr()
            );
        }
    });
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
    let fit = ask(&[&["--phantom", "l4,a100-40g", "--values", "10,20", "--json"], &program[..]].concat());
    let json = fit.json();
    assert_eq!(fit.status(), 0, "{json:#}");
    let runs: Vec<_> = json["runs"].as_array().unwrap().iter().collect();
    let told = |run: &Value| (run["card"].clone(), run["value"].clone(), run["figure"].clone());
    assert_eq!(runs.len(), 4);
    assert_eq!(told(runs[0]), ("l4".into(), "10".into(), "1,010".into()));
    assert_eq!(told(runs[3]), ("a100-40g".into(), "20".into(), "1,020".into()));
    assert!(runs[3]["capacity_bytes"].as_i64() > runs[0]["capacity_bytes"].as_i64());
    // The folders were removed, because each trial printed the figure.
    assert!(runs.iter().all(|run| run["folder"].is_null()), "{json:#}");
    let without_figure = ["--phantom", "l4", "--json", "--", "python3", &calls, "5"];
    let fit = ask(&without_figure);
    let json = fit.json();
    let kept = json["runs"][0]["folder"].as_str().unwrap();
    assert!(fit.folder.path().join(kept).join("stdout.txt").exists(), "{json:#}");

    let fit = ask(&["--phantom", "l4", "-o", "out", "--", "python3", &calls, "5", "says"]);
    assert!(fit.text().contains("1,005") && fit.status() == 0, "{}{}", fit.text(), fit.stderr());
    let fit = ask(&["-o", "out", "--", "python3", "-c", "print('room for 7 blocks')"]);
    assert!(fit.status() == 0 && fit.left() == ["run"], "{}{}", fit.text(), fit.stderr());
    // First the program prints no matching line, then it fails: both give status 1.
    let fit = ask(&["--phantom", "l4", "--", "python3", &calls, "5"]);
    assert!(fit.text().contains("not printed") && fit.status() == 1, "{}", fit.text());
    let fit = ask(&["--phantom", "l4", "--", "python3", &calls, "9", "fails-at-8"]);
    assert!(fit.text().contains("the data set has 7 samples") && fit.status() == 1, "{}", fit.text());
    // Invalid requests.
    for (arguments, hint) in [
        (&["--phantom", "l4", "--", "python3", &calls, "{}"][..], "--values, or neither"),
        (&["--values", "1,2", "--", "python3", &calls, "5"], "--values, or neither"),
        (&["--phantom", "l5", "--", "python3", &calls, "5"], "l5"),
        (&["--phantom", ",", "--", "python3", &calls, "5"], "--phantom names no card"),
        (
            &["--phantom", "{}xl4", "--", "python3", &calls, "5"],
            "list the cards: --phantom 2xh100-80g,4xh100-80g",
        ),
        (&["--phantom", "l4", "--values", "a/b,a_b", "--", "python3", "{}"], "would have the same folder"),
        (&["--ask", "(", "--", "python3", &calls, "5"], "--ask"),
    ] {
        let fit = ask(arguments);
        assert!(fit.status() == 2 && fit.stderr().contains(hint), "{arguments:?}: {}", fit.stderr());
        assert!(!fit.folder.path().join("memtrace-out").exists(), "{arguments:?}");
    }
}

#[test]
fn fit_counts_the_host_memory_of_the_ranks_of_a_node_that_did_not_run() {
    let Some(torch) = Torch::installed("2.11.0") else { return };
    let (python, gathers) = (torch.python.to_str().unwrap(), script("gathers.py"));
    let run = |ranks: &str, form: &[&str]| {
        let program = ["-m", "torch.distributed.run", "--nproc-per-node", "4", gathers.as_str(), "{}"];
        let words = ["--ranks", ranks, "--host-mem", "100m", "--values", "64"];
        Fit::on("4xt4", &[&words[..], form, &["--", python], &program[..]].concat())
    };
    let one = run("0", &["--json"]).json();
    let host = |fit: &Value| fit["trials"][0]["peak_host_bytes"].as_i64().unwrap() >> 20;
    assert_eq!(
        (&one["trials"][0]["outcome"], &one["trials"][0]["processes"]),
        (&"out of memory".into(), &1.into())
    );
    assert!(one["next"][0].as_str().unwrap().starts_with("memtrace ledger --host"), "{one}");
    // Only rank 0 gathers 512 MiB. A run of rank 0 alone counts them for every rank, a run of two ranks does
    // not.
    let two = run("0,1", &["--json"]).json();
    assert!(host(&one) > 4 * 512 && host(&two) > 512, "{one} {two}");
    assert!(host(&two) < host(&one) - 512, "{} {}", host(&two), host(&one));
    // The note recommends a second rank, unless two ranks ran already.
    for (ranks, absent, is_hinted) in [("0", "3 ranks", true), ("0,1", "2 ranks", false)] {
        let text = run(ranks, &[]).text();
        assert!(text.contains(&format!("note: host memory is for one node: {absent} did not run")), "{text}");
        assert_eq!(text.contains("use --ranks 0,1"), is_hinted, "{text}");
    }
}

/// Runs the commands of a page's blocks on the examples, and compares what they print.
fn prints_what_the_page_shows(are_recipes: bool) {
    Torch::run("2.11.0", |torch| {
        let blocks = pages::commands("docs/fit.md");
        assert_eq!(blocks.len(), 3);
        let is_recipe = |(words, _): &(Vec<String>, String)| words.iter().any(|word| word == "--recipe");
        for (words, shown) in blocks.iter().filter(|block| is_recipe(block) == are_recipes) {
            let folder = TempDir::new().unwrap();
            std::os::unix::fs::symlink(root().join("examples"), folder.path().join("examples")).unwrap();
            // The number of trials at once, which the page's machine allows.
            let mut command = memtrace();
            command.args(&words[..1]).args(["--jobs", "2"]).args(&words[1..]).current_dir(folder.path());
            let output = command
                .env("PATH", torch.path())
                .env("HF_HUB_OFFLINE", "1")
                .env("COLUMNS", "170")
                .output()
                .unwrap();
            assert!(output.status.success(), "{words:?}: {}", text(&output.stderr));
            pages::assert_shown(shown, &text(&output.stdout), |line| {
                line.split_whitespace().collect::<Vec<_>>().join(" ")
            });
        }
    });
}

#[test]
fn fit_prints_what_its_page_shows() {
    prints_what_the_page_shows(false);
}

#[test]
#[ignore = "scripts/check --deep runs it"]
fn fit_recipe_prints_what_the_page_on_fit_shows() {
    prints_what_the_page_shows(true);
}
