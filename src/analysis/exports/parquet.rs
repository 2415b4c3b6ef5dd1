//! The export `parquet`: all rows and columns, with one file for each process in a folder `rank=N`.
//!
//! DuckDB, Polars and Spark can read the run of a whole cluster from this folder in one line. The files have
//! no column for the rank, because these tools read the rank from the path (Hive partitioning). The metadata
//! of each file also has the JSON of the meta row, under `memtrace`.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memtrace_trace::columns::{COLUMNS, Column, ColumnType, Shape};
use parquet::basic::{Compression, Encoding, LogicalType, Repetition, Type as Physical, ZstdLevel};
use parquet::column::writer::ColumnWriter;
use parquet::data_type::ByteArray;
use parquet::errors::ParquetError;
use parquet::file::metadata::{KeyValue, ParquetMetaDataReader};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::types::{ColumnPath, Type};

use super::export::{Export, Job, OutputKind, trace_stem};
use super::out::{Complete, Out};
use crate::error::{Error, Result};
use crate::options::Options;
use crate::profile::flow_categories;
use crate::read::record::{Columns, Record};
use crate::read::stream::TraceFile;
use crate::read::symbols::{Symbol, SymbolTable};
use crate::render::numbers::counted;
use crate::state::replay::Metric;
use crate::state::replay_trace::replay_trace;

/// The export `--to parquet`.
pub(super) struct Parquet;

/// The number of rows in a row group. This is the maximum number of rows in memory, and DuckDB's unit of work
/// for a thread.
const ROW_GROUP: usize = 122_880;

/// The column whose values are in the names of the folders.
const PARTITION: &str = "rank";

impl Export for Parquet {
    fn name(&self) -> &'static str {
        "parquet"
    }

    fn about(&self) -> &'static str {
        "Every row for DuckDB, Polars and Spark: zstd, partitioned by rank"
    }

    fn takes_host(&self) -> bool {
        true
    }

    fn output_kind(&self, _: &Options) -> OutputKind {
        OutputKind::Folder(".parquet")
    }

    fn open_with(&self) -> &'static str {
        "duckdb -c \"from read_parquet('FOLDER/**/*.parquet', hive_partitioning = true)\""
    }

    fn write(&self, job: &mut Job<'_>) -> Result<()> {
        let old = old_files(job.place)?;
        let mut files = Vec::new();
        for trace in &job.input.traces {
            let name = format!("{}.parquet", trace_stem(&trace.path));
            let path = job.place.join(format!("{PARTITION}={}", trace.meta.rank)).join(name);
            files.push(self.file(job, trace, &path)?);
        }
        // The new export replaces the old one only when it is complete.
        let replaced: HashSet<_> = files.iter().map(|(file, _)| file.path().to_owned()).collect();
        for (file, rows) in files {
            let path = file.path().to_owned();
            let bytes = file.publish()?;
            job.written.push((path, bytes, counted(rows, "row")));
        }
        remove(job.place, old.into_iter().filter(|old| !replaced.contains(old)))
    }
}

impl Parquet {
    /// Writes the file of a trace under a temporary name. Returns it with the number of its rows.
    fn file(&self, job: &mut Job<'_>, trace: &TraceFile, path: &Path) -> Result<(Complete, u64)> {
        let failed = |error: ParquetError| -> Error {
            memtrace_trace::Error::Io { path: path.to_owned(), source: std::io::Error::other(error) }.into()
        };
        let out = Out::new_beside(path, job.whole.files())?;
        let mut file = File::new(out, trace).map_err(failed)?;
        let mut failure = None;
        let replayed = replay_trace(
            trace,
            Columns::ALL,
            job.options,
            Metric::Allocated,
            flow_categories(trace, job.options)?,
            |row, replay| {
                let wanted = job.options.device.is_none_or(|only| only == row.device);
                if failure.is_none() && wanted && replay.in_window() {
                    failure = file.add(row, &replay.symbols).err();
                }
            },
        )?;
        job.add_to_footer(trace, &replayed);
        if let Some(failure) = failure {
            return Err(failed(failure));
        }
        let rows = file.rows;
        let out = file.finish(&replayed.symbols).map_err(failed)?;
        Ok((out.complete()?, rows))
    }
}

