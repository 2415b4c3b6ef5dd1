//! Checks that the documentation agrees with the code: its tables are generated, and its links have targets.
//!
//! `MEMTRACE_BLESS=1 cargo test docs::` rewrites the tables.

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;

use crate::common::command::root;
use crate::common::commands;
use memtrace_trace::columns::{COLUMNS, ColumnType};
use memtrace_trace::{EventName, Verdict, config};

#[test]
fn the_docs_list_every_column() {
    let mut table = String::from("| column | type | meaning |\n| --- | --- | --- |\n");
    for column in COLUMNS {
        let kind = match column.kind {
            ColumnType::Int => "integer",
            ColumnType::Text => "text",
        };
        writeln!(table, "| `{}` | {kind} | {} |", column.name, escaped(column.doc)).unwrap();
    }
    assert_table("docs/trace-format.md", "columns", &table);
}

#[test]
fn the_docs_list_every_event() {
    let names: Vec<String> = EventName::ALL.iter().map(|event| format!("`{event}`")).collect();
    assert_table("docs/trace-format.md", "events", &format!("{}\n", names.join(" ")));
}

#[test]
fn the_docs_list_every_variable() {
    let mut table = String::from("| variable | default | what it does |\n| --- | --- | --- |\n");
    for variable in config::variables() {
        let default = if variable.default.is_empty() {
            "(empty)".to_owned()
        } else {
            format!("`{}`", variable.default)
        };
        writeln!(table, "| `{}` | {default} | {} |", variable.name, escaped(variable.help)).unwrap();
    }
    assert_table("docs/variables.md", "variables", &table);
}

#[test]
fn the_docs_list_every_command() {
    let mut table = String::from("| | command | what it does |\n| --- | --- | --- |\n");
    let mut last = String::new();
    for commands::Listed { group, name, about } in commands::listed() {
        let shown = if group == last { "" } else { &group };
        writeln!(table, "| {shown} | `memtrace {name}` | {} |", escaped(&about)).unwrap();
        last = group;
    }
    assert_table("docs/guide.md", "commands", &table);
}

#[test]
fn the_docs_list_every_export() {
    let mut table = String::from("| `--to` | what it is | opened by |\n| --- | --- | --- |\n");
    for export in memtrace_analysis::exports::EXPORTS {
        let open_with = export.open_with().replace("drop the file on ", "");
        writeln!(table, "| `{}` | {} | {} |", export.name(), escaped(export.about()), escaped(&open_with))
            .unwrap();
    }
    assert_table("docs/exports.md", "exports", &table);
}

fn escaped(text: &str) -> String {
    text.replace('|', "\\|")
}

/// Checks that the part of `page` between the markers `NAME` and `/NAME` is `expected`.
fn assert_table(page: &str, name: &str, expected: &str) {
    // Tests run concurrently, and several of them may rewrite the same page.
    static PAGES: Mutex<()> = Mutex::new(());
    let _guard = PAGES.lock();
    let path = root().join(page);
    let text = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = text.split_once(&format!("<!-- {name} -->\n")).expect("the opening marker");
    let (found, after) = rest.split_once(&format!("<!-- /{name} -->")).expect("the closing marker");
    if std::env::var_os("MEMTRACE_BLESS").is_some() {
        let new = format!("{before}<!-- {name} -->\n{expected}<!-- /{name} -->{after}");
        std::fs::write(&path, new).unwrap();
        return;
    }
    assert_eq!(
        found, expected,
        "the {name} in {page} are out of date: MEMTRACE_BLESS=1 cargo test docs:: writes them anew"
    );
}

#[test]
fn the_docs_explain_every_event() {
    let page = std::fs::read_to_string(root().join("docs/trace-format.md")).unwrap();
    let (_, table) = page.split_once("| event | meaning |").expect("the table of events");
    let table = table.split("\n\n").next().unwrap();
    for event in EventName::ALL {
        assert!(table.contains(&format!("`{event}`")), "docs/trace-format.md does not explain {event}");
    }
}

