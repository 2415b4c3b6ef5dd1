//! Rows into a CSV.

use std::io::{self, Write};

use crate::schema::Row;

/// Writes the header with the first row, then whole lines.
pub struct RowWriter<W: Write> {
    csv: csv::Writer<W>,
}

impl<W: Write> RowWriter<W> {
    /// Rows go to `sink`, buffered; see [`RowWriter::flush`].
    pub fn new(sink: W) -> Self {
        let csv = csv::WriterBuilder::new().buffer_capacity(256 << 10).from_writer(sink);
        RowWriter { csv }
    }

    /// As [`RowWriter::new`], behind rows that `sink` has already.
    pub fn without_header(sink: W) -> Self {
        let csv = csv::WriterBuilder::new().buffer_capacity(256 << 10).has_headers(false).from_writer(sink);
        RowWriter { csv }
    }

    /// Adds a row.
    ///
    /// # Errors
    /// The sink's, when the buffer had to be written.
    pub fn write(&mut self, row: &Row<'_>) -> io::Result<()> {
        self.csv.serialize(row).map_err(io::Error::from)
    }

    /// Gives the sink all rows added so far.
    ///
    /// # Errors
    /// The sink's.
    pub fn flush(&mut self) -> io::Result<()> {
        self.csv.flush()
    }

    /// The sink.
    pub fn get_ref(&self) -> &W {
        self.csv.get_ref()
    }
}
