//! The containers and other holders of earlier steps' memory that the traced process found, from the `mark`
//! rows with the api `retained`.
//!
//! Each search writes a row for each holder, then a row for the search. The texts of these rows are JSON
//! objects (docs/trace-format.md). A row that is not valid or lacks a field is ignored, and so is the row
//! that a search writes when it begins.

use memtrace_trace::counts::counted;
use memtrace_trace::units::Unit;
use memtrace_trace::{Api, EventName, Verdict};
use serde_json::{Value, json};

use crate::error::Result;
use crate::options::Options;
use crate::read::record::{Columns, Record, Wanted};
use crate::read::stream::TraceFile;
use crate::read::symbols::SymbolTable;
use crate::read::together::{RowReader, read_together};

/// The maximum number of searches that are kept; the latest ones are kept.
const MOST: usize = 64;
/// The maximum number of holders that are kept per search.
const MOST_HOLDERS: usize = 64;

/// Something in the traced program that holds memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The description in the terms of the program: ``list `losses` (train.py:41)``.
    pub holder: String,
    /// The search's verdict; `None` for a verdict of a newer version.
    pub verdict: Option<Verdict>,
    /// The bytes of the blocks that the holder keeps.
    pub bytes: i64,
    /// The number of tensors that the holder keeps.
    pub tensors: i64,
    /// The number of autograd graphs that the holder keeps.
    pub graphs: i64,
    /// The number of nodes in these graphs.
    pub nodes: i64,
    /// The first step in which the holder's blocks were allocated; -1 before training.
    pub first_step: Option<i64>,
    /// The last step in which the holder's blocks were allocated.
    pub last_step: Option<i64>,
    /// The number of different steps in which the holder's blocks were allocated.
    pub steps: i64,
    /// The JSON object of the row.
    value: Value,
}

/// Joins the holders that are parts of one variable and hold tensors from before training, such as the dicts
/// of a checkpoint. Alone, each part may be too small to matter. Other holders are returned unchanged.
#[must_use]
pub fn with_whole_variables(holders: &[Holder]) -> Vec<Holder> {
    let mut joined: Vec<Holder> = Vec::new();
    for holder in holders {
        let variable = holder.variable_from_before_training();
        let is_part = |whole: &&mut Holder| {
            variable.is_some()
                && whole.variable_from_before_training() == variable
                && ["file", "owner"].iter().all(|field| whole.text(field) == holder.text(field))
        };
        match joined.iter_mut().find(is_part) {
            Some(whole) => {
                let variable = variable.unwrap_or_default();
                let place = whole.holder.rsplit_once('`').map_or("", |(_, place)| place);
                whole.holder = format!("variable `{variable}`{place}");
                whole.bytes = whole.bytes.saturating_add(holder.bytes);
                whole.tensors = whole.tensors.saturating_add(holder.tensors);
            }
            None => joined.push(holder.clone()),
        }
    }
    joined
}

impl Holder {
    fn parse(value: Value) -> Option<Holder> {
        let text = |name: &str| value[name].as_str().map(str::to_owned);
        let number = |name: &str| value[name].as_i64();
        Some(Holder {
            holder: text("holder")?,
            verdict: Verdict::parse(&text("verdict")?),
            bytes: number("bytes")?,
            tensors: number("tensors")?,
            graphs: number("graphs")?,
            nodes: number("nodes")?,
            first_step: number("first_step"),
            last_step: number("last_step"),
            steps: number("steps")?,
            value,
        })
    }

    /// Returns a text field of the row, such as `kind`, `name`, `owner` or `file` (docs/trace-format.md), or
    /// an empty text if the row lacks it.
    #[must_use]
    pub fn text(&self, field: &str) -> &str {
        self.value[field].as_str().unwrap_or_default()
    }

    /// Returns the variable of a holder that is an element of it, such as `ckpt` for
    /// `ckpt['optim']['state']`. Returns `None` unless the holder's tensors are all from before training and
    /// have no graph.
    fn variable_from_before_training(&self) -> Option<&str> {
        let (variable, _) = self.text("name").split_once('[')?;
        let is_loaded =
            self.graphs == 0 && self.last_step.is_some_and(|step| step < 0) && !self.is_retained();
        (is_loaded && !variable.contains('.')).then_some(variable)
    }

