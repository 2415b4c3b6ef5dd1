//! `scripts/published`: the comparison with figures that others measured on real GPUs. A fixed eighteenth of
//! the cases runs here, a third in `scripts/check --deep`; `scripts/published` alone runs them all.

use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

use crate::common::command::root;
use crate::common::torch::{Torch, VERSIONS, built};

const SOURCES: &str =
    "source,title,address,measured,kind,rounding,note\ns,A source,https://example.org,somebody,,,\n";
const COLUMNS: &str = "source,card,torch,libraries,case,arguments,label,what,published,unit,cause\n";

/// Runs `scripts/published` with these arguments.
fn published(arguments: &[&str]) -> Output {
    Command::new("python3").arg(root().join("scripts/published")).args(arguments).output().unwrap()
}

/// Returns a folder with `sources.csv`, `figures.csv` and a script `case.py` of these contents.
fn cases(sources: &str, figures: &str, code: &str) -> TempDir {
    let folder = TempDir::new().unwrap();
    std::fs::write(folder.path().join("sources.csv"), sources).unwrap();
    std::fs::write(folder.path().join("figures.csv"), figures).unwrap();
    std::fs::write(folder.path().join("case.py"), code).unwrap();
    folder
}

/// Checks the exit status and a part of stderr.
fn assert_told(output: &Output, status: i32, message: &str) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{stderr}");
    assert!(stderr.contains(message), "{stderr}");
    assert!(!stderr.contains("Traceback"), "{stderr}");
}