/// Returns the files of an earlier export in the folder. Returns an error if the folder contains any other
/// file.
fn old_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let io = |source| Error::from(memtrace_trace::Error::Io { path: folder.to_owned(), source });
    if !folder.exists() {
        return Ok(Vec::new());
    }
    let children = |folder: &Path| -> Result<Vec<PathBuf>> {
        let entries = std::fs::read_dir(folder).map_err(io)?;
        entries.map(|entry| entry.map(|entry| entry.path()).map_err(io)).collect()
    };
    let mut old = Vec::new();
    for child in children(folder)? {
        let name = child.file_name().unwrap_or_default().to_string_lossy().into_owned();
        // A symbolic link may lead to files that memtrace did not write.
        let is_own = child.is_dir() && !child.is_symlink();
        let is_own = is_own && name.starts_with(&format!("{PARTITION}="));
        let files = if is_own { children(&child)? } else { Vec::new() };
        if !is_own || !files.iter().all(|file| is_export(file) || is_partial(file)) {
            return Err(Error::usage(format!(
                "{} contains {name}, which is not from an earlier export: name another folder with -o",
                folder.display()
            )));
        }
        old.extend(files);
    }
    Ok(old)
}

/// Removes files of an earlier export, and the folders that are then empty, also those of an export that failed.
fn remove(folder: &Path, files: impl Iterator<Item = PathBuf>) -> Result<()> {
    let io = |source| Error::from(memtrace_trace::Error::Io { path: folder.to_owned(), source });
    for file in files {
        std::fs::remove_file(&file).map_err(io)?;
    }
    for child in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        // This fails if the folder has a file of the new export.
        std::fs::remove_dir(child.path()).ok();
    }
    Ok(())
}

/// Returns true for a file that an interrupted export has left.
fn is_partial(file: &Path) -> bool {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    name.starts_with('.') && name.ends_with(super::out::PARTIAL)
}

/// Returns true if memtrace wrote this file. Other tools also name folders `rank=N`.
fn is_export(file: &Path) -> bool {
    let is_file = std::fs::symlink_metadata(file).is_ok_and(|found| found.is_file());
    let read = || ParquetMetaDataReader::new().parse_and_finish(&std::fs::File::open(file).ok()?).ok();
    let has_our_name = |by: &str| by.starts_with("memtrace ");
    is_file && read().is_some_and(|found| found.file_metadata().created_by().is_some_and(has_our_name))
}

