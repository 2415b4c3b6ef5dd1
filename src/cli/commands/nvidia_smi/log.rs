//! The listings: `-L`, and `-q` with the parts that have values on a simulated card.

use std::fmt::Write as _;

use jiff::Zoned;
use memtrace_machine::files::Machine;
use memtrace_machine::{DRIVER_VERSION, identity};

use super::machines::Measured;
use super::value::{apps, cuda_version, of_card};

/// Returns the answer to `-L`: a line with the name and the UUID of each card.
pub(super) fn list(machine: &Machine, cards: &[usize]) -> String {
    let line =
        |&card: &usize| format!("GPU {card}: {} (UUID: {})\n", machine.spec.name, identity::uuid_text(card));
    cards.iter().map(line).collect()
}

/// Returns the answer to `--version`. The version of NVML is the first two components of the driver's
/// version.
pub(super) fn versions(measured: &Measured) -> String {
    let nvml = DRIVER_VERSION.splitn(3, '.').take(2).collect::<Vec<_>>().join(".");
    format!(
        "NVIDIA-SMI version  : {DRIVER_VERSION} (simulated)\nNVML version        : {nvml}\n\
         DRIVER version      : {DRIVER_VERSION}\nCUDA Version        : {}\n",
        cuda_version(measured)
    )
}

/// Returns the answer to `-q`, with the given sections or, if `sections` is empty, all sections.
pub(super) fn log(measured: &Measured, cards: &[usize], sections: &[String]) -> String {
    let now = Zoned::now();
    let mut text = String::from("\n==============NVSMI LOG==============\n\n");
    let mut line = |depth: usize, name: &str, value: &str| {
        let name = format!("{}{name}", "    ".repeat(depth));
        let _ = writeln!(text, "{name:<50}: {value}");
    };
    line(0, "Timestamp", &now.strftime("%a %b %e %H:%M:%S %Y").to_string());
    line(0, "Driver Version", &format!("{DRIVER_VERSION} (simulated)"));
    line(0, "CUDA Version", &cuda_version(measured));
    text.push('\n');
    let _ = writeln!(text, "{:<50}: {}", "Attached GPUs", measured.machine.spec.count);
    let has = |section: &str| sections.is_empty() || sections.iter().any(|name| name == section);
    for &card in cards {
        let _ = writeln!(text, "GPU {}", identity::long_bus_id(card));
        let mut line = |depth: usize, name: &str, field: &str| {
            let name = format!("{}{name}", "    ".repeat(depth));
            let value = if field.is_empty() {
                String::new()
            } else {
                format!(": {}", of_card(measured, card, field, &now).log())
            };
            let _ = writeln!(text, "{}", format!("{name:<50}{value}").trim_end());
        };
        if sections.is_empty() {
            line(1, "Product Name", "name");
            line(1, "Display Mode", "display_mode");
            line(1, "Display Active", "display_active");
            line(1, "Persistence Mode", "persistence_mode");
            line(1, "Serial Number", "serial");
            line(1, "GPU UUID", "uuid");
            line(1, "Minor Number", "index");
            line(1, "VBIOS Version", "vbios_version");
            line(1, "PCI", "");
            line(2, "Bus", "pci.bus");
            line(2, "Device", "pci.device");
            line(2, "Domain", "pci.domain");
            line(2, "Bus Id", "pci.bus_id");
            line(1, "Fan Speed", "fan.speed");
            line(1, "Performance State", "pstate");
        }
        if has("MEMORY") {
            line(1, "FB Memory Usage", "");
            line(2, "Total", "memory.total");
            line(2, "Reserved", "memory.reserved");
            line(2, "Used", "memory.used");
            line(2, "Free", "memory.free");
        }
        if sections.is_empty() {
            line(1, "Compute Mode", "compute_mode");
        }
        if has("UTILIZATION") {
            line(1, "Utilization", "");
            line(2, "Gpu", "utilization.gpu");
            line(2, "Memory", "utilization.memory");
        }
        if has("ECC") {
            line(1, "ECC Mode", "");
            line(2, "Current", "ecc.mode.current");
            line(2, "Pending", "ecc.mode.pending");
            line(1, "ECC Errors", "");
            line(2, "Volatile", "");
            line(3, "Correctable Total", "ecc.errors.corrected.volatile.total");
            line(3, "Uncorrectable Total", "ecc.errors.uncorrected.volatile.total");
        }
        if sections.is_empty() {
            line(1, "Max Clocks", "");
            line(2, "Graphics", "clocks.max.graphics");
            line(2, "SM", "clocks.max.sm");
            line(2, "Memory", "clocks.max.memory");
        }
        if has("PIDS") {
            let apps = apps(measured, &[card]);
            let _ = writeln!(text, "    {:<46}{}", "Processes", if apps.is_empty() { ": None" } else { "" });
            for app in apps {
                for (name, value) in [
                    ("    Process ID", app.pid.to_string()),
                    ("        Type", "C".to_owned()),
                    ("        Name", app.name),
                    ("        Used GPU Memory", format!("{} MiB", app.bytes >> 20)),
                ] {
                    let _ = writeln!(text, "    {name:<46}: {value}");
                }
            }
        }
    }
    text.lines().map(|line| format!("{}\n", line.trim_end())).collect()
}
