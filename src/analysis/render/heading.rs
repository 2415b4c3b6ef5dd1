//! The first line of every report, and of the section of each process in a report.

use memtrace_trace::meta::Meta;

use super::printer::{Cell, Printer, Style};
use super::process_names::rank_or_name;
use crate::read::input::Input;
use crate::render::numbers::counted;

/// Returns a command in one line. The interpreter and the script are without their folders, because the user knows
/// where they are. The second word is not a script if it is an option.
#[must_use]
pub fn short_command(words: &[String]) -> String {
    let short = |(index, word): (usize, &String)| match index {
        1 if word.starts_with('-') => word.clone(),
        0 | 1 => word.rsplit('/').next().unwrap_or(word).to_owned(),
        _ => word.clone(),
    };
    words.iter().enumerate().map(short).collect::<Vec<_>>().join(" ")
}

/// Prints the first line of every report: the traced command, the GPU, the version of torch and the number of
/// ranks.
pub fn heading(printer: &mut Printer, input: &Input, meta: &Meta) {
    let command = match short_command(&meta.argv) {
        command if command.is_empty() => input.path.display().to_string(),
        command if command.chars().count() > 60 => {
            format!("{}…", command.chars().take(59).collect::<String>())
        }
        command => command,
    };
    let mut about = String::new();
    match meta.devices.as_slice() {
        [] => {}
        [device] => about.push_str(&format!("  {}", device.name)),
        [device, more @ ..] => about.push_str(&format!("  {} and {} more", device.name, more.len())),
    }
    if let Some(torch) = meta.versions.get("torch") {
        about.push_str(&format!("  torch {torch}"));
    }
    if meta.world_size > 1 {
        about.push_str(&format!("  {}", counted(u64::from(meta.world_size.unsigned_abs()), "rank")));
    }
    let mut cells = vec![Cell::new(command, Style::Strong), Cell::new(about, Style::Faint)];
    if !meta.phantom.is_null() {
        cells.push(Cell::new("  (simulated GPU)", Style::Alarm));
    }
    printer.line(cells);
}

/// Begins the section of the process at `index` of `input`. Prints the report's first line before the first
/// process, then a gap, and a line with the rank or name of the process if there are several.
pub fn process_heading(printer: &mut Printer, input: &Input, index: usize) {
    let meta = &input.traces[index].meta;
    if index == 0 {
        heading(printer, input, meta);
    }
    printer.gap();
    if input.traces.len() > 1 {
        printer.plain(rank_or_name(&input.traces[index], input));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_shown_without_the_folders_of_the_interpreter_and_of_the_script() {
        for (command, shown) in [
            ("/usr/bin/python a/train.py --data /sets/a", "python train.py --data /sets/a"),
            ("./train --data=/sets/a", "train --data=/sets/a"),
            ("python", "python"),
            ("", ""),
        ] {
            let words: Vec<String> = command.split(' ').map(str::to_owned).collect();
            assert_eq!(short_command(&words), shown);
        }
    }
}
