//! Tables, which have aligned columns, and their layout on a terminal that is too narrow for them.
//!
//! On a narrow terminal, only bars are left out. The last text column is wrapped inside its width. If that is
//! not enough, the last columns move below their row, and numbers are printed with their column heads.

use super::formats::{self, Form};
use super::printer::{Cell, NO_BREAK, Printer, Style};
use super::wrap::wrap;

/// The alignment of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Left, for text.
    Left,
    /// Right, for numbers.
    Right,
}

/// Aligned columns, two spaces apart.
#[derive(Clone, Debug, Default)]
pub struct Table {
    columns: Vec<(String, Side)>,
    rows: Vec<Vec<Cell>>,
}

/// The space between two columns.
const GAP: usize = 2;
/// The minimum width of a wrapped column. If less width is left, the column moves below its row.
const NARROWEST: usize = 20;
/// The indentation of columns that are printed below their row.
const INDENT: usize = 6;

impl Table {
    /// Returns a table with these column heads. If all heads are empty, the line of heads is omitted.
    #[must_use]
    pub fn new(columns: &[(&str, Side)]) -> Table {
        let columns = columns.iter().map(|(name, side)| ((*name).to_owned(), *side)).collect();
        Table { columns, rows: Vec::new() }
    }

    /// Adds a row. Missing cells stay empty.
    pub fn row(&mut self, cells: impl IntoIterator<Item = Cell>) {
        self.rows.push(cells.into_iter().collect());
    }

    /// Returns true if the table has no rows.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Returns the heads and alignments of the columns that are not bars, and their cells.
    pub(super) fn without_bars(&self) -> (Vec<&(String, Side)>, Vec<Vec<Cell>>) {
        let kept: Vec<usize> = (0..self.columns.len()).filter(|column| !self.is_bar(*column)).collect();
        let rows = self
            .rows
            .iter()
            .map(|row| kept.iter().map(|column| row.get(*column).cloned().unwrap_or_default()).collect());
        (kept.iter().map(|column| &self.columns[*column]).collect(), rows.collect())
    }

    /// Returns the width of the widest head or cell of a column.
    fn widest(&self, column: usize) -> usize {
        let cells = self.rows.iter().filter_map(|row| row.get(column)).map(Cell::width);
        cells.fold(self.columns[column].0.chars().count(), usize::max)
    }

    /// Returns true if a column has only bars. A bar repeats the share in the next column, so it can be left
    /// out.
    fn is_bar(&self, column: usize) -> bool {
        let mut cells = self.rows.iter().filter_map(|row| row.get(column)).map(Cell::text).peekable();
        self.columns[column].0.is_empty()
            && cells.peek().is_some()
            && cells.all(|text| text.chars().all(|c| c == ' ' || ('▁'..='▏').contains(&c)))
    }

    /// Returns the layout for a terminal of `width` columns. Without a terminal, every column keeps its
    /// natural width.
    fn layout(&self, width: Option<usize>) -> ColumnLayout {
        let natural: Vec<usize> = (0..self.columns.len()).map(|column| self.widest(column)).collect();
        let whole = ColumnLayout { shown: (0..natural.len()).collect(), widths: natural, below: Vec::new() };
        let Some(width) = width.filter(|width| whole.total() > *width) else { return whole };
        let mut without_bars = whole.clone();
        without_bars.shown.retain(|column| !self.is_bar(*column));
        match whole.wrapped(width, self) {
            Some(layout) => layout,
            None => without_bars.narrowed(width, self),
        }
    }
}

/// The columns that are shown, their widths, and the columns that are printed below their row.
#[derive(Clone, Debug)]
struct ColumnLayout {
    shown: Vec<usize>,
    /// The width of each column of the table.
    widths: Vec<usize>,
    below: Vec<usize>,
}

