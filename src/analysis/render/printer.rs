//! The text of a report: styled lines, colored only if enabled and wrapped to the width of the terminal.
//! Tables are in [`super::table`].

use std::borrow::Cow;
use std::fmt::Write as _;

use memtrace_trace::counts::count;
use memtrace_trace::text::printable;

use super::formats::{self, Form};
use super::numbers::{duration, seconds};
pub use super::table::{Side, Table};
use super::wrap::pieces;

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
    /// A color: an index in [`HUES`].
    Hue(u8),
}

/// The palette of Okabe and Ito, which color-blind people can distinguish, as escape codes of the 256-color
/// palette: blue, orange, green, purple, sky blue, vermilion, yellow, gray.
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
    /// The number that stands for the text in CSV; `None` if it follows from the text.
    number: Option<String>,
}

impl Cell {
    /// Returns a cell with `text` in `style`. Everything that a report prints passes through here, so this
    /// removes the control sequences in texts of a trace. See [`printable`].
    pub fn new(text: impl Into<String>, style: Style) -> Cell {
        let text = text.into();
        let text = match printable(&text) {
            Cow::Borrowed(_) => text,
            Cow::Owned(shown) => shown,
        };
        Cell { text, style, number: None }
    }

    /// Returns a cell with a duration in readable units; in CSV it has all digits, in seconds.
    #[must_use]
    pub fn duration(ns: i64) -> Cell {
        Cell { number: Some(seconds(ns)), ..duration(ns).into() }
    }
}

impl Cell {
    /// Returns the number that stands for the text in CSV.
    pub(super) fn number(&self) -> Option<&str> {
        self.number.as_deref()
    }

    /// Returns the text, without control sequences.
    pub(super) fn text(&self) -> &str {
        &self.text
    }

    /// Returns the style, which is not yet applied to the text.
    pub(super) fn style(&self) -> Style {
        self.style
    }

    /// Returns the cell's width in columns, which is one per character.
    pub(super) fn width(&self) -> usize {
        self.text.chars().count()
    }

    /// Returns a cell with another text in the same style.
    pub(super) fn with_text(&self, text: &str) -> Cell {
        Cell::new(text, self.style)
    }
}

impl<T: Into<String>> From<T> for Cell {
    fn from(text: T) -> Cell {
        Cell::new(text, Style::Plain)
    }
}

/// A space at which no line is wrapped. It is printed as an ordinary space.
pub const NO_BREAK: char = '\u{a0}';

/// Collects the text of a report.
#[derive(Clone, Debug, Default)]
pub struct Printer {
    text: String,
    paint: bool,
    width: Option<usize>,
    form: Form,
    /// True between two code fences of Markdown.
    fenced: bool,
}

impl Printer {
    /// Returns a printer with an empty text. `paint` enables color; `width` is the number of columns of the
    /// terminal.
    #[must_use]
    pub fn new(paint: bool, width: Option<usize>) -> Printer {
        Printer { paint, width, ..Printer::default() }
    }

    /// Returns this printer with another output form.
    #[must_use]
    pub fn in_form(self, form: Form) -> Printer {
        Printer { form, ..self }
    }

    /// Returns the form of the text.
    pub(crate) fn form(&self) -> Form {
        self.form
    }

    /// Returns true if styles are shown.
    #[must_use]
    pub fn paints(&self) -> bool {
        self.paint
    }

    /// Returns the text so far.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Returns the number of columns of the terminal, or `None` without a terminal.
    pub(super) fn width(&self) -> Option<usize> {
        self.width
    }

    /// Adds a line of cells. The line is wrapped at spaces if the terminal is too narrow. A line with a
    /// command is not wrapped, so that the command can be copied as a whole. In CSV, which has only tables,
    /// lines are left out.
    pub fn line(&mut self, cells: impl IntoIterator<Item = Cell>) {
        let cells: Vec<Cell> = cells.into_iter().collect();
        match self.form {
            Form::Text => {}
            Form::Markdown if self.fenced => {}
            Form::Markdown => return self.text.push_str(&formats::markdown_line(&cells)),
            Form::Csv => return,
        }
        let long = cells.iter().map(Cell::width).sum::<usize>();
        let is_command = cells.iter().any(|cell| cell.style == Style::Command);
        match self.width {
            Some(width) if long > width && !is_command => self.wrapped(&cells, width),
            _ => {
                for cell in &cells {
                    self.piece(cell);
                }
                self.end_line();
            }
        }
    }

    /// Adds a line, wrapped at `width` columns. The second and later lines are indented by two more columns.
    fn wrapped(&mut self, cells: &[Cell], width: usize) {
        let (start, words) = words(cells);
        let indent = (start + 2).min(width / 2);
        self.space(start);
        // The current column, and the number of spaces before the next word, which are omitted at the start
        // of a line.
        let (mut column, mut spaces) = (start, 0);
        for StyledWord { cells, spaces: behind } in words {
            let long: usize = cells.iter().map(Cell::width).sum();
            if column > start && column + spaces + long > width {
                self.end_line();
                self.space(indent);
                column = indent;
            } else {
                self.space(spaces);
                column += spaces;
            }
            if column + long > width {
                column = self.broken(&cells, column, indent, width);
            } else {
                cells.iter().for_each(|cell| self.piece(cell));
                column += long;
            }
            spaces = behind;
        }
        self.end_line();
    }

