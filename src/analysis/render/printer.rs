//! The text of a report: styled lines and aligned tables, with colour only on a terminal.

use std::borrow::Cow;
use std::fmt::Write as _;

use memtrace_trace::text::printable;

/// The style of a text on a terminal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Style {
    /// No style.
    #[default]
    Plain,
    /// Bold: the main result.
    Strong,
    /// Dim: secondary text.
    Faint,
    /// Bold red: an error or a problem.
    Alarm,
    /// A command to type.
    Command,
    /// One of [`HUES`].
    Hue(u8),
}

/// The colours of Okabe and Ito, which colour-blind people can distinguish: blue, orange, green, purple, sky
/// blue, vermilion, yellow, grey. As escape codes of the palette of 256 colours.
pub const HUES: [&str; 8] = [
    "\x1b[38;5;32m",
    "\x1b[38;5;214m",
    "\x1b[38;5;35m",
    "\x1b[38;5;175m",
    "\x1b[38;5;117m",
    "\x1b[38;5;166m",
    "\x1b[38;5;185m",
    "\x1b[38;5;245m",
];

impl Style {
    const fn code(self) -> &'static str {
        match self {
            Style::Plain => "",
            Style::Strong => "\x1b[1m",
            Style::Faint => "\x1b[2m",
            Style::Alarm => "\x1b[1;31m",
            Style::Command => "\x1b[36m",
            Style::Hue(number) => HUES[number as usize % HUES.len()],
        }
    }
}

/// A styled piece of a line, or a cell of a table.
#[derive(Clone, Debug, Default)]
pub struct Cell {
    text: String,
    style: Style,
}

impl Cell {
    /// `text` in `style`. All that a report prints passes through here, so this is the place where a text of a
    /// trace loses its control sequences; see [`printable`].
    pub fn new(text: impl Into<String>, style: Style) -> Cell {
        let text = text.into();
        let text = match printable(&text) {
            Cow::Borrowed(_) => text,
            Cow::Owned(shown) => shown,
        };
        Cell { text, style }
    }
}

impl<T: Into<String>> From<T> for Cell {
    fn from(text: T) -> Cell {
        Cell::new(text, Style::Plain)
    }
}

/// The alignment of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// For text.
    Left,
    /// For numbers.
    Right,
}

/// Aligned columns, two spaces apart.
#[derive(Clone, Debug, Default)]
pub struct Table {
    columns: Vec<(String, Side)>,
    rows: Vec<Vec<Cell>>,
}

impl Table {
    /// A table with these column heads. When all heads are empty, the line of heads is left out.
    #[must_use]
    pub fn new(columns: &[(&str, Side)]) -> Table {
        let columns = columns.iter().map(|(name, side)| ((*name).to_owned(), *side)).collect();
        Table { columns, rows: Vec::new() }
    }

    /// Adds a row; missing cells stay empty.
    pub fn row(&mut self, cells: impl IntoIterator<Item = Cell>) {
        self.rows.push(cells.into_iter().collect());
    }

    /// Returns true if the table has no rows.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
}

/// Collects the text of a report.
#[derive(Clone, Debug, Default)]
pub struct Printer {
    text: String,
    paint: bool,
    width: Option<usize>,
}

impl Printer {
    /// An empty text. `paint` enables colour; `width` is the number of columns of the terminal.
    #[must_use]
    pub fn new(paint: bool, width: Option<usize>) -> Printer {
        Printer { text: String::new(), paint, width }
    }

    /// Returns true if styles are shown.
    #[must_use]
    pub fn paints(&self) -> bool {
        self.paint
    }

    /// The text so far.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Adds a line of cells.
    pub fn line(&mut self, cells: impl IntoIterator<Item = Cell>) {
        for cell in cells {
            self.piece(&cell);
        }
        self.end_line();
    }

    /// Adds a line without style.
    pub fn plain(&mut self, text: impl Into<String>) {
        self.line([text.into().into()]);
    }

    /// Adds an empty line.
    pub fn gap(&mut self) {
        self.text.push('\n');
    }