impl ColumnLayout {
    fn total(&self) -> usize {
        let widths: usize = self.shown.iter().map(|column| self.widths[*column]).sum();
        widths + GAP * self.shown.len().saturating_sub(1)
    }

    /// Returns this layout with its last text column wrapped to fit, or `None` if too little width is left
    /// for that column.
    fn wrapped(&self, width: usize, table: &Table) -> Option<ColumnLayout> {
        let is_text = |column: &&usize| table.columns[**column].1 == Side::Left && !table.is_bar(**column);
        let last = *self.shown.iter().rfind(is_text)?;
        let left = (width + self.widths[last]).checked_sub(self.total())?;
        // A column in the middle of a table needs only half of the minimum width, because its text is a short
        // label.
        let fewest = if Some(&last) == self.shown.last() { NARROWEST } else { NARROWEST / 2 };
        if left >= self.widths[last] || left < fewest {
            return (left >= self.widths[last]).then(|| self.clone());
        }
        let mut layout = self.clone();
        layout.widths[last] = left;
        Some(layout)
    }

    /// Returns a layout that fits. The last columns move below their row until the remaining columns fit.
    fn narrowed(mut self, width: usize, table: &Table) -> ColumnLayout {
        loop {
            if let Some(layout) = self.wrapped(width, table) {
                return layout;
            }
            if self.shown.len() < 2 || self.total() <= width {
                return self;
            }
            self.below.splice(..0, self.shown.pop());
        }
    }
}

impl Printer {
    /// Adds a table. If the terminal is too narrow for it, text is wrapped or moves below its row.
    pub fn table(&mut self, table: &Table) {
        match self.form() {
            Form::Text => {}
            Form::Markdown => return self.block(&formats::markdown_table(table)),
            Form::Csv => return self.block(&formats::csv_table(table)),
        }
        let layout = table.layout(self.width());
        if table.columns.iter().any(|(name, _)| !name.is_empty()) {
            let heads: Vec<Cell> =
                table.columns.iter().map(|(name, _)| Cell::new(name.clone(), Style::Faint)).collect();
            let texts = |column: &usize| table.columns[*column].1 == Side::Left;
            let below = layout.below.iter().copied().filter(texts).collect();
            self.table_row(&heads, &ColumnLayout { below, ..layout.clone() }, table);
        }
        for row in &table.rows {
            self.table_row(row, &layout, table);
        }
    }

