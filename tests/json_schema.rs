//! `docs/json.schema.json`: the types of every answer's fields, as the reports give them on all recorded
//! traces. A field that changes its type or is missing fails here, because programs of users rely on it.
//! `docs/json.md` must describe each field, and no other; it also decides which fields may be null.
//!
//! `MEMTRACE_BLESS=1 cargo test --release json_schema::` writes the file anew.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use memtrace_analysis::options::Options;
use memtrace_analysis::read::input::Input;
use memtrace_analysis::reports;
use serde_json::{Map, Value, json};

use crate::common::command::root;

/// What was seen of a value: its types, the fields of objects, the values of maps, and the items of lists.
#[derive(Default)]
struct Shape {
    types: BTreeMap<&'static str, ()>,
    fields: BTreeMap<String, Shape>,
    /// The number of objects that were seen, and for each field how many of them had it.
    objects: usize,
    had: BTreeMap<String, usize>,
    map_values: Option<Box<Shape>>,
    items: Option<Box<Shape>>,
}

/// The objects whose keys are names of the traced program or of memtrace's lists, such as categories.
const MAPS: &[&str] = &[
    "events",
    "at_peak_by_category_bytes",
    "by_category_bytes",
    "peak_allocated_bytes_by_step",
    "states",
    "found",
    "latency_ns",
];

/// A field whose objects have keys such as `cuda:0` or `Parameter` is a map, too.
fn is_map(path: &str, object: &Map<String, Value>) -> bool {
    let name = path.rsplit('.').next().unwrap_or(path).trim_end_matches("[]");
    let is_field = |key: &String| {
        key.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_')
    };
    MAPS.contains(&name)
        || !object.keys().all(is_field)
        || object.keys().any(|key| key.starts_with(|first: char| first.is_ascii_digit()))
}

impl Shape {
    /// Adds a value of the field at `path`. `may_be_null` says of a field whether docs/json.md allows null.
    fn see(&mut self, path: &str, value: &Value, may_be_null: &dyn Fn(&str) -> bool) {
        let kind = match value {
            Value::Null => "null",
            Value::Bool(_) => "boolean",
            Value::Number(number) if number.is_f64() => "number",
            Value::Number(_) => "integer",
            Value::String(_) => "string",
            Value::Array(_) => "array",
            Value::Object(_) => "object",
        };
        self.types.insert(kind, ());
        match value {
            Value::Array(items) => {
                let shape = self.items.get_or_insert_default();
                items.iter().for_each(|item| shape.see(&format!("{path}[]"), item, may_be_null));
            }
            Value::Object(object) if is_map(path, object) || self.map_values.is_some() => {
                let shape = self.map_values.get_or_insert_default();
                object.values().for_each(|value| shape.see(&format!("{path}.*"), value, may_be_null));
            }
            Value::Object(object) => {
                self.objects += 1;
                for (key, value) in object {
                    let field = self.fields.entry(key.clone()).or_default();
                    let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                    field.see(&path, value, may_be_null);
                    if may_be_null(&path) {
                        field.types.insert("null", ());
                    }
                    *self.had.entry(key.clone()).or_default() += 1;
                }
            }
            _ => {}
        }
    }

    /// Returns true if an answer has a field at `path`, or if no answer shows the fields of its object.
    fn may_have(&self, path: &str) -> bool {
        let Some((first, rest)) = path.split_once('.') else {
            let name = path.trim_end_matches("[]");
            return self.objects == 0 || self.fields.contains_key(name);
        };
        let name = first.trim_end_matches("[]");
        let mut shape = if name == "*" { self.map_values.as_deref() } else { self.fields.get(name) };
        if first.ends_with("[]") {
            shape = shape.and_then(|shape| shape.items.as_deref());
        }
        self.objects + usize::from(name == "*") == 0 || shape.is_none_or(|shape| shape.may_have(rest))
    }