    fn piece(&mut self, cell: &Cell) {
        if self.paint && cell.style != Style::Plain && !cell.text.is_empty() {
            // Writing to a String cannot fail.
            let _ = write!(self.text, "{}{}\x1b[0m", cell.style.code(), cell.text);
        } else {
            self.text.push_str(&cell.text);
        }
    }

    fn end_line(&mut self) {
        let line = self.text.trim_end_matches(' ').len();
        self.text.truncate(line);
        self.text.push('\n');
    }

    /// Adds a table. On a terminal, texts that do not fit the last column are cut in the middle.
    pub fn table(&mut self, table: &Table) {
        let mut widths: Vec<usize> = table.columns.iter().map(|(name, _)| name.chars().count()).collect();
        for row in &table.rows {
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = (*width).max(cell.text.chars().count());
            }
        }
        if let (Some(width), [before @ .., last]) = (self.width, widths.as_mut_slice()) {
            let taken: usize = before.iter().map(|width| width + 2).sum();
            *last = (*last).min(width.saturating_sub(taken).max(12));
        }
        let heads: Vec<Cell> =
            table.columns.iter().map(|(name, _)| Cell::new(name.clone(), Style::Faint)).collect();
        if table.columns.iter().any(|(name, _)| !name.is_empty()) {
            self.table_row(&heads, &widths, table);
        }
        for row in &table.rows {
            self.table_row(row, &widths, table);
        }
    }

    fn table_row(&mut self, cells: &[Cell], widths: &[usize], table: &Table) {
        for (index, (cell, width)) in cells.iter().zip(widths).enumerate() {
            if index > 0 {
                self.text.push_str("  ");
            }
            let text = cut_middle(&cell.text, *width);
            let padding = " ".repeat(width.saturating_sub(text.chars().count()));
            let right = table.columns[index].1 == Side::Right;
            if right {
                self.text.push_str(&padding);
            }
            self.piece(&Cell::new(text, cell.style));
            if !right {
                self.text.push_str(&padding);
            }
        }
        self.end_line();
    }
}

/// `text`, or its start and end around `…` where it is wider than `width`.
fn cut_middle(text: &str, width: usize) -> String {
    let chars: Vec<char> = text.chars().collect();
    if chars.len() <= width {
        return text.to_owned();
    }
    let keep = width.saturating_sub(1);
    let tail = keep.div_ceil(2);
    chars[..keep - tail].iter().chain(&['…']).chain(&chars[chars.len() - tail..]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_aligned_and_fits_the_terminal() {
        let mut table = Table::new(&[("bytes", Side::Right), ("module", Side::Left)]);
        table.row(["1.00 MiB".into(), "GPT".into()]);
        table.row(["512 B".into(), "GPT.transformer.h.0.mlp.c_fc".into()]);
        let mut printer = Printer::new(false, None);
        printer.table(&table);
        assert_eq!(
            printer.text(),
            "   bytes  module\n1.00 MiB  GPT\n   512 B  GPT.transformer.h.0.mlp.c_fc\n"
        );
        let mut printer = Printer::new(false, Some(24));
        printer.table(&table);
        assert_eq!(printer.text().lines().last(), Some("   512 B  GPT.tr…lp.c_fc"));
    }

    #[test]
    fn a_text_of_a_trace_reaches_the_terminal_without_control_sequences() {
        let mut table = Table::new(&[("module", Side::Left), ("bytes", Side::Right)]);
        table.row(["\x1b[2Jx".into(), "1".into()]);
        for paint in [false, true] {
            let mut printer = Printer::new(paint, Some(40));
            printer.table(&table);
            printer.plain("a\nb\x1b]0;t\x07");
            printer.line([Cell::new("\x1b[31m", Style::Strong)]);
            assert!(!printer.text().contains("\x1b[2J") && !printer.text().contains(['\x07', '\r']));
            assert!(printer.text().contains("\\u{1b}[2Jx") && printer.text().contains("a\\nb"));
            assert!(!printer.text().contains("\x1b[31m"));
        }
    }

    #[test]
    fn colour_is_printed_on_terminals_only() {
        let mut printer = Printer::new(true, None);
        printer.line([Cell::new("x", Style::Strong)]);
        assert_eq!(printer.text(), "\x1b[1mx\x1b[0m\n");
    }
}
