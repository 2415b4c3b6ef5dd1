//! The rows of a digest, written as a Parquet file.

use std::sync::Arc;

use parquet::basic::{Compression, LogicalType, Repetition, Type as Physical, ZstdLevel};
use parquet::column::writer::ColumnWriter;
use parquet::data_type::ByteArray;
use parquet::errors::{ParquetError, Result};
use parquet::file::metadata::KeyValue;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::types::Type;

use super::columns::{ColumnType, DigestColumn, RowKind};
use crate::exports::out::Out;

/// A value of a row. A column that a row does not set is null.
#[derive(Clone, Debug)]
enum Value {
    Int(i64),
    Float(f64),
    Text(String),
}

/// A row of the digest.
#[derive(Clone, Debug, Default)]
pub(super) struct DigestRow(Vec<(DigestColumn, Value)>);

impl DigestRow {
    /// Returns a row of this kind in which all other columns are null.
    pub(super) fn new(kind: RowKind) -> DigestRow {
        DigestRow::default().text(DigestColumn::Kind, kind.name())
    }

    /// Sets `column` to an integer.
    pub(super) fn int(mut self, column: DigestColumn, value: i64) -> DigestRow {
        self.0.push((column, Value::Int(value)));
        self
    }

    /// Sets `column` to a count. A count above `i64::MAX` is stored as `i64::MAX`.
    pub(super) fn count(self, column: DigestColumn, value: u64) -> DigestRow {
        self.int(column, i64::try_from(value).unwrap_or(i64::MAX))
    }

    /// Sets `column` to a floating-point number.
    pub(super) fn float(mut self, column: DigestColumn, value: f64) -> DigestRow {
        self.0.push((column, Value::Float(value)));
        self
    }

    /// Sets `column` to a text.
    pub(super) fn text(mut self, column: DigestColumn, value: impl Into<String>) -> DigestRow {
        self.0.push((column, Value::Text(value.into())));
        self
    }

    fn get(&self, column: DigestColumn) -> Option<&Value> {
        self.0.iter().find(|(known, _)| *known == column).map(|(_, value)| value)
    }
}

/// The number of rows in a row group, which is the maximum number of rows in memory.
const ROW_GROUP: usize = 1 << 15;

/// Writes `rows` to `out`, with `meta`, which is the JSON of the trace's meta row. Returns the output and the
/// number of rows.
pub(super) fn write(rows: impl Iterator<Item = DigestRow>, meta: String, out: Out) -> Result<(Out, u64)> {
    let fields: Result<Vec<_>> = DigestColumn::ALL
        .iter()
        .map(|(_, name, kind, _)| {
            let (physical, logical) = match kind {
                ColumnType::Int => (Physical::INT64, None),
                ColumnType::Float => (Physical::DOUBLE, None),
                ColumnType::Text => (Physical::BYTE_ARRAY, Some(LogicalType::String)),
            };
            Type::primitive_type_builder(name, physical)
                .with_repetition(Repetition::OPTIONAL)
                .with_logical_type(logical)
                .build()
                .map(Arc::new)
        })
        .collect();
    let schema = Type::group_type_builder("memtrace_digest").with_fields(fields?).build()?;
    let properties = WriterProperties::builder()
        .set_compression(Compression::ZSTD(ZstdLevel::default()))
        .set_created_by(concat!("memtrace ", env!("CARGO_PKG_VERSION")).to_owned())
        .set_key_value_metadata(Some(vec![KeyValue::new("memtrace".to_owned(), meta)]))
        .build();
    let mut writer = SerializedFileWriter::new(out, Arc::new(schema), Arc::new(properties))?;
    let mut rows = rows.peekable();
    let mut count = 0;
    while rows.peek().is_some() {
        let group: Vec<DigestRow> = rows.by_ref().take(ROW_GROUP).collect();
        count += group.len() as u64;
        write_group(&mut writer, &group)?;
    }
    Ok((writer.into_inner()?, count))
}

fn write_group(writer: &mut SerializedFileWriter<Out>, rows: &[DigestRow]) -> Result<()> {
    let mut group = writer.next_row_group()?;
    for (column, ..) in DigestColumn::ALL {
        let Some(mut open) = group.next_column()? else { break };
        let values: Vec<Option<&Value>> = rows.iter().map(|row| row.get(*column)).collect();
        let levels: Vec<i16> = values.iter().map(|value| i16::from(value.is_some())).collect();
        let present = values.into_iter().flatten();
        match open.untyped() {
            ColumnWriter::Int64ColumnWriter(writer) => {
                let ints =
                    present.filter_map(|value| if let Value::Int(int) = value { Some(*int) } else { None });
                writer.write_batch(&ints.collect::<Vec<_>>(), Some(&levels), None)?;
            }
            ColumnWriter::DoubleColumnWriter(writer) => {
                let floats = present
                    .filter_map(|value| if let Value::Float(float) = value { Some(*float) } else { None });
                writer.write_batch(&floats.collect::<Vec<_>>(), Some(&levels), None)?;
            }
            ColumnWriter::ByteArrayColumnWriter(writer) => {
                let texts = present.filter_map(|value| {
                    if let Value::Text(text) = value { Some(ByteArray::from(text.as_str())) } else { None }
                });
                writer.write_batch(&texts.collect::<Vec<_>>(), Some(&levels), None)?;
            }
            _ => return Err(ParquetError::General("a column of another type".to_owned())),
        }
        open.close()?;
    }
    group.close()?;
    Ok(())
}
