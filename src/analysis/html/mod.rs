//! `memtrace report`: the report page, a single HTML file that opens from disk and makes no network request.
//!
//! A trace is read twice. The first reading finds the peaks, the time span of the page and the minimum size
//! of the allocations to keep. The second collects the content of the page: the minimum and maximum of each
//! total in 131,072 time buckets, memory by category and module, the largest allocations, the rows around the
//! peak and the OOM, and the curve for each advice. The size of a page is bounded, however long the trace is.

mod advice;
mod blocks;
mod groups;
mod host;
mod modules;
mod pack;
mod process;
mod strings;
mod track;

use std::io::{self, Write};

use serde_json::{Value, json};

use crate::error::Result;
use crate::options::Options;
use crate::read::input::Input;
use crate::read::stream::TraceFile;
use crate::render::footer::Footer;
use crate::reports::RunVictims;
use crate::selection::select;
use crate::state::group::category;
use pack::Pack;
use process::FirstReading;
use strings::Strings;

/// The number of time buckets of the device with the highest peak. All other devices share about the same
/// number.
const BUCKETS: usize = 131_072;
/// The minimum number of time buckets of a device.
const FEWEST_BUCKETS: usize = 2048;

const HTML: &str = include_str!("page.html");
const CSS: &str = include_str!("page.css");
/// The JavaScript modules of the page. The page has them as one script ([`joined_code`]), in this order: the code
/// outside functions uses only what modules before it export. `scripts/lint javascript` checks that each name is
/// declared or imported.
const SCRIPTS: &[&str] = &[
    include_str!("js/data.js"),
    include_str!("js/format.js"),
    include_str!("js/colours.js"),
    include_str!("js/state.js"),
    include_str!("js/headline.js"),
    include_str!("js/axes.js"),
    include_str!("js/pins.js"),
    include_str!("js/overview.js"),
    include_str!("js/search.js"),
    include_str!("js/curve.js"),
    include_str!("js/host.js"),
    include_str!("js/advice.js"),
    include_str!("js/input.js"),
    include_str!("js/live.js"),
    include_str!("js/segments.js"),
    include_str!("js/charts.js"),
    include_str!("js/steps.js"),
    include_str!("js/histograms.js"),
    include_str!("js/ranks.js"),
    include_str!("js/compare.js"),
    include_str!("js/main.js"),
];

/// The page of one run, or of two runs compared.
///
/// ```
/// use memtrace_analysis::html::Page;
/// use memtrace_analysis::options::Options;
/// use memtrace_analysis::read::input::Input;
///
/// # let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/gpt");
/// let page = Page::read(&[Input::open(&folder)?], &Options::default())?;
/// let mut file = Vec::new();
/// page.write(&mut file).expect("memory takes all bytes");
/// assert!(file.starts_with(b"<!doctype html>"));
/// # Ok::<(), memtrace_analysis::Error>(())
/// ```
pub struct Page {
    about: Value,
    pack: Pack,
    title: String,
    headline: String,
}

impl Page {
    /// Reads the traces of `runs`.
    ///
    /// # Errors
    /// When a trace cannot be read, or a selector matches nothing.
    pub fn read(runs: &[Input], options: &Options) -> Result<Page> {
        let runs = &runs.iter().map(|run| select(run, options, true)).collect::<Result<Vec<Input>>>()?;
        let (mut pack, mut strings) = (Pack::default(), Strings::default());
        let mut firsts = Vec::new();
        for run in runs {
            let mut footer = Footer::of([run]);
            let mut processes = Vec::new();
            for trace in &run.traces {
                let first = FirstReading::read(trace, options)?;
                footer.add_with_device(
                    trace,
                    &first.replayed,
                    first.devices(options).first().map(|(ordinal, _)| *ordinal),
                );
                footer.note_inference(&first.replayed);
                processes.push((trace, first));
            }
            firsts.push((run, footer, processes));
        }
        let tracks: usize =
            firsts.iter().flat_map(|(_, _, all)| all).map(|(_, first)| first.devices(options).len()).sum();
        let fullest = fullest(&firsts, options);
        let mut all = Vec::new();
        let mut headline = String::new();
        for (number, (run, footer, processes)) in firsts.into_iter().enumerate() {
            let mut json = Vec::new();
            let victims = RunVictims::new(&run.traces, options);
            for (trace, first) in processes {
                let whole = fullest.as_ref().is_some_and(|(path, _)| *path == trace.path);
                if whole && number == 0 || headline.is_empty() {
                    headline = first.headline(trace, options);
                }
                let others = (BUCKETS / tracks.max(1)).clamp(FEWEST_BUCKETS, BUCKETS / 4);
                let kept = (blocks::MOST / tracks.max(1)).max(500);
                let size = |ordinal| {
                    let whole =
                        fullest.as_ref().is_some_and(|(path, o)| *path == trace.path && *o == ordinal);
                    if whole { (BUCKETS, blocks::MOST) } else { (others, kept) }
                };
                let own =
                    first.second_reading((trace, run), &victims, options, size, &mut pack, &mut strings)?;
                json.extend(own);
            }
            all.push(json!({
                "path": run.path.display().to_string(),
                "lost": footer.lost,
                "unattributed_share": footer.unattributed_share(),
                "unattributed_share_ever": footer.unattributed_share_ever(),
                "notes": footer.all_notes().collect::<Vec<_>>(),
                "tracks": json,
            }));
        }
        let about = json!({
            "memtrace": env!("CARGO_PKG_VERSION"),
            "strings": strings.names,
            "categories": memtrace_trace::Category::ALL.iter().map(|c| category(*c)).collect::<Vec<_>>(),
            "runs": all,
        });
        let title = runs.first().map_or(String::new(), |run| run.path.display().to_string());
        Ok(Page { about, pack, title, headline })
    }