    fn table_row(&mut self, cells: &[Cell], layout: &ColumnLayout, table: &Table) {
        let shown: Vec<(usize, &Cell)> =
            layout.shown.iter().filter_map(|column| Some((*column, cells.get(*column)?))).collect();
        let texts: Vec<Vec<String>> = shown
            .iter()
            .map(|(column, cell)| match layout.widths[*column] {
                width if cell.width() > width => wrap(cell.text(), width),
                _ => vec![cell.text().to_owned()],
            })
            .collect();
        for line in 0..texts.iter().map(Vec::len).max().unwrap_or(0) {
            for (at, ((column, cell), text)) in shown.iter().zip(&texts).enumerate() {
                if at > 0 {
                    self.space(GAP);
                }
                let text = text.get(line).map_or("", String::as_str);
                let padding = layout.widths[*column].saturating_sub(text.chars().count());
                let right = table.columns[*column].1 == Side::Right;
                if right {
                    self.space(padding);
                }
                self.piece(&cell.with_text(text));
                if !right {
                    self.space(padding);
                }
            }
            self.end_line();
        }
        let mut below = vec![Cell::from(" ".repeat(INDENT))];
        let (texts, numbers): (Vec<usize>, Vec<usize>) =
            layout.below.iter().partition(|column| table.columns[**column].1 == Side::Left);
        for column in texts.into_iter().chain(numbers) {
            let Some(cell) = cells.get(column) else { continue };
            if cell.text().is_empty() {
                continue;
            }
            let gap = if below.len() > 1 { "  " } else { "" };
            let (head, side) = &table.columns[column];
            let cell = match side {
                Side::Left => cell.clone(),
                // Keep a number and its head on one line.
                Side::Right => {
                    let text = format!("{head} {}", cell.text());
                    cell.with_text(&text.replace(' ', &NO_BREAK.to_string()))
                }
            };
            below.extend([Cell::from(gap), cell]);
        }
        if below.len() > 1 {
            self.line(below);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(table: &Table, width: Option<usize>) -> String {
        let mut printer = Printer::new(false, width);
        printer.table(table);
        printer.text().to_owned()
    }

    #[test]
    fn a_table_is_aligned_and_wraps_names_on_a_narrow_terminal() {
        let mut table = Table::new(&[("bytes", Side::Right), ("module", Side::Left)]);
        table.row(["1.00 MiB".into(), "GPT".into()]);
        table.row(["512 B".into(), "GPT.transformer.h.0.mlp.c_fc".into()]);
        let whole = "   bytes  module\n1.00 MiB  GPT\n   512 B  GPT.transformer.h.0.mlp.c_fc\n";
        assert_eq!(printed(&table, None), whole);
        assert_eq!(printed(&table, Some(38)), whole);
        let narrow = "   bytes  module\n1.00 MiB  GPT\n   512 B  GPT.transformer.h.0.\n          mlp.c_fc\n";
        assert_eq!(printed(&table, Some(31)), narrow);
    }

    #[test]
    fn a_narrow_terminal_loses_bars_and_no_text() {
        let mut table = Table::new(&[
            ("bytes", Side::Right),
            ("", Side::Left),
            ("held by", Side::Left),
            ("advice", Side::Left),
        ]);
        table.row([
            "33.00 MiB".into(),
            "██▋".into(),
            "torch: activation".into(),
            "a smaller batch of less".into(),
        ]);
        assert_eq!(
            printed(&table, Some(40)),
            "    bytes  held by\n      advice\n33.00 MiB  torch: activation\n      a smaller batch of less\n"
        );
        let narrow = printed(&table, Some(22));
        assert!(narrow.lines().all(|line| line.chars().count() <= 22), "{narrow}");
        for word in ["33.00", "MiB", "torch:", "activation", "a", "smaller", "batch", "of", "less"] {
            assert!(narrow.split_whitespace().any(|found| found == word), "{word}: {narrow}");
        }
    }

    #[test]
    fn numbers_that_a_narrow_terminal_has_no_column_for_move_below_their_row_with_their_heads() {
        let columns = ["rank", "peak allocated", "reserved", "at step", "retries"];
        let mut table = Table::new(&columns.map(|name| (name, Side::Right)));
        table.row(["0".into(), "74.14 MiB".into(), "184.00 MiB".into(), "1".into(), "12,345".into()]);
        assert_eq!(
            printed(&table, Some(34)),
            "rank  peak allocated    reserved\n   0       74.14 MiB  184.00 MiB\n      at step 1  retries 12,345\n"
        );
        assert_eq!(printed(&table, Some(60)).lines().count(), 2);
        let narrow = printed(&table, Some(26));
        assert!(narrow.contains("\n      reserved 184.00 MiB\n"), "{narrow}");
    }

    #[test]
    fn two_names_that_differ_stay_different_at_60_columns() {
        let mut table = Table::new(&[("bytes", Side::Right), ("share", Side::Right), ("module", Side::Left)]);
        for number in [1, 10, 11] {
            let name = format!("GPT.transformer.encoder.layers.{number}.self_attention.projection.output");
            table.row(["123.00 MiB".into(), "12.3 %".into(), name.into()]);
        }
        let text = printed(&table, Some(60));
        assert!(text.lines().all(|line| line.chars().count() <= 60), "{text}");
        for name in ["layers.1.", "layers.10.", "layers.11."] {
            assert!(text.contains(name), "{text}");
        }
        assert!(!text.contains('…'), "{text}");
    }
}
