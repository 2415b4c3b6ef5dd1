//! The marks of a program, and the ends of its ranges, as moments of a trace.
//!
//! `memtrace.mark` and `torch.cuda.nvtx.mark` write a row `mark`. `memtrace.range` and
//! `torch.cuda.nvtx.range` write a pair of rows. The library's own marks and the calls of modules do not
//! count.

use std::ops::ControlFlow;

use memtrace_trace::{Api, EventName};

use crate::error::Result;
use crate::options::Options;
use crate::read::record::{Columns, Record, Wanted};
use crate::read::stream::TraceFile;
use crate::read::symbols::{Symbol, SymbolTable};
use crate::state::replay::has_current_step;

/// The columns that [`is_mark`] and [`MarkFinder::feed`] need.
pub const COLUMNS: Columns = Columns::of(&["api", "name"]);

/// Returns true if `row` is a mark of the program or the end of one of its ranges.
#[must_use]
pub fn is_mark(row: &Record, symbols: &SymbolTable) -> bool {
    matches!(row.event, EventName::Mark | EventName::RangeEnd)
        && [Api::Nvtx, Api::Memtrace].iter().any(|api| *symbols.get(row.api) == *api.as_str())
}

/// The start of the marks with which the pytest plugin names the running test. After a test, no name follows.
const TEST: &str = "test:";

/// The columns that [`running_test`] needs of a mark.
pub(crate) const TEST_COLUMNS: Columns = Columns::of(&["api", "name"]);

/// Returns the test of pytest that runs from this row on, if the row is the mark of a test's start or end.
/// After the end, the test is [`Symbol::NONE`].
pub(crate) fn running_test(row: &Record, symbols: &SymbolTable) -> Option<Symbol> {
    if row.event != EventName::Mark || *symbols.get(row.api) != *Api::Memtrace.as_str() {
        return None;
    }
    let test = symbols.get(row.name).strip_prefix(TEST)?.trim().to_owned();
    Some(if test.is_empty() { Symbol::NONE } else { symbols.intern(&test) })
}

/// The mark that a user names: `NAME` for the last mark of this name, `NAME#3` for the third.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MarkName(pub String);

impl MarkName {
    /// Returns the name without its number, and the number, which is `None` in a name without `#` and a
    /// number.
    #[must_use]
    pub fn split(&self) -> (&str, Option<u64>) {
        match self.0.rsplit_once('#') {
            Some((name, number)) if !name.is_empty() => match number.parse() {
                Ok(number) => (name, Some(number)),
                Err(_) => (&self.0, None),
            },
            _ => (&self.0, None),
        }
    }
}

/// Finds the rows of a [`MarkName`].
#[derive(Debug)]
pub struct MarkFinder<'a> {
    whole: &'a str,
    name: &'a str,
    number: Option<u64>,
    /// The number of marks of this name so far.
    pub count: u64,
}

impl<'a> MarkFinder<'a> {
    /// Creates a finder for `mark`.
    #[must_use]
    pub fn new(mark: &'a MarkName) -> MarkFinder<'a> {
        let (name, number) = mark.split();
        MarkFinder { whole: &mark.0, name, number, count: 0 }
    }

    /// Processes the next row, with [`COLUMNS`]. Returns true if the row is the wanted mark or, without a
    /// number, any mark of this name.
    pub fn feed(&mut self, row: &Record, symbols: &SymbolTable) -> bool {
        if !is_mark(row, symbols) {
            return false;
        }
        let text = symbols.get(row.name);
        if *text == *self.name {
            self.count += 1;
            return self.number.is_none_or(|number| number == self.count);
        }
        // The text after `#` may also be part of the name, so compare the whole name, too.
        *text == *self.whole
    }
}

/// The row of a mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MarkRow {
    /// The `seq` of the row.
    pub seq: i64,
    /// The time since the start of the trace, in ns.
    pub ts_ns: i64,
}

/// Returns the last row of `mark` in the window of `options`, or `None` if there is no such row.
///
/// # Errors
/// When the trace cannot be read.
pub fn find(trace: &TraceFile, mark: &MarkName, options: &Options) -> Result<Option<MarkRow>> {
    const ROW: Columns = Columns::of(&["seq", "ts_ns", "step"]);
    let wanted = Wanted::all_events(ROW).plus(EventName::Mark, COLUMNS).plus(EventName::RangeEnd, COLUMNS);
    let symbols = SymbolTable::default();
    let mut finder = MarkFinder::new(mark);
    let (mut found, mut step, mut ts_ns) = (None, -1, i64::MIN);
    trace.read(wanted, options.lenient, &symbols, |row| {
        if has_current_step(row.event) {
            step = row.step;
        }
        ts_ns = ts_ns.max(row.ts_ns);
        if finder.feed(row, &symbols) && options.window.has(ts_ns, step) {
            found = Some(MarkRow { seq: row.seq, ts_ns });
        }
        ControlFlow::Continue(())
    })?;
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_a_mark_follows_its_name() {
        let split = |text: &str| {
            let name = MarkName(text.to_owned());
            let (name, number) = name.split();
            (name.to_owned(), number)
        };
        assert_eq!(split("after forward"), ("after forward".to_owned(), None));
        assert_eq!(split("after forward#3"), ("after forward".to_owned(), Some(3)));
        assert_eq!(split("a#b#12"), ("a#b".to_owned(), Some(12)));
        assert_eq!(split("#3"), ("#3".to_owned(), None));
        assert_eq!(split("a#-1"), ("a#-1".to_owned(), None));
        assert_eq!(split("a#99999999999999999999"), ("a#99999999999999999999".to_owned(), None));
    }
}