    /// Returns the peak and its largest categories, in one line.
    #[must_use]
    pub fn headline(&self) -> &str {
        &self.headline
    }

    /// Writes the page to `out`.
    ///
    /// # Errors
    /// When `out` cannot be written.
    pub fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        // The template is split at its placeholders first, so a placeholder in the text of a trace has no
        // effect.
        let mut rest = HTML;
        while let Some((before, after)) = rest.split_once("<!--{") {
            out.write_all(before.as_bytes())?;
            let (place, after) = after.split_once("}-->").unwrap_or((after, ""));
            match place {
                "title" => out.write_all(escaped(&self.title).as_bytes())?,
                "headline" => out.write_all(escaped(&self.headline).as_bytes())?,
                "style" => out.write_all(CSS.as_bytes())?,
                "data" => self.pack.write(&self.about, out)?,
                "script" => {
                    for script in SCRIPTS {
                        out.write_all(joined_code(script).as_bytes())?;
                    }
                }
                other => unreachable!("page.html has an unknown placeholder {other:?}"),
            }
            rest = after;
        }
        out.write_all(rest.as_bytes())
    }
}

/// Returns the code of a module without its imports and the word `export`, which one joined script does not need.
fn joined_code(module: &str) -> String {
    let mut code = String::with_capacity(module.len());
    let mut is_import = false;
    for line in module.split_inclusive('\n') {
        is_import |= line.starts_with("import ");
        if is_import {
            is_import = !line.ends_with(";\n");
        } else {
            code.push_str(line.strip_prefix("export ").unwrap_or(line));
        }
    }
    code
}

/// Escapes a text for HTML.
fn escaped(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            c => safe.push(c),
        }
    }
    safe
}