    /// Returns the JSON Schema. A field that one object lacked is not required, and one that was always null
    /// may be anything.
    fn schema(&self) -> Value {
        let mut types: Vec<&str> =
            self.types.keys().copied().filter(|kind| self.types.len() > 1 || *kind != "null").collect();
        if types.contains(&"number") {
            types.retain(|kind| *kind != "integer");
        }
        let mut schema = match types[..] {
            [] => json!({}),
            [one] => json!({"type": one}),
            _ => json!({"type": types}),
        };
        if let Some(items) = &self.items {
            schema["items"] = items.schema();
        }
        if let Some(values) = &self.map_values {
            schema["additionalProperties"] = values.schema();
        } else if self.objects > 0 {
            let fields: Map<String, Value> =
                self.fields.iter().map(|(name, shape)| (name.clone(), shape.schema())).collect();
            let always: Vec<&String> =
                self.had.iter().filter(|(_, count)| **count == self.objects).map(|(name, _)| name).collect();
            schema["properties"] = Value::Object(fields);
            schema["required"] = json!(always);
        }
        schema
    }
}

/// Writes a copy of the trace of `tests/fixtures/gpt` whose run had stand-ins for ranks, injected faults,
/// guesses and refused calls. These fields are empty in the recorded traces.
fn eventful(folder: &Path) {
    let packed = std::fs::File::open(root().join("tests/fixtures/gpt/host.r0.1.csv.gz")).unwrap();
    let text = std::io::read_to_string(flate2::read::MultiGzDecoder::new(packed)).unwrap();
    let phantom = "\"\"phantom\"\":{";
    let ranks = format!("{phantom}\"\"ranks\"\":\"\"0\"\",\"\"ranks_of\"\":8,");
    let changed = text.replacen(phantom, &ranks, 1).trim_end().to_owned()
        + " invented_reads=2 acted_at=train.py:12 stand_in_answers=3 guessed=cuGuess refused=cuRefused injected=oom@step:3 \
           not_injected=ecc@step:9\n";
    assert!(changed.contains("ranks_of"));
    std::fs::write(folder.join("host.r0.1.csv"), changed).unwrap();
}

/// Returns the answers of a report on all recorded traces, and on the changed one in `eventful`, as `--json`
/// prints them.
fn answers(report: &'static dyn reports::Report, eventful: &Path) -> Vec<Value> {
    let traces = std::fs::read_dir(root().join("tests/fixtures")).unwrap().flatten();
    let mut names: Vec<PathBuf> = traces.map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
    names.sort();
    names.push(eventful.to_owned());
    let mut options = Options { top: Some(20), ..Options::default() };
    for flag in report.flags().iter().filter(|flag| flag.value.is_some() && !flag.default.is_empty()) {
        options.values.insert(flag.name, flag.default.to_owned());
    }
    let limits = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(limits.path(), "[total]\nallocated = \"1m\"\n").unwrap();
    if report.name() == "budget" {
        options.values.insert("limits", limits.path().to_str().unwrap().to_owned());
    }
    if report.name() == "ops" {
        options.values.insert("series", String::new());
    }
    // A view is called by what asks for it, such as `advise --batch x2`.
    let mut words = report.name().split_whitespace().skip(1).peekable();
    while let Some(flag) = words.next() {
        let value = words.next_if(|word| !word.starts_with("--")).unwrap_or_default();
        options.values.insert(flag.trim_start_matches("--"), value.to_owned());
    }
    let open = |path: &Path| Input::open(path).unwrap();
    names
        .iter()
        .filter_map(|path| {
            let inputs: Vec<Input> = report.inputs().iter().map(|_| open(path)).collect();
            report.run(&inputs, &options).ok().map(|answer| answer.to_json(report.name()))
        })
        .collect()
}

/// The tables of docs/json.md: for each section, the fields with their paths, such as `processes[].rank`, and what
/// they mean.
struct Page {
    sections: BTreeMap<String, Vec<(String, String)>>,
}