#[test]
fn the_docs_explain_every_verdict_on_a_holder() {
    for (page, heading) in
        [("json", "in `holders[]`"), ("trace-format", "field of a holder"), ("retained", "## What counts")]
    {
        let text = std::fs::read_to_string(root().join(format!("docs/{page}.md"))).unwrap();
        let (_, table) = text.split_once(heading).expect(heading);
        for verdict in Verdict::ALL {
            assert!(table.contains(&format!("`{verdict}`")), "docs/{page}.md does not explain {verdict}");
        }
    }
    // The answers say which verdicts mean that memory is kept without need.
    let json = std::fs::read_to_string(root().join("docs/json.md")).unwrap();
    let retained: Vec<_> = Verdict::ALL.iter().filter(|verdict| verdict.is_retained()).collect();
    let [first, second, third] = &retained[..] else { panic!("{retained:?}") };
    assert!(
        json.contains(&format!("true for `{first}`, `{second}` and `{third}`")),
        "docs/json.md: {retained:?}"
    );
}

#[test]
fn the_page_of_the_tracer_names_each_module() {
    let folder = root().join("src/tracer/preload/python/tracer");
    let page = std::fs::read_to_string(folder.join("README.md")).unwrap();
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let modules: Vec<_> = files.filter(|file| file.extension().is_some_and(|end| end == "py")).collect();
    assert!(modules.len() > 30, "{modules:?}");
    for module in modules {
        let name = module.file_stem().unwrap().to_str().unwrap();
        assert!(
            page.contains(&format!("`{name}`")),
            "src/tracer/preload/python/tracer/README.md lacks {name}"
        );
    }
}

#[test]
fn every_link_in_the_docs_leads_somewhere() {
    let top = [
        "README.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "CHANGELOG.md",
        "scripts/README.md",
        "tests/README.md",
        "tests/fixtures/README.md",
        "tests/growth/README.md",
        "tests/host/README.md",
        "tests/oom/README.md",
        "src/tracer/preload/python/tracer/README.md",
    ];
    let mut pages: Vec<_> = top.iter().map(|page| root().join(page)).collect();
    for folder in folders_below(&root().join("docs")).into_iter().chain([root().join("docs")]) {
        pages.extend(std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()));
    }
    pages.retain(|page| page.extension().is_some_and(|extension| extension == "md"));
    assert!(pages.len() > top.len(), "docs/ has pages");
    for page in pages {
        let text = std::fs::read_to_string(&page).unwrap();
        for link in links(&text) {
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() { page.clone() } else { page.parent().unwrap().join(file) };
            assert!(target.exists(), "{}: no file at {link}", page.display());
            if !anchor.is_empty() {
                let headings = std::fs::read_to_string(&target).unwrap();
                let found = headings.lines().any(|line| line.starts_with('#') && anchor_of(line) == anchor);
                assert!(found, "{}: no heading for {link}", page.display());
            }
        }
    }
}

/// A block of output in a user's page may be there only if a test compares it with what its command prints. The
/// list names the file with this test, and the number of blocks that the test compares.
#[test]
fn every_block_of_output_in_the_docs_is_compared_by_a_test() {
    let compared = [
        ("README.md", 1, "tracer/examples.rs"),
        ("docs/coming-from.md", 6, "side_by_side.rs"),
        ("docs/detail.md", 1, "tracer/api.rs"),
        ("docs/fit.md", 3, "fit.rs"),
        ("docs/guide.md", 1, "snapshot.rs"),
        ("docs/phantom.md", 1, "phantom/smi.rs"),
        ("docs/pytest.md", 1, "pytest_plugin.rs"),
        ("docs/python.md", 1, "kernel.rs"),
        ("docs/retained.md", 1, "tracer/retained.rs"),
        ("docs/serving.md", 1, "tracer/owners.rs"),
        ("docs/tutorial.md", 7, "tracer/examples.rs"),
        ("docs/whatif.md", 1, "tracer/examples.rs"),
    ];
    let is_output = |line: &&str| ["```console", "```text", "```"].contains(line);
    let mut pages = vec![root().join("README.md")];
    pages.extend(std::fs::read_dir(root().join("docs")).unwrap().map(|entry| entry.unwrap().path()));
    for page in pages.iter().filter(|page| page.extension().is_some_and(|extension| extension == "md")) {
        let name = page.strip_prefix(root()).unwrap().to_str().unwrap();
        // Its block is a drawing of the parts of the program.
        if name == "docs/architecture.md" {
            continue;
        }
        let text = std::fs::read_to_string(page).unwrap();
        // Every second line of backticks ends a block.
        let fences = text.lines().filter(|line| line.starts_with("```")).step_by(2);
        let blocks = fences.filter(is_output).count();
        let known = compared.iter().find(|(page, ..)| *page == name);
        assert_eq!(
            blocks,
            known.map_or(0, |(_, blocks, _)| *blocks),
            "{name} has blocks that no test compares"
        );
        let Some((_, _, test)) = known else { continue };
        let code = std::fs::read_to_string(root().join("tests").join(test)).unwrap();
        assert!(code.contains(name), "tests/{test} compares no block of {name}");
    }
}

