//! `docs/json.schema.json`: the types of every answer's fields, as the reports give them on all recorded
//! traces. A field that changes its type or is missing fails here, because programs of users rely on it.
//!
//! `MEMTRACE_BLESS=1 cargo test --release json_schema::` writes the file anew.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use memtrace_analysis::options::Options;
use memtrace_analysis::read::input::Input;
use memtrace_analysis::reports;
use serde_json::{Map, Value, json};

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
fn is_map(name: &str, object: &Map<String, Value>) -> bool {
    let is_field = |key: &String| {
        key.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_')
    };
    MAPS.contains(&name)
        || !object.keys().all(is_field)
        || object.keys().any(|key| key.starts_with(|first: char| first.is_ascii_digit()))
}

impl Shape {
    /// Adds a value of the field `name`. `may_be_null` says of a field whether docs/json.md allows null.
    fn see(&mut self, name: &str, value: &Value, may_be_null: &dyn Fn(&str) -> bool) {
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
                items.iter().for_each(|item| shape.see(name, item, may_be_null));
            }
            Value::Object(object) if is_map(name, object) || self.map_values.is_some() => {
                let shape = self.map_values.get_or_insert_default();
                object.values().for_each(|value| shape.see("", value, may_be_null));
            }
            Value::Object(object) => {
                self.objects += 1;
                for (key, value) in object {
                    let field = self.fields.entry(key.clone()).or_default();
                    field.see(key, value, may_be_null);
                    if may_be_null(key) {
                        field.types.insert("null", ());
                    }
                    *self.had.entry(key.clone()).or_default() += 1;
                }
            }
            _ => {}
        }
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

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
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

/// Returns true if docs/json.md has a remark with the word null right after the field, in the report's row or
/// among the fields of every answer.
fn says_null(page: &str, report: &str, field: &str) -> bool {
    let rows = page
        .lines()
        .filter(|line| line.starts_with(&format!("| `{report}` ")) || line.starts_with("| `phantom` "));
    rows.flat_map(|row| row.split(&format!("`{field}`")).skip(1).collect::<Vec<_>>()).any(|rest| {
        let remark = rest.trim_start().strip_prefix('(').map(|rest| rest.split(')').next().unwrap_or(rest));
        remark.is_some_and(|remark| remark.contains("null"))
    })
}

#[test]
fn json_schema_has_the_fields_of_every_answer() {
    let page = std::fs::read_to_string(root().join("docs/json.md")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    eventful(folder.path());
    let mut schemas = Map::new();
    for report in reports::with_views() {
        let mut shape = Shape::default();
        let all = answers(report, folder.path());
        assert!(!all.is_empty(), "{} has no answer on any fixture", report.name());
        let may_be_null = |field: &str| says_null(&page, report.name(), field);
        all.iter().for_each(|answer| shape.see("", answer, &may_be_null));
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
