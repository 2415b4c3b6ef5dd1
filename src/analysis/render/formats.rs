//! The output forms other than the text for a terminal: Markdown, to paste into a pull request, and CSV.

use memtrace_trace::text::safe_text;

use super::printer::{Cell, NO_BREAK, Side, Style, Table};

/// The form of a report's text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Form {
    /// Lines and aligned tables, for a terminal.
    #[default]
    Text,
    /// Lines and tables of GitHub's Markdown.
    Markdown,
    /// Only the tables, separated by empty lines.
    Csv,
}

/// Returns a line of a report in Markdown.
pub(super) fn markdown_line(cells: &[Cell]) -> String {
    let (mut line, mut command) = (String::new(), String::new());
    for cell in cells {
        match cell.style() {
            // Join the parts of a command into one code span at the end of the line, so that the command can
            // be copied as a whole.
            Style::Command => command.push_str(cell.text()),
            Style::Strong if !cell.text().trim().is_empty() => {
                line.push_str(&format!("**{}**", escaped(cell.text().trim())));
            }
            _ => line.push_str(&escaped(cell.text())),
        }
    }
    if !command.is_empty() {
        line.push_str(&format!("`{}`", command.replace('`', "'")));
    }
    // In Markdown, two trailing spaces make a line break.
    format!("{}  \n", line.trim_start())
}

/// Returns a table in GitHub's Markdown.
pub(super) fn markdown_table(table: &Table) -> String {
    let (columns, rows) = table.without_bars();
    let line = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
    let side = |side| if side == Side::Right { "---:" } else { "---" }.to_owned();
    let mut text = line(columns.iter().map(|(name, _)| escaped(name)).collect());
    text.push_str(&line(columns.iter().map(|(_, of)| side(*of)).collect()));
    for row in rows {
        text.push_str(&line(row.iter().map(|cell| indented(cell.text())).collect()));
    }
    text.push('\n');
    text
}

/// Returns a table as CSV. Bytes, counts, shares in percent and durations in seconds are bare numbers. All
/// other cells keep their text, in the form that is safe for a spreadsheet.
pub(super) fn csv_table(table: &Table) -> String {
    let (columns, rows) = table.without_bars();
    let mut writer = csv::Writer::from_writer(Vec::new());
    let heads = columns.iter().map(|(name, _)| name.clone());
    let rows = rows.iter().map(|row| row.iter().map(value).collect::<Vec<String>>());
    for record in std::iter::once(heads.collect::<Vec<String>>()).chain(rows) {
        // Writing to a Vec cannot fail, and all records have the same length.
        let _ = writer.write_record(&record);
    }
    String::from_utf8(writer.into_inner().unwrap_or_default()).unwrap_or_default()
}

/// Returns a table cell as a CSV field.
fn value(cell: &Cell) -> String {
    cell.number().map_or_else(|| field(cell.text()), str::to_owned)
}

/// Returns the text of a table cell as a CSV field: a bare number if possible, or else the text, made safe for
/// spreadsheets.
fn field(cell: &str) -> String {
    let cell = cell.trim().replace(NO_BREAK, " ");
    let number = cell.strip_suffix(" B").unwrap_or(&cell);
    let digits = number.trim_start_matches(['+', '-']);
    let is_number = digits.starts_with(|c: char| c.is_ascii_digit())
        && digits.chars().all(|c| c.is_ascii_digit() || c == ',')
        && number.len() - digits.len() < 2;
    if is_number {
        return number.trim_start_matches('+').replace(',', "");
    }
    if let Some(number) = cell.strip_suffix(" %") {
        return number.trim_start_matches('+').to_owned();
    }
    // A spreadsheet would run some texts as formulas, but a signed quantity such as `-1.50 GiB` is safe.
    let is_plain = |c: char| c.is_alphanumeric() || [' ', '.', ',', '%'].contains(&c);
    if digits.starts_with(|c: char| c.is_ascii_digit()) && digits.chars().all(is_plain) {
        return cell;
    }
    if cell.is_empty() { cell } else { safe_text(&cell) }
}

/// Returns a table cell in Markdown. The cell keeps the indentation of a tree.
fn indented(cell: &str) -> String {
    let text = cell.trim_start_matches(' ');
    format!("{}{}", "&nbsp;".repeat(cell.len() - text.len()), escaped(text.trim_end()))
}

/// Escapes a text so that Markdown shows it unchanged.
fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for c in text.chars() {
        match c {
            NO_BREAK => escaped.push(' '),
            '<' => escaped.push_str("&lt;"),
            '&' => escaped.push_str("&amp;"),
            // In a comment on GitHub, an at sign would notify a user.
            '@' => escaped.push_str("&#64;"),
            '\\' | '`' | '*' | '_' | '|' | '[' | ']' | '#' | '~' => {
                escaped.push('\\');
                escaped.push(c);
            }
            _ => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::printer::Printer;

    fn table() -> Table {
        let mut table = Table::new(&[("grew", Side::Right), ("", Side::Left), ("module", Side::Left)]);
        table.row(["+1,024 B".into(), "██".into(), "GPT".into()]);
        table.row(["-3.5 %".into(), "".into(), "  __x__|=cmd".into()]);
        table
    }

    #[test]
    fn markdown_has_the_lines_and_tables_of_the_text() {
        let mut printer = Printer::new(true, Some(20)).in_form(Form::Markdown);
        printer.line([Cell::new("next: ", Style::Faint), Cell::new("memtrace peak a_b", Style::Command)]);
        printer.table(&table());
        printer.fence();
        printer.plain("a_b");
        printer.fence();
        let text = "next: `memtrace peak a_b`  \n\n| grew | module |\n| ---: | --- |\n| +1,024 B | GPT |\n\
                    | -3.5 % | &nbsp;&nbsp;\\_\\_x\\_\\_\\|=cmd |\n\n```\na_b\n```\n";
        assert_eq!(printer.text(), text);
    }

    #[test]
    fn csv_has_the_tables_alone_with_bare_numbers_and_no_formula() {
        let mut printer = Printer::new(false, None).in_form(Form::Csv);
        printer.plain("a line");
        printer.gap();
        printer.table(&table());
        printer.table(&table());
        let one = "grew,module\n1024,GPT\n-3.5,__x__|=cmd\n";
        assert_eq!(printer.text(), format!("{one}\n{one}"));
        assert_eq!(field("=1+1"), "'=1+1");
        assert_eq!(field("-1+cmd|' /C calc'!A0"), "'-1+cmd|' /C calc'!A0");
        assert_eq!(field("-1.50 GiB"), "-1.50 GiB");
        assert_eq!(field("12.3"), "12.3");
        for (ns, number) in [(412_345_678, "0.412345678"), (3_779_000_000_000, "3779"), (7, "0.000000007")] {
            assert_eq!(value(&Cell::duration(ns)), number);
        }
        assert_eq!((field("+50.0 %"), field("4 steps")), ("50.0".to_owned(), "4 steps".to_owned()));
    }
}