#[test]
fn every_file_that_the_architecture_names_exists() {
    let page = std::fs::read_to_string(root().join("docs/architecture.md")).unwrap();
    let is_path = |text: &&str| {
        text.contains(['/', '.'])
            && (text.ends_with('/')
                || text.ends_with(".rs")
                || text.ends_with(".py")
                || text.ends_with(".md"))
            && !text.contains(['{', ' ', '*', '<'])
    };
    // Takes every second piece between backticks, which is inline code, after the code blocks were removed
    // the same way.
    let text: String = page.split("```").step_by(2).collect();
    let mut found = 0;
    for path in text.split('`').skip(1).step_by(2).filter(is_path) {
        found += 1;
        let folders = ["", "src"]
            .map(|folder| root().join(folder))
            .into_iter()
            .chain(folders_below(&root().join("src")));
        assert!(
            folders.into_iter().any(|folder| folder.join(path).exists()),
            "docs/architecture.md names {path}, and no crate has it"
        );
    }
    assert!(found > 30, "the page names {found} files");
}

#[test]
fn every_function_that_the_architecture_names_exists() {
    let page = std::fs::read_to_string(root().join("docs/architecture.md")).unwrap();
    let mut code = String::new();
    for folder in folders_below(&root().join("src")) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "rs") {
                code += &std::fs::read_to_string(path).unwrap();
            }
        }
    }
    let named = |text: &&str| text.starts_with(char::is_uppercase) && !text.contains([' ', '/']);
    let text: String = page.split("```").step_by(2).collect();
    let functions: Vec<&str> = text
        .split('`')
        .skip(1)
        .step_by(2)
        .filter(named)
        .filter_map(|text| text.split_once("::"))
        .map(|(_, name)| name)
        .collect();
    assert!(!functions.is_empty());
    for name in functions {
        let found = [format!("fn {name}("), format!("fn {name}<")].iter().any(|text| code.contains(text));
        assert!(found, "docs/architecture.md names {name}(), and no file has it");
    }
}

#[test]
fn the_docs_give_the_reason_for_the_memory_orders_of_each_file_of_the_tracer() {
    let page = std::fs::read_to_string(root().join("docs/contributors/memory-order.md")).unwrap();
    let tracer = root().join("src/tracer");
    let mut found = 0;
    for folder in folders_below(&tracer) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(&tracer).unwrap().to_str().unwrap();
            let is_source = name.ends_with(".rs") && !name.ends_with("tests.rs");
            if is_source && std::fs::read_to_string(&path).unwrap().contains("Ordering::") {
                assert!(
                    page.contains(&format!("`{name}`")),
                    "docs/contributors/memory-order.md lacks {name}"
                );
                found += 1;
            }
        }
    }
    assert!(found > 40, "{found} files have an order");
}