/// Runs a fixed part of the cases, such as `5/18`, and checks its figures. The part must have at least
/// `least` figures.
fn figures_are_met(part: &str, least: usize) {
    built("libmemtrace.so");
    if VERSIONS.iter().any(|version| Torch::installed(version).is_none()) {
        return;
    }
    let output = published(&["--part", part, "--json"]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    let figures: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    let equal = figures.iter().filter(|figure| figure["equal"] == true).count();
    assert!(figures.len() >= least, "only {} figures", figures.len());
    // At least 70% of the figures are equal. docs/accuracy.csv has the differences of a whole run.
    assert!(equal * 10 >= figures.len() * 7, "{equal} of {} are equal", figures.len());
    for figure in &figures {
        let error = figure["error"].as_f64().unwrap();
        let cause = figure["cause"].as_str().unwrap();
        assert!(error.abs() <= 0.005 || !cause.is_empty(), "{figure}");
    }
}

#[test]
fn published_figures_of_a_fixed_eighteenth_of_the_cases_are_met_or_have_a_cause() {
    figures_are_met("5/18", 30);
}

#[test]
#[ignore = "scripts/check --deep runs it"]
fn published_figures_of_a_fixed_third_of_the_cases_are_met_or_have_a_cause() {
    figures_are_met("1/3", 60);
}

#[test]
fn published_figures_are_all_in_the_data_of_the_docs() {
    let rows = |path: &str, columns: &[&str]| -> Vec<Vec<String>> {
        let mut reader = csv::Reader::from_path(root().join(path)).unwrap();
        let head = reader.headers().unwrap().clone();
        let at: Vec<usize> =
            columns.iter().map(|name| head.iter().position(|column| column == *name).unwrap()).collect();
        reader
            .records()
            .map(|row| row.unwrap())
            .map(|row| at.iter().map(|&place| row[place].to_owned()).collect())
            .collect()
    };
    let columns =
        ["source", "card", "torch", "case", "arguments", "label", "what", "published", "unit"].as_slice();
    let figures = rows("tests/published/figures.csv", columns);
    assert_eq!(figures, rows("docs/accuracy.csv", columns), "run scripts/published --write");
    let page = std::fs::read_to_string(root().join("docs/accuracy.md")).unwrap();
    assert!(page.contains(&format!("| figures | {} |", figures.len())), "run scripts/published --write");
}

/// The page and README's sentence are generated from the data, so neither is edited by hand or out of date.
#[test]
fn published_page_is_written_from_its_data() {
    let code = "import sys; sys.path.insert(0, 'scripts')\n\
                from parts.published_page import DATA, generated, sentences\n\
                from parts.published_figures import read_figures\n\
                from parts.published_data import in_order, read_rows\n\
                figures = read_figures()\n\
                rows = in_order(read_rows(DATA, figures), figures)\n\
                print(generated(rows)); print('<!-- cut -->'); print(sentences(rows))";
    let output = Command::new("python3").args(["-c", code]).current_dir(root()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let printed = String::from_utf8(output.stdout).unwrap();
    let (page, sentences) = printed.split_once("<!-- cut -->").unwrap();
    for (file, begin, end, expected) in [
        ("docs/accuracy.md", "<!-- scripts/published writes from here -->", "<!-- to here -->", page),
        ("README.md", "<!-- published -->", "<!-- /published -->", sentences),
    ] {
        let text = std::fs::read_to_string(root().join(file)).unwrap();
        let written = text.split(begin).nth(1).unwrap().split(end).next().unwrap();
        assert_eq!(written.trim(), expected.trim(), "{file}: run scripts/published --write");
    }
}

#[test]
fn published_refuses_an_unknown_source_card_case_and_part() {
    for (arguments, message) in [
        (["--source", "nobody"], "--source nobody: no figure has it; there are"),
        (["--card", "rtx9999"], "--card rtx9999: no figure has it; there are"),
        (["--case", "nothing"], "--case nothing: no figure has it; there are"),
        (["--part", "4/3"], "--part 4/3: must be I/N with 1 <= I <= N, such as 1/3"),
        (["--part", "0/3"], "--part 0/3"),
        (["--part", "third"], "--part third"),
        (["--jobs", "0"], "must be positive"),
    ] {
        assert_told(&published(&[&arguments[..], &["--list"]].concat()), 2, message);
    }
    assert_told(&published(&["--write", "--card", "b200"]), 2, "--write needs all figures of a source");
}

#[test]
fn published_refuses_a_figures_file_that_is_empty_or_invalid() {
    let row = "s,h100-80g,,,case,,x,allocated,1.5,MiB,\n";
    for (sources, figures, message) in [
        (SOURCES, String::new(), "figures.csv is empty"),
        (SOURCES, COLUMNS.to_owned(), "figures.csv has no figures below its header"),
        (SOURCES, row.to_owned(), "figures.csv:1: the columns are"),
        (SOURCES, format!("{COLUMNS}s,h100-80g\n"), "row 2 has 2 fields, and must have 11"),
        (SOURCES, format!("{COLUMNS}{}", row.replace("s,", "t,")), "no source 't' in sources.csv"),
        (SOURCES, format!("{COLUMNS}{}", row.replace("MiB", "furlong")), "no unit 'furlong'"),
        (
            SOURCES,
            format!("{COLUMNS}{}", row.replace("1.5", "much")),
            "published is 'much', and must be a number",
        ),
        (
            SOURCES,
            format!("{COLUMNS}{}", row.replace("1.5", "nan")),
            "published is 'nan', and must be a number",
        ),
        (SOURCES, format!("{COLUMNS}{}", row.replace("case", "absent")), "no case"),
        (SOURCES, format!("{COLUMNS}{row}{row}"), "row 3: the same figure as in"),
        (
            "source,title,address,measured,kind,rounding,note\ns,A source,https://example.org,somebody,,up,\n",
            format!("{COLUMNS}{row}"),
            "rounding is 'up'; there are float32, down and none",
        ),
        ("", format!("{COLUMNS}{row}"), "sources.csv is empty"),
    ] {
        let folder = cases(sources, &figures, "");
        assert_told(&published(&["--list", "--cases", folder.path().to_str().unwrap()]), 2, message);
    }
}

#[test]
fn published_figures_that_were_rounded_down_are_equal_up_to_the_next_unit() {
    built("libmemtrace.so");
    if Torch::installed("2.11.0").is_none() {
        return;
    }
    let code = "print('{\"label\": \"x\", \"allocated\": %d}' % (4.9 * 2**20))";
    let row = |published: &str| format!("{COLUMNS}s,h100-80g,,,case,,x,allocated,{published},MiB,any\n");
    for (rounding, published_number, equal) in
        [("", "5", true), ("", "4", false), ("down", "4", true), ("down", "5", false)]
    {
        let sources = SOURCES.replace("somebody,,,", &format!("somebody,,{rounding},"));
        let folder = cases(&sources, &row(published_number), code);
        let output = published(&["--json", "--cases", folder.path().to_str().unwrap()]);
        assert_told(&output, 0, "");
        let figures: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(figures[0]["equal"], equal, "{rounding} {published_number}");
    }
}

#[test]
fn published_exits_1_when_a_case_fails_or_a_difference_has_no_cause() {
    built("libmemtrace.so");
    if Torch::installed("2.11.0").is_none() {
        return;
    }
    let figure = |card: &str, published: &str, cause: &str| {
        format!("{COLUMNS}s,{card},,,case,,x,allocated,{published},MiB,{cause}\n")
    };
    let good = "import torch\nx = torch.empty(2**20, device='cuda')\n\
                print('{\"label\": \"x\", \"allocated\": %d}' % torch.cuda.memory_allocated())\n";
    for (figures, code, status, message) in [
        (figure("h100-80g", "4.0", ""), good, 0, ""),
        (figure("h100-80g", "5.0", "made up"), good, 0, ""),
        (figure("h100-80g", "5.0", ""), good, 1, "no cause in figures.csv for s case x allocated"),
        (figure("rtx9999", "4.0", ""), good, 1, "failed: exit status 2"),
        (figure("h100-80g", "4.0", ""), "raise SystemExit('no luck')", 1, "no luck"),
        (figure("h100-80g", "4.0", ""), "", 1, "printed no figure"),
        (
            figure("h100-80g", "4.0", ""),
            "print('{\"label\": \"y\", \"allocated\": 1}')",
            1,
            "printed no allocated for 'x'",
        ),
        (
            figure("h100-80g", "4.0", ""),
            "print('{\"label\": \"x\", \"allocated\"')",
            1,
            "printed an invalid line",
        ),
        (figure("h100-80g", "4.0", ""), "import time; time.sleep(600)", 1, "not finished after 3 s"),
    ] {
        let folder = cases(SOURCES, &figures, code);
        let timeout = if code.contains("sleep") { "3" } else { "300" };
        let output = published(&["--timeout", timeout, "--cases", folder.path().to_str().unwrap()]);
        assert_told(&output, status, message);
    }
}