/// A function that returns the value of one column of a row.
#[derive(Clone, Copy)]
enum Get {
    Int(fn(&Record) -> i64),
    Text(fn(&Record) -> Symbol),
    /// For a column with an enum, whose values are written as texts.
    Word(fn(&Record) -> &'static str),
}

macro_rules! get {
    ($name:ident text) => {
        Get::Text(|row| row.$name)
    };
    ($name:ident EventName) => {
        Get::Word(|row| row.$name.as_str())
    };
    ($name:ident Category) => {
        Get::Word(|row| row.$name.as_str())
    };
    ($name:ident $int:ident) => {
        Get::Int(|row| i64::from(row.$name))
    };
}

macro_rules! accessors {
    ($($block:ident($($cache:ident)?) { $(
        $(#[$doc:meta])+
        $name:ident: $type:ident = $default:expr, $shape:ident, $reading:ident, $writing:ident $(($of:ident))?;
    )+ })+) => {
        /// The accessors of [`COLUMNS`], in the same order.
        const GET: [Get; COLUMNS.len()] = [$($(get!($name $type)),+),+];
    };
}

memtrace_trace::columns!(accessors);

/// Returns the columns of the file: the CSV's columns without the rank.
fn exported() -> impl Iterator<Item = (&'static Column, Get)> {
    COLUMNS.iter().zip(GET).filter(|(column, _)| column.name != PARTITION)
}

/// A file that is being written, with the rows of its next group.
struct File {
    writer: SerializedFileWriter<Out>,
    group: Vec<Record>,
    rows: u64,
    symbols: Cache,
}

impl File {
    fn new(out: Out, trace: &TraceFile) -> std::result::Result<File, ParquetError> {
        let column = |column: &Column| {
            let physical =
                if column.kind == ColumnType::Int { Physical::INT64 } else { Physical::BYTE_ARRAY };
            let logical = (column.kind == ColumnType::Text).then_some(LogicalType::String);
            Type::primitive_type_builder(column.name, physical)
                .with_repetition(Repetition::REQUIRED)
                .with_logical_type(logical)
                .build()
                .map(Arc::new)
        };
        let columns =
            exported().map(|(described, _)| column(described)).collect::<std::result::Result<Vec<_>, _>>()?;
        let schema = Type::group_type_builder("memtrace").with_fields(columns).build()?;
        let meta = serde_json::to_string(&trace.meta).unwrap_or_default();
        let mut properties = WriterProperties::builder()
            .set_compression(Compression::ZSTD(ZstdLevel::default()))
            .set_created_by(concat!("memtrace ", env!("CARGO_PKG_VERSION")).to_owned())
            .set_key_value_metadata(Some(vec![KeyValue::new("memtrace".to_owned(), meta)]));
        // The numbers in these columns rise, so their differences take less space than the numbers.
        for (rising, _) in exported().filter(|(column, _)| column.shape == Shape::Rising) {
            let path = ColumnPath::from(rising.name);
            properties = properties
                .set_column_dictionary_enabled(path.clone(), false)
                .set_column_encoding(path, Encoding::DELTA_BINARY_PACKED);
        }
        let writer = SerializedFileWriter::new(out, Arc::new(schema), Arc::new(properties.build()))?;
        Ok(File { writer, group: Vec::new(), rows: 0, symbols: Cache::default() })
    }

    fn add(&mut self, row: &Record, symbols: &SymbolTable) -> std::result::Result<(), ParquetError> {
        self.group.push(*row);
        self.rows += 1;
        if self.group.len() == ROW_GROUP { self.flush(symbols) } else { Ok(()) }
    }

    fn flush(&mut self, symbols: &SymbolTable) -> std::result::Result<(), ParquetError> {
        if self.group.is_empty() {
            return Ok(());
        }
        let mut group = self.writer.next_row_group()?;
        let (mut numbers, mut words) = (Vec::new(), Vec::new());
        for (_, get) in exported() {
            let Some(mut column) = group.next_column()? else { break };
            match (column.untyped(), get) {
                (ColumnWriter::Int64ColumnWriter(writer), Get::Int(get)) => {
                    numbers.clear();
                    numbers.extend(self.group.iter().map(get));
                    writer.write_batch(&numbers, None, None)?;
                }
                (ColumnWriter::ByteArrayColumnWriter(writer), get) => {
                    words.clear();
                    words.extend(self.group.iter().map(|row| match get {
                        Get::Int(_) => ByteArray::from(""),
                        Get::Text(get) => self.symbols.get(get(row), symbols),
                        Get::Word(get) => ByteArray::from(get(row)),
                    }));
                    writer.write_batch(&words, None, None)?;
                }
                _ => return Err(ParquetError::General("a column of another type".to_owned())),
            }
            column.close()?;
        }
        group.close()?;
        self.group.clear();
        Ok(())
    }

    fn finish(mut self, symbols: &SymbolTable) -> std::result::Result<Out, ParquetError> {
        self.flush(symbols)?;
        self.writer.into_inner()
    }
}

/// The text of each symbol, stored once and shared by all its rows.
#[derive(Default)]
struct Cache(Vec<Option<ByteArray>>);

impl Cache {
    fn get(&mut self, symbol: Symbol, symbols: &SymbolTable) -> ByteArray {
        let at = symbol.index();
        if self.0.len() <= at {
            self.0.resize(at + 1, None);
        }
        self.0[at].get_or_insert_with(|| ByteArray::from(&*symbols.get(symbol))).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parquet_columns_have_the_types_of_the_schema() {
        assert_eq!(exported().count(), COLUMNS.len() - 1);
        for (column, get) in exported() {
            assert_eq!(matches!(get, Get::Int(_)), column.kind == ColumnType::Int, "{}", column.name);
        }
    }
}