impl Page {
    /// Reads the page. A table `| in `X` | meaning |` has the fields of the object `X`, or of several objects. A
    /// table with another header, such as `| value of `by` |`, has no fields.
    fn read() -> Page {
        let text = std::fs::read_to_string(root().join("docs/json.md")).unwrap();
        let (mut sections, mut section) = (BTreeMap::<_, Vec<_>>::new(), "");
        let (mut objects, mut has_shared) = (Vec::new(), false);
        for line in text.lines() {
            if let Some(title) = line.strip_prefix("## ") {
                (section, has_shared) = (title, title == SHARED);
            } else if let (Some(title), true) = (line.strip_prefix("### "), has_shared) {
                section = title;
            }
            let Some((first, meaning)) = line.strip_prefix("| ").and_then(|row| row.split_once(" | ")) else {
                continue;
            };
            let names: Vec<&str> = first.split('`').skip(1).step_by(2).collect();
            if meaning == "meaning |" {
                objects = match first {
                    "field" => vec![String::new()],
                    _ if first.starts_with("in ") => names.iter().map(|name| format!("{name}.")).collect(),
                    _ => Vec::new(),
                };
            } else if let [name] = names[..] {
                let rows = objects.iter().map(|object| (format!("{object}{name}"), meaning.to_owned()));
                sections.entry(section.trim_matches('`').to_owned()).or_default().extend(rows);
            }
        }
        Page { sections }
    }

    /// Returns what the page says of a field, in the report's section, in the section that the meaning of an
    /// object links to, or among the fields of every answer.
    fn meaning(&self, section: &str, path: &str) -> Option<&str> {
        let rows = self.sections.get(section)?;
        let exact = rows.iter().find(|(known, _)| rest(known, path) == Some(""));
        let linked = || {
            rows.iter().find_map(|(known, meaning)| {
                let (_, link) = meaning.split_once("(#")?;
                let title = self.sections.keys().find(|title| link.starts_with(&anchor(title)))?;
                let inside = rest(known, path)?.trim_start_matches("[]").trim_start_matches(".*");
                self.meaning(title, inside.strip_prefix('.')?)
            })
        };
        exact.map(|(_, meaning)| meaning.as_str()).or_else(linked)
    }
}

/// The section with the objects that several reports have. Each has a section of its own below.
const SHARED: &str = "Objects of several reports";

/// Returns the part of `path` after `known`, in which `.*` is any name.
fn rest<'a>(known: &str, path: &'a str) -> Option<&'a str> {
    let mut parts = known.split(".*");
    let mut path = path.strip_prefix(parts.next()?)?;
    for part in parts {
        let name = path.strip_prefix('.')?;
        path = name[name.find(['.', '[']).unwrap_or(name.len())..].strip_prefix(part)?;
    }
    Some(path)
}

/// Returns the anchor of a heading, with the bracket that ends a link.
fn anchor(title: &str) -> String {
    format!("{})", title.to_lowercase().replace(' ', "-"))
}

#[test]
fn json_schema_has_the_fields_of_every_answer() {
    let page = Page::read();
    let folder = tempfile::tempdir().unwrap();
    eventful(folder.path());
    let mut schemas = Map::new();
    for report in reports::with_views() {
        let mut shape = Shape::default();
        let all = answers(report, folder.path());
        assert!(!all.is_empty(), "{} has no answer on any fixture", report.name());
        let may_be_null = |path: &str| {
            let meaning = page.meaning(report.name(), path).or_else(|| page.meaning("Every answer", path));
            let meaning = meaning.unwrap_or_else(|| panic!("docs/json.md lacks {path} of {}", report.name()));
            meaning.contains("null")
        };
        all.iter().for_each(|answer| shape.see("", answer, &may_be_null));
        for (path, meaning) in page.sections.get(report.name()).into_iter().flatten() {
            let is_optional = meaning.starts_with("with `--");
            assert!(is_optional || shape.may_have(path), "{} has no {path}: docs/json.md", report.name());
        }
        schemas.insert(report.name().to_owned(), shape.schema());
    }
    let found = json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "The answers of memtrace REPORT --json",
        "description": "One schema for each report and view under $defs, from the answers on the recorded traces. A list or an \
                        object without a schema was empty there. Fields are only ever added.",
        "$defs": schemas,
    });
    let path = root().join("docs/json.schema.json");
    if std::env::var_os("MEMTRACE_BLESS").is_some() {
        std::fs::write(&path, format!("{}\n", serde_json::to_string_pretty(&found).unwrap())).unwrap();
    }
    let wanted: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    for (report, schema) in found["$defs"].as_object().unwrap() {
        assert_eq!(
            schema, &wanted["$defs"][report],
            "{report}: run with MEMTRACE_BLESS=1 and look at the difference"
        );
    }
    assert_eq!(found, wanted);
}
