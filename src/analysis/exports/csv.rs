//! The export `csv`: every row of a process in one plain file, which is itself a trace.
//!
//! The parts of a rotated trace are joined, and a compressed trace is decompressed. Thus tools that read only
//! plain rows can read the file.

use std::sync::Arc;

use memtrace_trace::columns::TextKeys;
use memtrace_trace::csv::RowWriter;
use memtrace_trace::text::{original_text, safe_text};
use memtrace_trace::{EventName, Meta, Row};

use super::export::{Export, Job, OutputKind};
use crate::error::{Error, Result};
use crate::options::Options;
use crate::read::record::{Columns, Record};
use crate::read::symbols::{Symbol, SymbolTable};
use crate::render::numbers::counted;
use crate::state::categories::KnownCategories;
use crate::state::replay::Metric;
use crate::state::replay_trace::replay_trace;

/// The export `--to csv`.
pub(super) struct Csv;

impl Export for Csv {
    fn name(&self) -> &'static str {
        "csv"
    }

    fn about(&self) -> &'static str {
        "Every row in one plain CSV that is a trace itself: parts joined"
    }

    fn takes_host(&self) -> bool {
        true
    }

    fn output_kind(&self, _: &Options) -> OutputKind {
        OutputKind::FileEach(".rows.csv")
    }

    fn open_with(&self) -> &'static str {
        "python -c \"import pandas, sys; print(pandas.read_csv(sys.argv[1]))\" FILE"
    }

    fn write(&self, job: &mut Job<'_>) -> Result<()> {
        let trace = job.trace()?;
        let failed = |source| Error::from(memtrace_trace::Error::Io { path: job.place.to_owned(), source });
        let mut writer = RowWriter::new(job.create()?);
        let meta = Meta { journal: String::new(), ..trace.meta.clone() }
            .to_json()
            .map_err(|why| failed(why.into()))?;
        let mut texts = Texts::default();
        let mut failure = None;
        let mut rows = 0_u64;
        let replayed = replay_trace(
            trace,
            Columns::ALL,
            job.options,
            Metric::Allocated,
            KnownCategories::default(),
            |record, replay| {
                let is_first = rows == 0;
                let wanted =
                    job.options.device.is_none_or(|only| only == record.device) && replay.in_window();
                if failure.is_some() || !(wanted || is_first) {
                    return;
                }
                rows += 1;
                let row = texts.row(record, &replay.symbols);
                let name = if is_first && row.event == EventName::Meta { &meta } else { row.name };
                failure = writer.write(&Row { name, ..row }).err();
            },
        )?;
        if let Some(failure) = failure {
            return Err(failed(failure));
        }
        let out = writer.into_inner().map_err(failed)?;
        job.add_to_footer(trace, &replayed);
        job.finish_file(out, counted(rows, "row"))
    }
}

/// The texts of the symbols seen so far, by the index of the symbol, escaped as in the file. `None` for a
/// symbol that no row has used yet.
#[derive(Default)]
struct Texts(Vec<Option<Arc<str>>>);

impl Texts {
    /// Returns the row to write for a record, after adding the texts of the record's symbols.
    fn row(&mut self, record: &Record, symbols: &SymbolTable) -> Row<'_> {
        let Record { api, source, op, module, phase, name, dtype, shape, .. } = *record;
        [api, source, op, module, phase, name, dtype, shape]
            .into_iter()
            .for_each(|symbol| self.learn(symbol, symbols));
        row(record, self)
    }

    fn get(&self, symbol: Symbol) -> &str {
        self.0.get(symbol.index()).and_then(Option::as_deref).unwrap_or_default()
    }

    fn learn(&mut self, symbol: Symbol, symbols: &SymbolTable) {
        let at = symbol.index();
        if self.0.len() <= at {
            self.0.resize(at + 1, None);
        }
        self.0[at].get_or_insert_with(|| {
            let text = symbols.get(symbol);
            // The reader removed the quote that protects a text that looks like a formula, so add the quote
            // again.
            let safe = safe_text(&text);
            if original_text(&safe) == &*text && safe != *text { safe.into() } else { text }
        });
    }
}

macro_rules! row {
    ($($block:ident($($cache:ident)?) { $(
        $(#[$doc:meta])+
        $name:ident: $type:ident = $default:expr, $shape:ident, $reading:ident, $writing:ident $(($of:ident))?;
    )+ })+) => {
        /// Returns the row of a record whose texts are in `texts`.
        fn row<'a>(record: &Record, texts: &'a Texts) -> Row<'a> {
            Row { keys: TextKeys::default(), $($($name: value!(record texts $name $type),)+)+ }
        }
    };
}

macro_rules! value {
    ($record:ident $texts:ident $name:ident text) => {
        $texts.get($record.$name)
    };
    ($record:ident $texts:ident $name:ident $type:ident) => {
        $record.$name
    };
}

memtrace_trace::columns!(row);