    /// Returns true if the holder keeps memory without need.
    #[must_use]
    pub fn is_retained(&self) -> bool {
        self.verdict.is_some_and(Verdict::is_retained)
    }

    /// Returns the mean number of bytes that the holder keeps per step, or `None` unless it grows. If the
    /// holder keeps something only of every third step, the mean is over all steps. The steps after the last
    /// kept one do not count, because the search may run before they add to the holder.
    #[must_use]
    pub fn bytes_per_step(&self) -> Option<i64> {
        let distance = self.last_step?.checked_sub(self.first_step?.max(0))?;
        if self.verdict != Some(Verdict::Grows) || self.steps < 2 || distance < 1 || self.bytes < 0 {
            return None;
        }
        let between = (distance as f64 / (self.steps - 1) as f64).max(1.0);
        Some((self.bytes as f64 / self.steps as f64 / between) as i64)
    }

    /// Returns one line: ``3.0 MiB a step: list `losses` (train.py:41) keeps 120 autograd graphs, 360 MiB of
    /// steps 0-119``.
    #[must_use]
    pub fn line(&self, units: Unit) -> String {
        self.line_with(units, "a step")
    }

    /// Same as [`Holder::line`], but with other words for the rate: ``3.0 MiB of it a step: list `losses`
    /// ...``.
    #[must_use]
    pub fn line_with(&self, units: Unit, a_step: &str) -> String {
        let rate = self.bytes_per_step().map(|bytes| format!("{} {a_step}: ", units.show(bytes)));
        rate.unwrap_or_default() + &self.kept(units)
    }

    /// Returns [`Holder::line`] without the rate.
    #[must_use]
    pub fn kept(&self, units: Unit) -> String {
        let tensors = (self.tensors > 0 || self.graphs == 0)
            .then(|| counted(u64::try_from(self.tensors).unwrap_or(0), "tensor"));
        let graphs =
            (self.graphs > 0).then(|| counted(u64::try_from(self.graphs).unwrap_or(0), "autograd graph"));
        let kept: Vec<String> = graphs.into_iter().chain(tensors).collect();
        let steps = match (self.first_step, self.last_step) {
            (Some(_), Some(last)) if last < 0 => " from before training".to_owned(),
            (Some(first), Some(last)) if first == last => format!(" of step {first}"),
            (Some(first), Some(last)) if first < 0 => format!(" from before training to step {last}"),
            (Some(first), Some(last)) => format!(" of steps {first}-{last}"),
            _ => String::new(),
        };
        let kept = kept.join(" and ");
        let what = match self.text("kind") {
            "unused" => format!("parameters that no model has, and their state: {kept}"),
            _ => kept,
        };
        format!("{} keeps {what}, {}{steps}", self.holder, units.show(self.bytes))
    }
}

/// One search of the traced process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RetainedSearch {
    /// The number of the search in its process, from 1.
    pub number: i64,
    /// The trigger of the search: `call`, `oom`, `growth`, `exit` or `command`.
    pub why: String,
    /// The step in which the search ran.
    pub step: i64,
    /// False if the search was incomplete, so that its results are lower bounds.
    pub is_whole: bool,
    /// The reason why the search was incomplete; empty if the search was complete or its time ran out.
    pub reason: String,
    /// The duration of the search.
    pub milliseconds: i64,
    /// The holders, sorted first by whether they are retained and then by size.
    pub holders: Vec<Holder>,
}

impl RetainedSearch {
    /// Returns the holders of memory that steps left behind.
    pub fn retained(&self) -> impl Iterator<Item = &Holder> {
        self.holders.iter().filter(|holder| holder.is_retained())
    }