    /// Adds a word that is longer than a line, in pieces. Returns the column after the last piece.
    fn broken(&mut self, word: &[Cell], mut column: usize, indent: usize, width: usize) -> usize {
        for cell in word {
            for (place, piece) in pieces(&cell.text, width.saturating_sub(indent).max(1)).iter().enumerate() {
                let long = piece.chars().count();
                if place > 0 || column > indent && column + long > width {
                    self.end_line();
                    self.space(indent);
                    column = indent;
                }
                self.piece(&cell.with_text(piece));
                column += long;
            }
        }
        column
    }

    /// Adds a line without style.
    pub fn plain(&mut self, text: impl Into<String>) {
        self.line([text.into().into()]);
    }

    /// Adds the line for the rows that a table leaves out without `--top`; nothing if it leaves out none. `which`
    /// says what they are, such as ` with lower peaks`.
    pub fn more(&mut self, rows: usize, which: &str) {
        if rows > 0 {
            let text = format!("{} more{which}; --top N lists them", count(rows as u64));
            self.line([Cell::new(text, Style::Faint)]);
        }
    }

    /// Adds an empty line, unless the text already ends with one or the form is CSV.
    pub fn gap(&mut self) {
        if self.form != Form::Csv && !self.text.ends_with("\n\n") {
            self.text.push('\n');
        }
    }

    /// Begins or ends a drawing, whose lines must stay unchanged in Markdown.
    pub fn fence(&mut self) {
        if self.form == Form::Markdown {
            self.text.push_str("```\n");
            self.fenced = !self.fenced;
        }
    }

    /// Adds a text that is already in the output form, after an empty line if there is already text.
    pub(super) fn block(&mut self, text: &str) {
        if !self.text.is_empty() && !self.text.ends_with("\n\n") {
            self.text.push('\n');
        }
        self.text.push_str(text);
    }

    /// Adds spaces to the line.
    pub(super) fn space(&mut self, columns: usize) {
        self.text.extend(std::iter::repeat_n(' ', columns));
    }

    /// Adds a cell to the line.
    pub(super) fn piece(&mut self, cell: &Cell) {
        let text = cell.text.replace(NO_BREAK, " ");
        if self.paint && cell.style != Style::Plain && !text.is_empty() {
            // Writing to a String cannot fail.
            let _ = write!(self.text, "{}{text}\x1b[0m", cell.style.code());
        } else {
            self.text.push_str(&text);
        }
    }

    /// Ends the line.
    pub(super) fn end_line(&mut self) {
        let line = self.text.trim_end_matches(' ').len();
        self.text.truncate(line);
        self.text.push('\n');
    }
}

/// A word, which may have parts of several styles, and the number of spaces after the word.
#[derive(Default)]
struct StyledWord {
    cells: Vec<Cell>,
    spaces: usize,
}

/// Returns the number of spaces at the start of a line, and the line's words. [`NO_BREAK`] does not end a
/// word.
fn words(cells: &[Cell]) -> (usize, Vec<StyledWord>) {
    let mut words: Vec<StyledWord> = Vec::new();
    let (mut start, mut word) = (0, StyledWord::default());
    for part in cells.iter().flat_map(|cell| cell.text.split_inclusive(' ').map(move |part| (cell, part))) {
        let (cell, text) = (part.0, part.1.trim_end_matches(' '));
        if !text.is_empty() && word.spaces > 0 {
            words.push(std::mem::take(&mut word));
        }
        match text {
            "" if word.cells.is_empty() => start += part.1.len(),
            "" => word.spaces += part.1.len(),
            text => {
                word.cells.push(cell.with_text(text));
                word.spaces = part.1.len() - text.len();
            }
        }
    }
    words.push(word);
    (start, words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_wrapped_at_spaces_and_keeps_its_indent() {
        let mut printer = Printer::new(false, Some(24));
        printer.line([
            "  try: ".into(),
            Cell::new("a smaller", Style::Strong),
            " batch, or accumulation.".into(),
        ]);
        assert_eq!(printer.text(), "  try: a smaller batch,\n    or accumulation.\n");
        let mut printer = Printer::new(false, Some(20));
        printer.plain("verdict: too big. 800.00 MiB does not fit");
        assert_eq!(printer.text(), "verdict: too big.\n  800.00 MiB does\n  not fit\n");
        let mut printer = Printer::new(false, Some(16));
        printer.plain("in /a/long/folder/of/traces.csv it is");
        assert!(printer.text().lines().all(|line| line.chars().count() <= 16), "{}", printer.text());
        let mut printer = Printer::new(false, Some(10));
        printer.line(["next: ".into(), Cell::new("memtrace peak out", Style::Command)]);
        assert_eq!(printer.text(), "next: memtrace peak out\n", "a command is copied as a whole");
        let mut printer = Printer::new(true, Some(9));
        printer.line([Cell::new("as wide", Style::Plain), Cell::new("  as it is", Style::Strong)]);
        let plain = printer.text().replace("\x1b[1m", "").replace("\x1b[0m", "");
        assert_eq!(plain, "as wide\n  as it\n  is\n", "no space stands beyond the edge");
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