type Processes<'a> = Vec<(&'a Input, Footer, Vec<(&'a TraceFile, FirstReading)>)>;

/// Returns the file and device with the highest peak of the first run.
fn fullest(firsts: &Processes<'_>, options: &Options) -> Option<(std::path::PathBuf, i32)> {
    let (_, _, processes) = firsts.first()?;
    let mut best: Option<(i64, &TraceFile, i32)> = None;
    for (trace, first) in processes {
        for (ordinal, metric) in first.devices(options) {
            let peak = first.replayed.replay.find(ordinal).map_or(0, |device| device.peak(metric).bytes);
            if best.is_none_or(|(highest, ..)| peak > highest) {
                best = Some((peak, trace, ordinal));
            }
        }
    }
    best.map(|(_, trace, ordinal)| (trace.path.clone(), ordinal))
}

#[cfg(test)]
mod tests {
    use memtrace_trace::{EventName, Row};

    use super::*;
    use crate::options::Window;
    use crate::testing::TraceBuilder;

    /// Returns the name that a line outside functions declares, if any.
    fn declared(line: &str) -> Option<&str> {
        let line = line.strip_prefix("async ").unwrap_or(line);
        let (word, rest) = line.split_once(' ')?;
        let is_declaration = ["function", "class", "const", "let"].contains(&word);
        let is_of_name = |c: char| c.is_alphanumeric() || c == '_' || c == '$';
        is_declaration.then(|| rest.split(|c| !is_of_name(c)).next().unwrap_or_default())
    }

    #[test]
    fn no_name_is_declared_by_two_modules_of_the_page() {
        let mut names = std::collections::BTreeSet::new();
        for module in SCRIPTS {
            let code = joined_code(module);
            for line in code.lines() {
                assert!(!line.starts_with("import ") && !line.starts_with("export "), "{line}");
                if let Some(name) = declared(line) {
                    assert!(!name.is_empty() && !line.ends_with(','), "one name in a declaration: {line}");
                    assert!(names.insert(name.to_owned()), "{name}");
                }
            }
        }
        assert!(names.contains("main") && names.contains("$"), "{names:?}");
        assert_eq!(
            joined_code("// A\nimport {\n  b,\n} from \"./b.js\";\n\nexport let a = b;\n"),
            "// A\n\nlet a = b;\n"
        );
    }

    /// Returns the JSON of the first track of the page of a trace.
    fn track_of(trace: TraceBuilder, options: &Options) -> Value {
        tracks_of(trace, options)[0].clone()
    }

    /// Returns the JSON of the tracks of the page of a trace.
    fn tracks_of(trace: TraceBuilder, options: &Options) -> Value {
        let place = std::env::temp_dir().join(format!(
            "memtrace-page-{}-{:?}.csv",
            std::process::id(),
            std::thread::current().id()
        ));
        std::fs::write(&place, trace.finish()).unwrap();
        let page = Page::read(&[Input::open(&place).unwrap()], options);
        std::fs::remove_file(&place).unwrap();
        page.unwrap().about["runs"][0]["tracks"].clone()
    }

    #[test]
    fn the_page_of_many_ooms_has_the_last_one() {
        let mut trace = TraceBuilder::default();
        trace.alloc(1 << 20, Row::default());
        let mut last = 0;
        for _ in 0..600 {
            last = trace.change(Row { event: EventName::Oom, device: 0, ..Row::default() }, [0; 3]);
        }
        let track = track_of(trace, &Options::default());
        let ooms = track["ooms"].as_array().unwrap();
        assert_eq!((ooms.len(), ooms.last().unwrap()["seq"].as_i64()), (500, Some(last)));
    }

    #[test]
    fn the_page_of_a_step_counts_the_blocks_of_that_step() {
        let mut trace = TraceBuilder::default();
        let kept = trace.alloc(1 << 10, Row { step: 0, ..Row::default() });
        for step in 0..4 {
            let row = Row { step, ..Row::default() };
            let block = trace.alloc(1 << 20, row);
            trace.free(block, 1 << 20, row);
        }
        trace.free(kept, 1 << 10, Row { step: 0, ..Row::default() });
        let window = Window { from_step: 2, to_step: 2, ..Window::default() };
        let track = track_of(trace, &Options { window, ..Options::default() });
        // The kept block is live in the step, too.
        assert_eq!((&track["allocations"], &track["sizes"]), (&json!(2), &json!([[20, 1, 1 << 20]])));
        assert_eq!(track["blocks"]["id"][1], json!(2));
    }

    #[test]
    fn the_page_counts_what_happened_on_its_device_in_its_window() {
        let counts = |window: Window| {
            let mut trace = TraceBuilder::default();
            for step in 0..3 {
                trace.alloc(2 << 20, Row { step, ..Row::default() });
                let other = Row { step, device: 1, ..Row::default() };
                trace.alloc(1 << 20, other);
                trace.change(Row { event: EventName::Oom, ..other }, [0; 3]);
                trace.change(Row { event: EventName::Brief, delta_bytes: 512, ..other }, [512, 512, 0]);
            }
            let tracks = tracks_of(trace, &Options { window, ..Options::default() });
            let names = ["device", "oom_count", "brief", "rows", "duration_ns"];
            let of_track = |track: &Value| Value::from(names.map(|name| track[name].clone()).to_vec());
            tracks.as_array().unwrap().iter().map(of_track).collect::<Value>()
        };
        assert_eq!(counts(Window::default()), json!([[0, 0, false, 14, 13_000], [1, 3, true, 14, 13_000]]));
        let second = Window { from_step: 1, to_step: 1, ..Window::default() };
        assert_eq!(counts(second), json!([[0, 0, false, 4, 3000], [1, 1, true, 4, 3000]]));
    }

    #[test]
    fn the_detail_of_a_program_without_torch_has_the_memory_in_use() {
        let mut trace = TraceBuilder::default();
        let row = Row {
            event: EventName::ExtAlloc,
            device: 0,
            alloc_id: 9,
            delta_bytes: 1 << 20,
            ..Row::default()
        };
        trace.change(row, [0; 3]);
        let track = track_of(trace, &Options::default());
        let of = |name: &str| track["detail"][name][1].clone();
        assert_eq!((&track["metric"], of("used")), (&json!("device used"), of("allocated")));
        assert_ne!(track["detail"]["used"], track["detail"]["allocated"]);
    }

    #[test]
    fn the_page_escapes_text() {
        assert_eq!(escaped("</script>\"'&"), "&lt;/script&gt;&quot;&#39;&amp;");
    }
}