    /// Returns why the search was incomplete, or `None` if it was complete.
    #[must_use]
    pub fn gap(&self) -> Option<String> {
        let late = || {
            format!(
                "the search reached its time limit after {} ms and is incomplete (MEMTRACE_RETAINED)",
                self.milliseconds
            )
        };
        (!self.is_whole).then(|| match self.reason.as_str() {
            "" => late(),
            reason => format!("the search is incomplete: {reason}"),
        })
    }

    /// Returns when and why the search ran: `step 31: the program ended`.
    #[must_use]
    pub fn moment(&self) -> String {
        let why = match self.why.as_str() {
            "call" => "the program asked",
            "oom" => "out of memory",
            "growth" => "memory grew from step to step",
            "exit" => "the program ended",
            "command" => "memtrace leaks --pid asked",
            other => other,
        };
        if self.step < 0 { why.to_owned() } else { format!("step {}: {why}", self.step) }
    }

    /// Returns the fields of `--json`.
    #[must_use]
    pub fn json(&self) -> Value {
        json!({
            "search": self.number,
            "why": self.why,
            "step": self.step,
            "is_whole": self.is_whole,
            "reason": self.reason,
            "milliseconds": self.milliseconds,
            "holders": self.holders.iter().map(Holder::json).collect::<Vec<_>>(),
        })
    }
}

impl Holder {
    fn json(&self) -> Value {
        let mut value = self.value.clone();
        if let Value::Object(fields) = &mut value {
            fields.remove("walk");
            fields.insert("is_retained".to_owned(), self.is_retained().into());
            fields.insert("bytes_per_step".to_owned(), self.bytes_per_step().into());
        }
        value
    }
}

/// The columns that [`RetainedSearches::feed_row`] needs from the row of a mark.
pub const MARK_COLUMNS: Columns = Columns::of(&["api", "name", "step"]);

/// The searches of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RetainedSearches {
    /// The searches, in order of time.
    pub all: Vec<RetainedSearch>,
    pending: Vec<(i64, Holder)>,
}

/// A holder and the step of the search that found it.
pub type AtStep<'a> = (i64, &'a Holder);

impl RetainedSearches {
    /// Processes a row of any event. A mark needs the columns [`MARK_COLUMNS`].
    pub fn feed_row(&mut self, row: &Record, symbols: &SymbolTable) {
        if row.event == EventName::Mark && *symbols.get(row.api) == *Api::Retained.as_str() {
            self.feed(&symbols.get(row.name));
        }
    }

    /// Processes the text of a row. The row of a search follows the rows of its holders, so holders wait in
    /// `pending` until then.
    pub(crate) fn feed(&mut self, text: &str) {
        let Ok(value) = serde_json::from_str::<Value>(text) else { return };
        let Some(number) = value["walk"].as_i64() else { return };
        if value.get("holder").is_some() {
            if let (Some(holder), true) = (Holder::parse(value), self.pending.len() < MOST_HOLDERS) {
                self.pending.push((number, holder));
            }
            return;
        }
        let (Some(why), Some(step)) = (value["why"].as_str(), value["step"].as_i64()) else { return };
        let holders = std::mem::take(&mut self.pending).into_iter();
        let holders = holders.filter(|(of, _)| *of == number).map(|(_, holder)| holder).collect();
        if self.all.len() >= MOST {
            self.all.remove(0);
        }
        self.all.push(RetainedSearch {
            number,
            why: why.to_owned(),
            step,
            is_whole: value["is_whole"].as_bool().unwrap_or(true),
            reason: value["reason"].as_str().unwrap_or_default().to_owned(),
            milliseconds: value["ms"].as_i64().unwrap_or(0),
            holders,
        });
    }

    /// Returns the last search that found a retained holder, unless a later search found this holder to be
    /// bounded. If there is no such search, returns the last search.
    #[must_use]
    pub fn to_report(&self) -> Option<&RetainedSearch> {
        let stands = |(index, search): &(usize, &RetainedSearch)| {
            let later = || self.all[index + 1..].iter().flat_map(|search| &search.holders);
            search
                .retained()
                .any(|holder| !later().any(|other| other.holder == holder.holder && !other.is_retained()))
        };
        let found = self.all.iter().enumerate().rev().find(stands);
        found.map(|(_, search)| search).or_else(|| self.all.last())
    }

