//! What the command offers in addition to reports: settings as options, other forms of an answer,
//! completions, manual pages, and explanations of terms.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use memtrace_analysis::reports::{self, REPORTS};

use crate::common::command;

fn memtrace(arguments: &[&str]) -> Output {
    command::memtrace().args(arguments).output().unwrap()
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn error(arguments: &[&str]) -> String {
    let output = memtrace(arguments);
    assert_eq!(output.status.code(), Some(2), "{arguments:?}");
    String::from_utf8(output.stderr).unwrap()
}

fn fixtures() -> Vec<PathBuf> {
    let folders = std::fs::read_dir(command::fixtures()).unwrap().map(|entry| entry.unwrap().path());
    folders.filter(|path| path.is_dir()).collect()
}

/// Returns the column heads of all tables in a Markdown text, in order.
fn heads(text: &str) -> Vec<String> {
    let lines: Vec<&str> = text.lines().collect();
    let tables = lines.windows(2).filter(|pair| pair[1].starts_with("| ---"));
    let heads = tables.flat_map(|pair| pair[0].split('|').map(|head| head.trim().replace('\\', "")));
    heads.filter(|head| !head.is_empty()).collect()
}

#[test]
fn help_knows_every_head_of_every_table_and_lists_the_nearest_words() {
    let mut known = 0;
    for fixture in fixtures() {
        for report in reports::with_views().filter(|report| report.inputs().len() == 1) {
            let more = ["--format", "markdown", fixture.to_str().unwrap()];
            let words: Vec<&str> = report.name().split(' ').chain(more).collect();
            let output = memtrace(&words);
            for head in heads(&String::from_utf8_lossy(&output.stdout)) {
                let said = stdout(&memtrace(&["help", &head]));
                assert!(said.lines().count() > 1, "{head}: {said}");
                known += 1;
            }
        }
    }
    assert!(known > 100, "only {known} heads");
    assert!(stdout(&memtrace(&["help", "words"])).lines().count() > 60);
    assert!(stdout(&memtrace(&["help", "Device", "USED"])).contains("nvidia-smi"));
    let why = error(&["help", "reservd"]);
    assert!(why.contains("no help on \"reservd\"") && why.contains("reserved"), "{why}");
}

#[test]
fn format_markdown_and_csv_have_the_tables_of_each_report() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let (gpt, conv) = (root.join("gpt"), root.join("conv"));
    let (gpt, conv) = (gpt.to_str().unwrap(), conv.to_str().unwrap());
    let markdown = stdout(&memtrace(&["diff", gpt, conv, "--format", "markdown"]));
    assert!(
        markdown.contains("\n\n| peak | before | after | change |  |\n| --- | ---: | ---: | ---: | ---: |\n")
    );
    let columns = |line: &str| line.replace("\\|", "").matches('|').count();
    for table in markdown.split("\n\n").filter(|block| block.trim_start().starts_with('|')) {
        let lines: Vec<&str> = table.trim().lines().collect();
        assert!(lines.iter().all(|line| columns(line) == columns(lines[0])), "{table}");
    }
    let csv = stdout(&memtrace(&["peak", gpt, "--format", "csv"]));
    let mut reader = csv::Reader::from_reader(csv.as_bytes());
    let bytes = reader.headers().unwrap().iter().position(|head| head == "own").unwrap();
    let sum: i64 = reader.records().map(|row| row.unwrap()[bytes].parse::<i64>().unwrap()).sum();
    assert!(sum > 100 << 20, "{sum}");
    assert!(error(&["peak", gpt, "--format", "json"]).contains("markdown"), "--json is the one way to JSON");
    assert!(error(&["peak", gpt, "--format", "yaml"]).contains("markdown"));
    let curve = stdout(&memtrace(&["timeline", gpt, "--format", "markdown"]));
    assert_eq!(curve.matches("```").count(), 2, "{curve}");
}

