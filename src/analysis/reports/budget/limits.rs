//! Parses the file of limits, and matches names against its patterns.

use memtrace_trace::units::parse_bytes;
use memtrace_trace::{Category, text};

use crate::selection::{matches, nearest_names};
use crate::state::replay::Metric;

/// The memory that a limit applies to, which is the section of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LimitSubject {
    Total(Metric),
    /// Resident memory of the process on the host.
    Host,
    Module,
    Category,
    Phase,
}

impl LimitSubject {
    pub(super) const fn name(self) -> &'static str {
        match self {
            LimitSubject::Total(_) => "total",
            LimitSubject::Host => "host",
            LimitSubject::Module => "module",
            LimitSubject::Category => "category",
            LimitSubject::Phase => "phase",
        }
    }

    /// Returns the name of the section in the file, without brackets. Messages use it as a plural noun, too.
    pub(super) const fn section(self) -> &'static str {
        match self {
            LimitSubject::Total(_) => "total",
            LimitSubject::Host => "host",
            LimitSubject::Module => "modules",
            LimitSubject::Category => "categories",
            LimitSubject::Phase => "phases",
        }
    }
}

/// One limit of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Limit {
    pub(super) subject: LimitSubject,
    /// The name in the file, or a pattern of names, such as `GPT.h.*`.
    pub(super) name: String,
    pub(super) bytes: i64,
    /// True if it is not an error when the limit matches no name.
    pub(super) optional: bool,
}

impl Limit {
    /// Returns true if the limit applies to `name`. In the path of a module, `*` matches characters within
    /// one level, and `**` matches across levels.
    pub(super) fn takes(&self, name: &str) -> bool {
        let level_end = if self.subject == LimitSubject::Module { Some('.') } else { None };
        matches(&self.name, name, level_end)
    }
}

/// Parses the text of a file of limits. The error names the entry that is wrong and the valid form.
pub(super) fn parse(text: &str) -> Result<Vec<Limit>, String> {
    let table: toml::Table = text.parse().map_err(|error: toml::de::Error| error.to_string())?;
    let mut limits = Vec::new();
    for (section, entries) in &table {
        let entries = entries.as_table().ok_or_else(|| format!("{section}: expected a section of limits"))?;
        for (name, value) in entries {
            let subject = subject(section, name)?;
            let (bytes, optional) = amount(value).map_err(|why| format!("[{section}] {name}: {why}"))?;
            limits.push(Limit { subject, name: name.clone(), bytes, optional });
        }
    }
    if limits.is_empty() {
        return Err("the file has no limits".to_owned());
    }
    Ok(limits)
}

fn subject(section: &str, name: &str) -> Result<LimitSubject, String> {
    let subject = match (section, name) {
        ("total", "allocated") => LimitSubject::Total(Metric::Allocated),
        ("total", "active") => LimitSubject::Total(Metric::Active),
        ("total", "reserved") => LimitSubject::Total(Metric::Reserved),
        ("total", "used") => LimitSubject::Total(Metric::Used),
        ("total", name) => {
            return Err(format!("[total] {name}: expected allocated, active, reserved or used"));
        }
        ("host", "rss") => LimitSubject::Host,
        ("host", name) => return Err(format!("[host] {name}: expected rss")),
        ("modules", _) => LimitSubject::Module,
        ("categories", _) => LimitSubject::Category,
        ("phases", _) => LimitSubject::Phase,
        (section, _) => {
            return Err(format!("[{section}]: expected total, host, modules, categories or phases"));
        }
    };
    let known = || Category::ALL.iter().map(|category| category.as_str()).filter(|name| *name != text::NONE);
    if subject == LimitSubject::Category && !known().any(|known| matches(name, known, None)) {
        return Err(format!("[categories] {name}: expected one of {}", nearest_names(known(), name)));
    }
    Ok(subject)
}

/// Returns the bytes of a limit, and whether the limit is optional.
fn amount(value: &toml::Value) -> Result<(i64, bool), String> {
    let form = "expected a size such as \"2g\", or { limit = \"2g\", optional = true }";
    match value {
        toml::Value::Integer(bytes) if *bytes >= 0 => Ok((*bytes, false)),
        toml::Value::String(size) => Ok((parse_bytes(size)?, false)),
        toml::Value::Table(entries) => {
            if let Some(other) = entries.keys().find(|key| !matches!(key.as_str(), "limit" | "optional")) {
                return Err(format!("{other}: {form}"));
            }
            let (bytes, _) = match entries.get("limit") {
                Some(limit) if !limit.is_table() => amount(limit)?,
                _ => return Err(format!("limit is missing: {form}")),
            };
            match entries.get("optional") {
                None => Ok((bytes, false)),
                Some(toml::Value::Boolean(optional)) => Ok((bytes, *optional)),
                Some(other) => Err(format!("optional = {other}: expected true or false")),
            }
        }
        other => Err(format!("{form}, got {other}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budget_reads_limits_and_names_what_is_wrong() {
        let limits = parse("[total]\nallocated = \"1g\"\n[modules]\n\"GPT.h\" = 512\n").unwrap();
        assert_eq!(limits.len(), 2);
        let layers =
            Limit { subject: LimitSubject::Module, name: "GPT.h".to_owned(), bytes: 512, optional: false };
        assert!(limits.contains(&layers));
        let optional = parse("[modules]\n\"GPT.h\" = { limit = 512, optional = true }\n").unwrap();
        assert_eq!(optional, [Limit { optional: true, ..layers }]);
        for (text, part) in [
            ("", "no limits"),
            ("[total]\nmost = 1", "allocated"),
            ("[layers]\na = 1", "modules"),
            ("[host]\npss = 1", "expected rss"),
            ("[modules]\na = true", "expected a size"),
            ("[modules]\na = -1", "expected a size"),
            ("[modules]\na = \"big\"", "expected a size"),
            ("[modules]\na = { optional = true }", "limit is missing"),
            ("[modules]\na = { limit = 1, optional = 1 }", "expected true or false"),
            ("[modules]\na = { limit = { limit = 1 } }", "limit is missing"),
            ("[modules]\na = { limit = 1, most = 1 }", "most: expected a size"),
            ("[categories]\nactivations = 1", "expected one of activation, "),
            ("[modules", "TOML"),
        ] {
            let why = parse(text).unwrap_err();
            assert!(why.contains(part), "{text}: {why}");
        }
    }

    #[test]
    fn budget_patterns_stay_in_one_level_unless_they_have_two_stars() {
        let level = |pattern: &str, name: &str| matches(pattern, name, Some('.'));
        assert!(
            level("GPT.h.*", "GPT.h.0") && !level("GPT.h.*", "GPT.h.0.mlp") && !level("GPT.h.*", "GPT.h")
        );
        assert!(level("GPT.**.fc?", "GPT.h.0.mlp.fc1") && level("**", "") && !level("GPT", "GPT.h"));
        assert!(matches("*gradient", "gradient", None) && matches("*", "a.b", None));
        let hostile = format!("{}b", "*a".repeat(200));
        assert!(!level(&hostile, &"a".repeat(2000)));
    }
}