    /// Returns the holder that is not retained, but has gained the most bytes from its first search to the last
    /// one, in both searches and with their steps: memory that a CUDA graph needs or, with `is_replaced`, also a
    /// variable to which each step assigns a larger tensor.
    #[must_use]
    pub fn larger(&self, is_replaced: bool) -> Option<(AtStep<'_>, AtStep<'_>)> {
        let (last, earlier) = self.all.split_last()?;
        let counts = |holder: &&Holder| {
            let is_recent = is_replaced && holder.verdict == Some(Verdict::Recent);
            !holder.is_retained() && (is_recent || !holder.text("needed_by").is_empty())
        };
        let pairs = last.holders.iter().filter(counts).filter_map(|after| {
            let same = |search: &'_ RetainedSearch| {
                search.holders.iter().position(|before| before.holder == after.holder)
            };
            let (search, at) = earlier.iter().find_map(|search| Some((search, same(search)?)))?;
            let before = &search.holders[at];
            (before.bytes < after.bytes).then_some(((search.step, before), (last.step, after)))
        });
        pairs.max_by_key(|((_, before), (_, after))| after.bytes - before.bytes)
    }

    /// Returns the last search at an OOM, which the report `oom` shows, or [`Self::to_report`] if there is
    /// none.
    #[must_use]
    pub fn at_oom(&self) -> Option<&RetainedSearch> {
        self.last_for("oom")
    }

    /// Returns the last search that a command requested, even if another search followed, or
    /// [`Self::to_report`] if no command requested one.
    #[must_use]
    pub fn asked_for(&self) -> Option<&RetainedSearch> {
        self.last_for("command")
    }

    fn last_for(&self, why: &str) -> Option<&RetainedSearch> {
        self.all.iter().rfind(|search| search.why == why).or_else(|| self.to_report())
    }

    /// Reads the searches of a trace.
    ///
    /// # Errors
    /// When the trace cannot be read.
    pub fn read(trace: &TraceFile, options: &Options) -> Result<RetainedSearches> {
        let mut found = RetainedSearches::default();
        read_together(trace, options, &SymbolTable::default(), &mut [&mut found])?;
        Ok(found)
    }
}

impl RowReader for RetainedSearches {
    fn wanted(&self) -> Wanted {
        Wanted::all_events(Columns::of(&["seq"])).plus(EventName::Mark, MARK_COLUMNS)
    }

