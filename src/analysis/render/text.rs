//! Text for one screen: aligned tables, and colour only when the reader is a terminal.

use std::fmt::Write as _;

/// How a piece of text stands out on a terminal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Style {
    /// As it is.
    #[default]
    Plain,
    /// What the reader looks for first.
    Strong,
    /// What the reader may pass over.
    Faint,
    /// What is wrong.
    Alarm,
    /// A command to type.
    Command,
    /// One of [`HUES`].
    Hue(u8),
}

/// Colours that the colour-blind can tell apart, after Okabe and Ito: blue, orange, green, purple, sky
/// blue, vermilion, yellow, grey. Numbers of the terminal's palette of 256.
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

/// A piece of a line.
#[derive(Clone, Debug, Default)]
pub struct Cell {
    text: String,
    style: Style,
}

impl Cell {
    /// `text` in `style`.
    pub fn new(text: impl Into<String>, style: Style) -> Cell {
        Cell { text: text.into(), style }
    }
}

impl<T: Into<String>> From<T> for Cell {
    fn from(text: T) -> Cell {
        Cell::new(text, Style::Plain)
    }
}

/// On which side of its column a cell stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Words.
    Left,
    /// Numbers.
    Right,
}

/// Aligned columns, two spaces apart.
#[derive(Clone, Debug, Default)]
pub struct Table {
    columns: Vec<(String, Side)>,
    rows: Vec<Vec<Cell>>,
}

impl Table {
    /// A table with these column heads; with no line for them when all are empty.
    #[must_use]
    pub fn new(columns: &[(&str, Side)]) -> Table {
        let columns = columns.iter().map(|(name, side)| ((*name).to_owned(), *side)).collect();
        Table { columns, rows: Vec::new() }
    }

    /// Adds a row; missing cells are empty.
    pub fn row(&mut self, cells: impl IntoIterator<Item = Cell>) {
        self.rows.push(cells.into_iter().collect());
    }

    /// Has it no rows?
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
}

/// The text of an answer.
#[derive(Clone, Debug, Default)]
pub struct Page {
    text: String,
    paint: bool,
    width: Option<usize>,
}

impl Page {
    /// An empty page; `paint` for a terminal that shows colour, `width` its columns.
    #[must_use]
    pub fn new(paint: bool, width: Option<usize>) -> Page {
        Page { text: String::new(), paint, width }
    }

    /// Are styles shown?
    #[must_use]
    pub fn paints(&self) -> bool {
        self.paint
    }

    /// What was written so far.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// A line of pieces.
    pub fn line(&mut self, cells: impl IntoIterator<Item = Cell>) {
        for cell in cells {
            self.piece(&cell);
        }
        self.end_line();
    }

    /// A plain line.
    pub fn plain(&mut self, text: impl Into<String>) {
        self.line([text.into().into()]);
    }

    /// An empty line.
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

    /// A table. On a terminal, what would not fit its last column is cut in the middle.
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

/// `text`, or its two ends around `…` when it is wider than `width`.
fn cut_middle(text: &str, width: usize) -> String {
    let chars: Vec<char> = text.chars().collect();
    if chars.len() <= width {
        return text.to_owned();
    }
    let keep = width.saturating_sub(1);
    let tail = keep.div_ceil(2);
    chars[..keep - tail].iter().chain(&['…']).chain(&chars[chars.len() - tail..]).collect()
}

/// A bar of up to `width` cells for a share from 0 to 1, in eighths of a cell.
#[must_use]
pub fn bar(share: f64, width: usize) -> String {
    const EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    let eighths = (share.clamp(0.0, 1.0) * (width * 8) as f64).round() as usize;
    format!("{}{}", "█".repeat(eighths / 8), EIGHTHS[eighths % 8])
}

/// A share from 0 to 1 as `12.3 %`.
#[must_use]
pub fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// `part` of `whole`, 0 when there is no whole.
#[must_use]
pub fn share(part: i64, whole: i64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

/// A count with its thousands apart: `1,234,567`.
#[must_use]
pub fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A training step, or `-` before the first.
#[must_use]
pub fn step_or_dash(step: i64) -> String {
    if step < 0 { "-".to_owned() } else { step.to_string() }
}

/// A time in ns as people say it: `412 ms`, `3.21 s`, `1 h 02 min`.
#[must_use]
pub fn duration(ns: i64) -> String {
    let s = ns as f64 / 1e9;
    match ns.abs() {
        0..1_000 => format!("{ns} ns"),
        1_000..1_000_000 => format!("{:.1} µs", ns as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} ms", ns as f64 / 1e6),
        1_000_000_000..120_000_000_000 => format!("{s:.2} s"),
        120_000_000_000..3_600_000_000_000 => {
            format!("{} min {:02} s", ns / 60_000_000_000, ns / 1_000_000_000 % 60)
        }
        _ => format!("{} h {:02} min", ns / 3_600_000_000_000, ns / 60_000_000_000 % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_aligned_and_fits_its_terminal() {
        let mut table = Table::new(&[("bytes", Side::Right), ("module", Side::Left)]);
        table.row(["1.00 MiB".into(), "GPT".into()]);
        table.row(["512 B".into(), "GPT.transformer.h.0.mlp.c_fc".into()]);
        let mut page = Page::new(false, None);
        page.table(&table);
        assert_eq!(page.text(), "   bytes  module\n1.00 MiB  GPT\n   512 B  GPT.transformer.h.0.mlp.c_fc\n");
        let mut page = Page::new(false, Some(24));
        page.table(&table);
        assert_eq!(page.text().lines().last(), Some("   512 B  GPT.tr…lp.c_fc"));
    }

    #[test]
    fn numbers_read_well() {
        assert_eq!(count(0), "0");
        assert_eq!(count(1_234_567), "1,234,567");
        assert_eq!(duration(3_210_000_000), "3.21 s");
        assert_eq!(duration(3_725_000_000_000), "1 h 02 min");
        assert_eq!(percent(0.1234), "12.3 %");
        assert_eq!(bar(0.5, 4), "██");
        assert_eq!(bar(0.03, 4), "▏");
    }

    #[test]
    fn colour_is_for_terminals() {
        let mut page = Page::new(true, None);
        page.line([Cell::new("x", Style::Strong)]);
        assert_eq!(page.text(), "\x1b[1mx\x1b[0m\n");
    }
}