#[test]
fn format_csv_has_rows_or_says_that_it_has_none() {
    let gpt = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/gpt");
    let gpt = gpt.to_str().unwrap();
    for view in [
        "peak --mem-tracker",
        "peak --mem-tracker --table",
        "peak --at end",
        "peak --each step",
        "modules",
        "modules --full",
        "modules --table",
        "ops",
        "ops --legacy",
        "timeline",
        "oom",
        "leaks",
        "leaks --holders",
        "check",
        "summary",
    ] {
        let words: Vec<&str> = view.split(' ').chain([gpt, "--format", "csv"]).collect();
        let output = memtrace(&words);
        let said = String::from_utf8_lossy(&output.stdout);
        let why = String::from_utf8_lossy(&output.stderr);
        if output.status.success() {
            assert!(said.lines().count() > 1 && said.contains(','), "{view}: {said}");
        } else {
            assert_eq!((output.status.code(), said.trim()), (Some(2), ""), "{view}");
            assert!(why.lines().count() == 1 && why.contains("has no table"), "{view}: {why}");
        }
    }
    let csv = |view: &[&str]| stdout(&memtrace(&[view, &[gpt, "--format", "csv"]].concat()));
    assert!(csv(&["peak", "--mem-tracker"]).starts_with("Device,Parameter,"));
    assert!(csv(&["modules", "--full"]).starts_with("Module,State & Call,Device,"));
    let markdown = stdout(&memtrace(&["peak", "--mem-tracker", "--table", gpt, "--format", "markdown"]));
    assert!(markdown.contains("| Device | Parameter |") && !markdown.contains("===="), "{markdown}");
}

#[test]
fn run_takes_settings_as_options_and_names_an_unknown_option() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().to_str().unwrap();
    let print = "echo $MEMTRACE_OPS/$MEMTRACE_SAMPLE_MS/$MEMTRACE_STACKS/$1";
    let arguments = ["run", "-q", "-o", out, "--ops", "io", "--sample-ms=100", "--stacks", "python"];
    let said = stdout(&memtrace(&[&arguments[..], &["--", "sh", "-c", print, "sh", "--ops"]].concat()));
    assert_eq!(said, "io/100/python/--ops\n");
    let said = stdout(&memtrace(&["run", "-q", "-o", out, "sh", "-c", "echo $0", "--ops"]));
    assert_eq!(said, "--ops\n");
    let why = error(&["run", "-o", out, "--opps", "io", "--", "true"]);
    assert!(why.contains("--opps") && why.contains("--ops"), "{why}");
    let why = error(&["run", "-o", out, "--ops", "some", "--", "true"]);
    assert!(why.contains("--ops some: expected off, top, all or io"), "{why}");
    assert!(error(&["run", "-o", out, "--sample-ms"]).contains("--sample-ms"));
}

#[test]
fn doctor_names_an_unknown_variable() {
    let mut command = command::memtrace();
    command.args(["doctor", "--", "/bin/false"]).env_remove("LD_PRELOAD").env("MEMTRACE_STACK", "python");
    let text = String::from_utf8(command.output().unwrap().stdout).unwrap();
    assert!(text.replace("\n", " ").contains("MEMTRACE_STACK: there is no such variable"), "{text}");
}

#[test]
fn help_completions_know_every_command_and_bash_accepts_them() {
    let text = stdout(&memtrace(&["help", "--completions", "bash"]));
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("memtrace");
    std::fs::write(&file, &text).unwrap();
    let asks = ". \"$0\"; COMP_WORDS=(memtrace ti); COMP_CWORD=1; _memtrace memtrace ti memtrace; echo ${COMPREPLY[@]}";
    let bash = Command::new("bash").args(["-c", asks]).arg(&file).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&bash.stdout).trim(), "timeline");
    for shell in ["zsh", "fish", "elvish", "powershell"] {
        assert!(stdout(&memtrace(&["help", "--completions", shell])).contains("timeline"), "{shell}");
    }
    assert!(error(&["help", "--completions", "csh"]).contains("bash"));
}

#[test]
fn help_man_writes_a_page_for_each_command() {
    let folder = tempfile::tempdir().unwrap();
    let pages = folder.path().join("man1");
    stdout(&memtrace(&["help", "--man", pages.to_str().unwrap()]));
    for report in REPORTS {
        assert!(pages.join(format!("memtrace-{}.1", report.name())).exists(), "{}", report.name());
    }
    assert!(std::fs::read_to_string(pages.join("memtrace.1")).unwrap().contains(".TH memtrace 1"));
    assert!(error(&["help", "--man", "/dev/null/pages"]).contains("/dev/null/pages"));
}

#[test]
fn report_open_says_how_to_open_the_page_where_there_is_no_browser() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("page.html");
    let gpt = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/gpt");
    let mut command = command::memtrace();
    command.arg("report").arg(gpt).arg("--open").arg("-o").arg(&page);
    let output = command.env("PATH", folder.path()).env_remove("LD_PRELOAD").output().unwrap();
    assert!(output.status.success() && page.exists());
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("cannot start a browser") && said.contains("page.html"), "{said}");
    assert!(error(&["report", "tests/fixtures/gpt", "--open", "-o", "-"]).contains("--open"));
}
