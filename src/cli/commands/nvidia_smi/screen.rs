//! The default screen: the cards and the processes, in the layout of the drivers since 550.

use std::fmt::Write as _;

use jiff::Zoned;
use memtrace_machine::{DRIVER_VERSION, identity};

use super::machines::Measured;
use super::value::{apps, cuda_version};

const MIB: u64 = 1 << 20;
/// The width between the outer borders.
const WIDTH: usize = 89;

/// Returns the screen for one machine.
pub(super) fn screen(measured: &Measured, cards: &[usize]) -> String {
    let mut text = format!("{}       \n", Zoned::now().strftime("%a %b %e %H:%M:%S %Y"));
    header(&mut text, measured);
    for &card in cards {
        card_rows(&mut text, measured, card);
    }
    text.push('\n');
    processes(&mut text, measured, cards);
    text
}

fn rule(text: &mut String, fill: char) {
    let _ = writeln!(text, "+{}+", fill.to_string().repeat(WIDTH));
}

fn columns(text: &mut String, border: char, between: char, fill: char) {
    let part = |width: usize| fill.to_string().repeat(width);
    let _ = writeln!(text, "{border}{}{between}{}{between}{}{border}", part(41), part(24), part(22));
}

fn header(text: &mut String, measured: &Measured) {
    rule(text, '-');
    let driver = format!("Driver Version: {DRIVER_VERSION}");
    let cuda = format!("CUDA Version: {}", cuda_version(measured));
    let _ = writeln!(
        text,
        "| {:<33}{driver:<33}{cuda:<21} |",
        format!("NVIDIA-SMI {DRIVER_VERSION} (simulated)")
    );
    columns(text, '+', '+', '-');
    text.push_str(
        "| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |\n\
         | Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |\n\
         |                                         |                        |               MIG M. |\n",
    );
    columns(text, '|', '+', '=');
}

fn card_rows(text: &mut String, measured: &Measured, card: usize) {
    let machine = &measured.machine;
    let (spec, used) = (&machine.spec, machine.used(card));
    let name = cut(&spec.name, 26);
    let bus = identity::long_bus_id(card);
    let ecc = match spec.base.ecc() {
        Some(true) => machine.cards[card].ecc_errors.to_string(),
        Some(false) => "Off".to_owned(),
        None => "N/A".to_owned(),
    };
    let _ = writeln!(text, "| {card:>3}  {name:<26}     On  |   {bus:<16} Off | {ecc:>20} |");
    let usage = match spec.base.unified() {
        Some(_) => format!("{:<22}", "Not Supported"),
        None => format!("{}MiB / {:>6}MiB", used / MIB, spec.memory / MIB),
    };
    // The column is too narrow for two numbers of seven digits with spaces, so remove the spaces.
    let usage = if usage.len() > 22 { usage.replace(' ', "") } else { usage };
    let _ = writeln!(
        text,
        "| N/A   N/A    P0              N/A /  N/A | {usage:>22} | {:>6}%      Default |",
        measured.utilization[card]
    );
    let _ = writeln!(text, "| {:39} | {:22} | {:>20} |", "", "", "N/A");
    columns(text, '+', '+', '-');
}

fn processes(text: &mut String, measured: &Measured, cards: &[usize]) {
    rule(text, '-');
    let mut line = |words: &str| {
        let _ = writeln!(text, "|{words:<WIDTH$}|");
    };
    line(" Processes:");
    line("  GPU   GI   CI              PID   Type   Process name                        GPU Memory");
    line("        ID   ID                                                               Usage");
    line(&"=".repeat(WIDTH));
    let apps = apps(measured, cards);
    if apps.is_empty() {
        line("  No running processes found");
    }
    for app in apps {
        let usage = format!("{}MiB", app.bytes / MIB);
        let name = cut_front(&app.name, 35);
        line(&format!("  {:>3}   N/A  N/A  {:>14}      C   {name:<35} {usage:>10} ", app.card, app.pid));
    }
    rule(text, '-');
}

/// Cuts a text to at most `most` characters.
fn cut(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_owned();
    }
    text.chars().take(most - 3).chain("...".chars()).collect()
}

/// Cuts a path to its last characters, at most `most`, as nvidia-smi does.
fn cut_front(text: &str, most: usize) -> String {
    let length = text.chars().count();
    if length <= most {
        return text.to_owned();
    }
    "...".chars().chain(text.chars().skip(length + 3 - most)).collect()
}

#[cfg(test)]
mod tests {
    use memtrace_cards::Spec;
    use memtrace_machine::files::Machine;
    use memtrace_machine::process::Process;
    use memtrace_machine::table::{CardUse, ProcessUse};

    use super::*;

    #[test]
    fn nvidia_smi_draws_lines_of_one_width_whatever_the_names() {
        for card in ["8xh100-80g", "t4,others=1g", "mem=900g,name=Ä card with a very long name", "mem=8t"] {
            let mut machine = Machine::empty("test", Spec::parse(card).unwrap());
            let half = machine.spec.memory / 2;
            let at = CardUse { context: Some(half), allocated: half, busy_ns: 0 };
            let process = Process { pid: u32::MAX, start: 1 };
            let cards = vec![at; machine.spec.count as usize];
            machine.processes.push(ProcessUse { process, cuda_version: u32::MAX, cards });
            let count = machine.spec.count as usize;
            let measured = Measured { machine, utilization: vec![100; count] };
            let text = screen(&measured, &(0..count).collect::<Vec<_>>());
            let widths: Vec<usize> = text
                .lines()
                .filter(|line| line.starts_with(['|', '+']))
                .map(|line| line.chars().count())
                .collect();
            // At least: the header, four lines for each card, the headings of the processes, each process, and a rule.
            assert!(widths.len() > 7 + 4 * count + 5 + count, "{text}");
            assert!(widths.iter().all(|width| *width == 91), "{text}");
        }
        assert_eq!(cut_front("/a/very/long/path/to/python3", 12), "...o/python3");
        assert_eq!(cut("NVIDIA H100 80GB HBM3", 10), "NVIDIA ...");
    }
}
