//! reStructuredText tables, laid out as Python's `tabulate` does with `tablefmt="rst"`.

use super::formats::Form;
use super::printer::{Printer, Side, Table};

/// Prints a table as lines of reStructuredText or, in Markdown and CSV, as a table of that form.
pub(crate) fn print(printer: &mut Printer, heads: &[&str], rows: &[Vec<String>]) {
    if printer.form() == Form::Text {
        table(heads, rows).into_iter().for_each(|line| printer.plain(line));
        return;
    }
    let columns: Vec<(&str, Side)> = heads.iter().map(|head| (*head, Side::Left)).collect();
    let mut table = Table::new(&columns);
    for row in rows {
        table.row(row.iter().map(|cell| cell.as_str().into()));
    }
    printer.table(&table);
}

/// Returns the lines of a table. Every cell is aligned to the left, as `tabulate` aligns text.
#[must_use]
fn table(heads: &[&str], rows: &[Vec<String>]) -> Vec<String> {
    // tabulate pads each head by two columns, unless a cell is wider.
    let mut widths: Vec<usize> = heads.iter().map(|head| head.chars().count() + 2).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let rule = widths.iter().map(|width| "=".repeat(*width)).collect::<Vec<_>>().join("  ");
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let padded: Vec<String> = cells.zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        padded.join("  ").trim_end().to_owned()
    };
    let mut lines = vec![rule.clone(), line(&mut heads.iter().copied()), rule.clone()];
    lines.extend(rows.iter().map(|row| line(&mut row.iter().map(String::as_str))));
    lines.push(rule);
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rst_columns_are_as_wide_as_their_widest_cell() {
        let lines = table(&["Device", "Total"], &[vec!["cuda:0".to_owned(), "12345.67 MiB".to_owned()]]);
        assert_eq!(
            lines,
            [
                "========  ============",
                "Device    Total",
                "========  ============",
                "cuda:0    12345.67 MiB",
                "========  ============"
            ]
        );
    }
}