#[test]
fn every_test_and_script_that_the_promises_name_exists() {
    let page = std::fs::read_to_string(root().join("docs/contributors/promises.md")).unwrap();
    let mut code = String::new();
    let folders = [
        folders_below(&root().join("src")),
        folders_below(&root().join("tests")),
        vec![root().join("tests")],
    ];
    for folder in folders.concat() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "rs") {
                code += &std::fs::read_to_string(path).unwrap();
            }
        }
    }
    let mut found = 0;
    for row in page.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| ---")) {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [_, _, named] = cells[..] else { panic!("a row has three cells: {row}") };
        if named == "test" {
            continue;
        }
        let names: Vec<&str> = named.split('`').skip(1).step_by(2).collect();
        assert!(!names.is_empty(), "a promise without a test: {row}");
        for name in names {
            let exists = match name.split(' ').next() {
                Some(script) if script.starts_with("scripts/") => root().join(script).exists(),
                _ => code.contains(&format!("fn {name}(")),
            };
            assert!(exists, "docs/contributors/promises.md names {name}, which does not exist");
            found += 1;
        }
    }
    assert!(found > 40, "the page names {found} tests");
}

/// `tracer::examples` compares README's figure with a run.
#[test]
fn the_docs_agree_on_the_memory_outside_the_allocator() {
    let [readme, page] =
        ["README.md", "docs/how-it-works.md"].map(|page| std::fs::read_to_string(root().join(page)).unwrap());
    let (_, stated) = readme.split_once("| measured: ").unwrap();
    let (outside, rest) = stated.split_once(" MiB of ").unwrap();
    let (device, _) = rest.split_once(" GiB here |").unwrap();
    assert!(
        page.contains(&format!("| {outside} MiB of the {device} GiB on the device |")),
        "{outside} {device}"
    );
}

#[test]
fn the_docs_agree_with_the_comparison_on_the_errors_of_reserved() {
    let read = |page| std::fs::read_to_string(root().join(page)).unwrap().replace('\n', " ");
    let data = std::fs::read_to_string(root().join("docs/accuracy.md")).unwrap();
    let row = data.lines().find(|line| line.starts_with("| reserved | ")).unwrap();
    let cells: Vec<&str> = row.split('|').map(str::trim).collect();
    let [_, _, figures, median, ninety, largest, _] = cells[..] else { panic!("{row}") };
    let stated =
        format!("at most {largest} among the [published figures](accuracy.md), at most {ninety} for nine");
    assert!(read("docs/trust.md").contains(&stated), "docs/trust.md lacks: {stated}");
    let rounded: f64 = largest.trim_end_matches('%').parse().unwrap();
    let stated = format!(
        "the median error of {figures} published *reserved* figures is {median},   nine tenths differ by at \
         most {ninety}; the largest difference is {rounded:.0}%"
    );
    assert!(read("README.md").contains(&stated), "README.md lacks: {stated}");
}

#[test]
fn the_recording_of_the_tutorial_shows_its_blocks() {
    let script = root().join("scripts/parts/recording.py");
    let drawn = Command::new("python3").arg(script).arg(root().join("docs/tutorial.md")).output().unwrap();
    assert!(drawn.status.success(), "{}", String::from_utf8_lossy(&drawn.stderr));
    let picture = root().join("docs/gallery/tutorial.svg");
    if std::env::var_os("MEMTRACE_BLESS").is_some() {
        std::fs::write(&picture, &drawn.stdout).unwrap();
    }
    let same = std::fs::read(&picture).unwrap() == drawn.stdout;
    assert!(
        same,
        "docs/gallery/tutorial.svg is older than the page: MEMTRACE_BLESS=1 cargo test docs:: draws it"
    );
}

#[test]
fn the_causes_of_the_ooms_follow_from_their_reruns() {
    let checked =
        Command::new("python3").arg(root().join("scripts/oom-corpus")).arg("--check").output().unwrap();
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
}

/// Returns every folder below `folder`, at any depth.
fn folders_below(folder: &Path) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries
        .filter(|path| path.is_dir())
        .flat_map(|path| [vec![path.clone()], folders_below(&path)].concat())
        .collect()
}

/// Returns the targets of a page's links and pictures, except those on the web.
fn links(text: &str) -> impl Iterator<Item = &str> {
    text.split("](")
        .skip(1)
        .filter_map(|rest| rest.split_once(')'))
        .map(|(link, _)| link)
        .filter(|link| !link.starts_with("http") && !link.is_empty() && !link.contains([' ', '(', '`']))
}

/// Returns the anchor of a heading: lower case, spaces as dashes, no punctuation.
fn anchor_of(heading: &str) -> String {
    let text = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = text.chars().filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}
