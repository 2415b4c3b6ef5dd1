//! Values of cards and processes, as nvidia-smi prints them.

use jiff::Zoned;
use memtrace_machine::{DRIVER_VERSION, identity, process};

use super::machines::Measured;

const MIB: u64 = 1 << 20;

/// A value of a card or of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Value {
    Text(String),
    /// A number and its unit.
    Number(u64, &'static str),
    /// The simulated card has no such value.
    Missing,
}

impl Value {
    /// Returns the value as text in a line of CSV.
    pub(super) fn csv(&self, units: bool) -> String {
        match self {
            Self::Text(text) => text.clone(),
            Self::Number(number, unit) if units && !unit.is_empty() => format!("{number} {unit}"),
            Self::Number(number, _) => number.to_string(),
            Self::Missing => "[N/A]".to_owned(),
        }
    }

    /// Returns the value as text in the listing of `-q`.
    pub(super) fn log(&self) -> String {
        if *self == Self::Missing { "N/A".to_owned() } else { self.csv(true) }
    }
}

fn text(text: impl Into<String>) -> Value {
    Value::Text(text.into())
}

fn mib(bytes: u64) -> Value {
    Value::Number(bytes / MIB, "MiB")
}

/// Returns the CUDA version of the driver, such as `13.0`.
pub(super) fn cuda_version(measured: &Measured) -> String {
    let version = measured.machine.cuda_version();
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// A process on a card, with the values that nvidia-smi shows.
pub(super) struct App {
    pub(super) card: usize,
    pub(super) pid: u32,
    pub(super) name: String,
    pub(super) bytes: u64,
}

/// Returns the processes on the given cards, with the memory that each uses on a card.
pub(super) fn apps(measured: &Measured, cards: &[usize]) -> Vec<App> {
    let machine = &measured.machine;
    let unified = machine.spec.base.unified();
    let mut apps = Vec::new();
    if unified.is_some_and(|unified| !unified.lists_processes) {
        return apps;
    }
    for &card in cards {
        for (pid, bytes) in machine.processes_on(card) {
            let name = process::name_of(pid).unwrap_or_else(|| "[Not Found]".to_owned());
            let name = memtrace_trace::text::printable(&name).into_owned();
            apps.push(App { card, pid, name, bytes });
        }
        if machine.spec.others > 0 && unified.is_none() {
            // The processes of other users (`others=`) get one line without a name. nvidia-smi cannot name
            // them, either.
            let (pid, name) = (1, "[Not Found]".to_owned());
            apps.push(App { card, pid, name, bytes: machine.spec.others });
        }
    }
    apps
}

/// Returns the value of a field of `--query-gpu`.
pub(super) fn of_card(measured: &Measured, card: usize, field: &str, now: &Zoned) -> Value {
    let machine = &measured.machine;
    let (spec, used) = (&machine.spec, machine.used(card));
    match field {
        "timestamp" => text(now.strftime("%Y/%m/%d %H:%M:%S%.3f").to_string()),
        "driver_version" => text(DRIVER_VERSION),
        "count" => Value::Number(spec.count.into(), ""),
        "name" => text(spec.name.clone()),
        "uuid" => text(identity::uuid_text(card)),
        "pci.bus_id" => text(identity::long_bus_id(card)),
        "pci.domain" => text("0x0000"),
        "pci.bus" => text(format!("0x{:02X}", identity::bus(card))),
        "pci.device" => text("0x00"),
        "index" => Value::Number(card as u64, ""),
        "persistence_mode" => text("Enabled"),
        "display_mode" | "display_active" => text("Disabled"),
        "compute_cap" => text(format!("{}.{}", spec.cc.0, spec.cc.1)),
        "compute_mode" => text("Default"),
        "pstate" => text("P0"),
        "memory.total" | "memory.reserved" | "memory.used" | "memory.free"
            if spec.base.unified().is_some() =>
        {
            Value::Missing
        }
        "memory.total" => mib(spec.memory),
        "memory.reserved" => mib(0),
        // `memory.free` is the difference of the two rounded values, so that used and free memory add up to
        // the total.
        "memory.used" => mib(used),
        "memory.free" => Value::Number(spec.memory / MIB - used / MIB, "MiB"),
        "utilization.gpu" => Value::Number(measured.utilization[card].into(), "%"),
        "utilization.memory" => Value::Number(0, "%"),
        "ecc.mode.current" | "ecc.mode.pending" => match spec.base.ecc() {
            Some(is_on) => text(if is_on { "Enabled" } else { "Disabled" }),
            None => Value::Missing,
        },
        // A card counts errors only while ECC is on.
        _ if field.starts_with("ecc.errors.") && spec.base.ecc() != Some(true) => Value::Missing,
        "ecc.errors.uncorrected.volatile.total" | "ecc.errors.uncorrected.aggregate.total" => {
            Value::Number(machine.cards[card].ecc_errors, "")
        }
        "ecc.errors.corrected.volatile.total" | "ecc.errors.corrected.aggregate.total" => {
            Value::Number(0, "")
        }
        "clocks.max.graphics" | "clocks.max.sm" => Value::Number(spec.base.clocks_mhz.0.into(), "MHz"),
        "clocks.max.memory" => Value::Number(spec.base.clocks_mhz.1.into(), "MHz"),
        _ => Value::Missing,
    }
}

/// Returns the value of a field of `--query-compute-apps`.
pub(super) fn of_app(measured: &Measured, app: &App, field: &str, now: &Zoned) -> Value {
    match field {
        "gpu_name" => of_card(measured, app.card, "name", now),
        "gpu_bus_id" => of_card(measured, app.card, "pci.bus_id", now),
        "gpu_uuid" => of_card(measured, app.card, "uuid", now),
        "timestamp" => of_card(measured, app.card, "timestamp", now),
        "pid" => Value::Number(app.pid.into(), ""),
        "process_name" => text(app.name.clone()),
        "used_gpu_memory" => mib(app.bytes),
        _ => Value::Missing,
    }
}

#[cfg(test)]
mod tests {
    use memtrace_cards::Spec;
    use memtrace_machine::files::Machine;

    use super::super::fields::{APPS, Field, GPU};
    use super::*;

    /// `fields` says which fields have a value. The functions here must agree, on a card with ECC.
    #[test]
    fn a_field_has_a_value_if_and_only_if_the_list_of_fields_says_so() {
        let machine = Machine::empty("test", Spec::parse("h100-80g").unwrap());
        let measured = Measured { machine, utilization: vec![0] };
        let app = App { card: 0, pid: 1, name: "python".to_owned(), bytes: 0 };
        let now = Zoned::now();
        let differing = |fields: &[Field], value: &dyn Fn(&str) -> Value| -> Vec<&str> {
            let differs = |field: &&Field| field.has_value == (value(field.names[0]) == Value::Missing);
            fields.iter().filter(differs).map(|field| field.names[0]).collect()
        };
        assert_eq!(differing(GPU, &|field| of_card(&measured, 0, field, &now)), [""; 0]);
        assert_eq!(differing(APPS, &|field| of_app(&measured, &app, field, &now)), [""; 0]);
    }
}