    fn feed(&mut self, row: &Record, symbols: &SymbolTable) {
        self.feed_row(row, symbols);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holder(walk: i64, verdict: &str, bytes: i64) -> String {
        json!({
            "walk": walk, "holder": "list `losses` (train.py:41)", "verdict": verdict, "bytes": bytes, "tensors": 0,
            "graphs": 120, "nodes": 960, "first_step": 0, "last_step": 119, "steps": 120,
        })
        .to_string()
    }

    #[test]
    fn retained_parts_of_a_variable_from_before_training_are_joined() {
        let part = |name: &str, step: i64, bytes: i64| {
            let row = json!({
                "walk": 1, "holder": format!("dict `{name}` (resume.py:26)"), "verdict": "recent", "bytes": bytes,
                "tensors": 195, "graphs": 0, "nodes": 0, "first_step": step, "last_step": step, "steps": 1,
                "name": name, "owner": "", "file": "/resume.py",
            });
            Holder::parse(row).unwrap()
        };
        let holders = [
            part("ckpt['optim']['state'][*]['exp_avg']", -1, 1000),
            part("other['model']", -1, 800),
            part("ckpt['model']", -1, 700),
            // The first holder has tensors from step 0, and the other two are attributes of an object: none
            // of them is joined.
            part("ckpt['outputs']", 0, 600),
            part("self.cache['model']", -1, 500),
            part("self.cache['state']", -1, 400),
        ];
        let joined = with_whole_variables(&holders);
        let found: Vec<_> = joined.iter().map(|holder| (holder.bytes, holder.tensors)).collect();
        assert_eq!(found, [(1700, 390), (800, 195), (600, 195), (500, 195), (400, 195)]);
        assert_eq!(joined[0].holder, "variable `ckpt` (resume.py:26)");
        assert_eq!(joined[1].holder, "dict `other['model']` (resume.py:26)");
    }

    #[test]
    fn retained_rows_become_searches_and_lines() {
        let mut searches = RetainedSearches::default();
        searches.feed(&holder(1, "grows", 360 << 20));
        searches.feed(&holder(1, "old", 1));
        searches.feed(r#"{"walk":1,"why":"exit","step":120,"is_whole":true,"ms":7}"#);
        searches.feed(r#"{"walk":2,"why":"call","step":121}"#);
        let [first, second] = &searches.all[..] else { panic!("{searches:?}") };
        assert_eq!((first.holders.len(), first.retained().count(), second.holders.len()), (2, 1, 0));
        assert_eq!(searches.to_report(), Some(first));
        assert_eq!(
            first.holders[0].line(Unit::default()),
            "3.00 MiB a step: list `losses` (train.py:41) keeps 120 autograd graphs, 360.00 MiB of steps 0-119"
        );
        assert_eq!(first.moment(), "step 120: the program ended");
        // 8 MiB of the eight steps 0-7 are 1 MiB a step. Four of the steps 0-6 with 8 MiB are 2 MiB per kept
        // step, one every second step: also 1 MiB a step. If all are from one step, there is no rate.
        let of = |steps: i64, last: i64| {
            let value = json!({
                "walk": 1, "holder": "x", "verdict": "grows", "bytes": 8 << 20, "tensors": 8, "graphs": 0, "nodes": 0,
                "first_step": 0, "last_step": last, "steps": steps,
            });
            Holder::parse(value).and_then(|holder| holder.bytes_per_step())
        };
        assert_eq!((of(8, 7), of(4, 6), of(2, 0)), (Some(1 << 20), Some(1 << 20), None));
        // A later search finds that the list is bounded: the earlier search is no longer reported.
        searches.feed(&holder(3, "window", 360 << 20));
        searches.feed(r#"{"walk":3,"why":"call","step":122}"#);
        assert_eq!(searches.to_report().map(|search| search.number), Some(3));
        // A search that a command requested is followed by a search because memory grew: the command still
        // gets its own search.
        searches.feed(r#"{"walk":4,"why":"command","step":123}"#);
        searches.feed(&holder(5, "grows", 360 << 20));
        searches.feed(r#"{"walk":5,"why":"growth","step":124}"#);
        assert_eq!(searches.to_report().map(|search| search.number), Some(5));
        assert_eq!(searches.asked_for().map(|search| search.number), Some(4));
    }

    #[test]
    fn retained_rows_of_a_damaged_or_hostile_trace_are_left_out() {
        let mut searches = RetainedSearches::default();
        for text in [
            "",
            "{",
            "[]",
            "7",
            "{}",
            r#"{"walk":"1","why":"call","step":1}"#,
            r#"{"walk":1,"holder":7}"#,
            r#"{"walk":1,"holder":"x","verdict":"grows","bytes":1e300,"tensors":1,"graphs":0,"nodes":0,"steps":1}"#,
            r#"{"walk":1,"why":1,"step":1}"#,
        ] {
            searches.feed(text);
        }
        assert_eq!(searches, RetainedSearches::default());
        let extreme = json!({
            "walk": 1, "holder": "x", "verdict": "grows", "bytes": i64::MIN, "tensors": -1, "graphs": i64::MAX, "nodes": 0,
            "first_step": i64::MIN, "last_step": i64::MAX, "steps": 2,
        });
        searches.feed(&extreme.to_string());
        searches.feed(r#"{"walk":1,"why":"call","step":1}"#);
        assert_eq!(searches.all[0].holders[0].bytes_per_step(), None);
        assert!(searches.all[0].holders[0].line(Unit::default()).contains("keeps"));
        for number in 0..200 {
            searches.feed(&format!(r#"{{"walk":{number},"why":"call","step":1}}"#));
        }
        assert_eq!(searches.all.len(), MOST);
    }
}
