//! Prints the table of groups of blocks: bytes and share of each group, and for modules also the number of
//! modules and the total with their submodules.

use crate::options::Options;
use crate::render::formats::Form;
use crate::render::numbers::{bar, count, percent, share};
use crate::render::printer::{Cell, Printer, Side, Style, Table};
use crate::state::group::{APART, Group, Key, KeyKind};

/// Prints the first `top` of the sorted `groups`, with their shares of `total` bytes. `bytes` is the heading
/// of the column of bytes; if the groups are modules, the heading is `own` instead.
pub(super) fn print_groups(
    printer: &mut Printer,
    groups: &[(String, Group)],
    by: &Key,
    (bytes, total): (&str, i64),
    top: usize,
    options: &Options,
) {
    let is_by_module = by.kind == KeyKind::Module;
    // Only a group of repeated layers, or of the levels that `--depth` joins, has several modules.
    let is_joined = is_by_module && groups.iter().take(top).any(|(_, group)| group.modules > 1);
    let mut columns = vec![
        (if is_by_module { "own" } else { bytes }, Side::Right),
        ("share", Side::Right),
        ("", Side::Left),
    ];
    if is_by_module {
        columns.push(("total", Side::Right));
    }
    if is_joined {
        columns.extend([("modules", Side::Right), ("largest", Side::Right)]);
    }
    columns.extend([("blocks", Side::Right), (by.name(), Side::Left)]);
    let mut table = Table::new(&columns);
    let show = |bytes: i64| options.units.show(bytes).to_string();
    let mut line = |group: &Group, name: Cell| {
        let mut row = vec![
            Cell::new(show(group.bytes), Style::Strong),
            percent(share(group.bytes, total)).into(),
            bar(share(group.bytes, total), 16).into(),
        ];
        let is_module = group.modules > 0;
        if is_by_module {
            row.push(if is_module { show(group.total).into() } else { "".into() });
        }
        if is_joined {
            row.push(if is_module { count(group.modules).into() } else { "".into() });
            row.push(if group.modules > 1 { show(group.largest).into() } else { "".into() });
        }
        row.extend([count(group.blocks).into(), name]);
        table.row(row);
    };
    for (name, group) in groups.iter().take(top) {
        line(group, name.as_str().into());
    }
    // In a CSV table, each row is a group. A row for the remaining groups would look like one more group, so
    // CSV has no such row.
    if groups.len() > top && printer.form() != Form::Csv {
        let rest = &groups[top..];
        let bytes = rest.iter().map(|(_, group)| group.bytes).sum();
        let blocks = rest.iter().map(|(_, group)| group.blocks).sum();
        let name = format!("{} more; --top N lists them", rest.len());
        line(&Group { bytes, blocks, ..Group::default() }, Cell::new(name, Style::Faint));
    }
    printer.table(&table);
    if is_by_module {
        let joins = if groups.iter().any(|(name, _)| name.split('.').any(|level| level == "*")) {
            format!("; * joins repeated layers, --{} lists each", APART.name)
        } else {
            String::new()
        };
        let depth = if by.has_depth() { ", or those that --depth joins" } else { "" };
        printer.plain(format!(
            "sorted by own: the blocks of the module itself{depth}; total: with the modules below it{joins}"
        ));
    }
}
