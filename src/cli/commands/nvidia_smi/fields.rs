//! The fields that a query of nvidia-smi can name.

use std::fmt::Write as _;

use super::refusal::{INVALID, Refusal};

/// A field that a query can name.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Field {
    /// The names of the field. The header of the CSV has the first name.
    pub(super) names: &'static [&'static str],
    /// The unit in the header; empty if the field has no unit.
    pub(super) unit: &'static str,
    /// True if the simulated card has such a value; otherwise the value prints as `[N/A]`.
    pub(super) has_value: bool,
}

macro_rules! fields {
    ($($kind:ident $($name:literal)|+ $(, $unit:literal)?;)*) => {
        &[$(Field { names: &[$($name),+], unit: fields!(@unit $($unit)?), has_value: fields!(@kind $kind) }),*]
    };
    (@unit $unit:literal) => { $unit };
    (@unit) => { "" };
    (@kind has) => { true };
    (@kind no) => { false };
}

/// The fields of `--query-gpu`, named as in `nvidia-smi --help-query-gpu` of the drivers since 450.
pub(super) static GPU: &[Field] = fields! {
    has "timestamp"; has "driver_version"; has "count"; has "name" | "gpu_name";
    no "serial" | "gpu_serial"; has "uuid" | "gpu_uuid"; has "pci.bus_id" | "gpu_bus_id";
    has "pci.domain"; has "pci.bus"; has "pci.device"; no "pci.device_id"; no "pci.sub_device_id";
    no "pcie.link.gen.current"; no "pcie.link.gen.max"; no "pcie.link.gen.gpucurrent";
    no "pcie.link.gen.gpumax"; no "pcie.link.gen.hostmax"; no "pcie.link.width.current";
    no "pcie.link.width.max"; has "index"; has "display_mode"; has "display_active";
    has "persistence_mode"; no "accounting.mode"; no "accounting.buffer_size";
    no "driver_model.current"; no "driver_model.pending"; no "vbios_version";
    no "inforom.img" | "inforom.image"; no "inforom.oem"; no "inforom.ecc"; no "inforom.pwr" | "inforom.power";
    no "gom.current" | "gpu_operation_mode.current"; no "gom.pending" | "gpu_operation_mode.pending";
    no "fan.speed", "%"; has "pstate"; no "clocks_throttle_reasons.supported" | "clocks_event_reasons.supported";
    no "clocks_throttle_reasons.active" | "clocks_event_reasons.active";
    no "clocks_throttle_reasons.gpu_idle" | "clocks_event_reasons.gpu_idle";
    no "clocks_throttle_reasons.applications_clocks_setting" | "clocks_event_reasons.applications_clocks_setting";
    no "clocks_throttle_reasons.sw_power_cap" | "clocks_event_reasons.sw_power_cap";
    no "clocks_throttle_reasons.hw_slowdown" | "clocks_event_reasons.hw_slowdown";
    no "clocks_throttle_reasons.hw_thermal_slowdown" | "clocks_event_reasons.hw_thermal_slowdown";
    no "clocks_throttle_reasons.hw_power_brake_slowdown" | "clocks_event_reasons.hw_power_brake_slowdown";
    no "clocks_throttle_reasons.sw_thermal_slowdown" | "clocks_event_reasons.sw_thermal_slowdown";
    no "clocks_throttle_reasons.sync_boost" | "clocks_event_reasons.sync_boost";
    has "memory.total", "MiB"; has "memory.reserved", "MiB"; has "memory.used", "MiB"; has "memory.free", "MiB";
    has "compute_mode"; has "compute_cap"; has "utilization.gpu", "%"; has "utilization.memory", "%";
    no "utilization.encoder", "%"; no "utilization.decoder", "%"; no "utilization.jpeg", "%";
    no "utilization.ofa", "%"; no "encoder.stats.sessionCount"; no "encoder.stats.averageFps";
    no "encoder.stats.averageLatency"; has "ecc.mode.current"; has "ecc.mode.pending";
    no "ecc.errors.corrected.volatile.device_memory"; no "ecc.errors.corrected.volatile.dram";
    no "ecc.errors.corrected.volatile.register_file"; no "ecc.errors.corrected.volatile.l1_cache";
    no "ecc.errors.corrected.volatile.l2_cache"; no "ecc.errors.corrected.volatile.texture_memory";
    no "ecc.errors.corrected.volatile.cbu"; no "ecc.errors.corrected.volatile.sram";
    has "ecc.errors.corrected.volatile.total"; no "ecc.errors.corrected.aggregate.device_memory";
    no "ecc.errors.corrected.aggregate.dram"; no "ecc.errors.corrected.aggregate.sram";
    has "ecc.errors.corrected.aggregate.total"; no "ecc.errors.uncorrected.volatile.device_memory";
    no "ecc.errors.uncorrected.volatile.dram"; no "ecc.errors.uncorrected.volatile.register_file";
    no "ecc.errors.uncorrected.volatile.l1_cache"; no "ecc.errors.uncorrected.volatile.l2_cache";
    no "ecc.errors.uncorrected.volatile.texture_memory"; no "ecc.errors.uncorrected.volatile.cbu";
    no "ecc.errors.uncorrected.volatile.sram"; has "ecc.errors.uncorrected.volatile.total";
    no "ecc.errors.uncorrected.aggregate.device_memory"; no "ecc.errors.uncorrected.aggregate.dram";
    no "ecc.errors.uncorrected.aggregate.sram"; has "ecc.errors.uncorrected.aggregate.total";
    no "retired_pages.single_bit_ecc.count" | "retired_pages.sbe";
    no "retired_pages.double_bit.count" | "retired_pages.dbe"; no "retired_pages.pending";
    no "remapped_rows.correctable"; no "remapped_rows.uncorrectable"; no "remapped_rows.pending";
    no "remapped_rows.failure"; no "temperature.gpu"; no "temperature.gpu.tlimit"; no "temperature.memory";
    no "power.management"; no "power.draw", "W"; no "power.draw.average", "W"; no "power.draw.instant", "W";
    no "power.limit", "W"; no "enforced.power.limit", "W"; no "power.default_limit", "W";
    no "power.min_limit", "W"; no "power.max_limit", "W"; no "clocks.current.graphics" | "clocks.gr", "MHz";
    no "clocks.current.sm" | "clocks.sm", "MHz"; no "clocks.current.memory" | "clocks.mem", "MHz";
    no "clocks.current.video" | "clocks.video", "MHz"; no "clocks.applications.graphics" | "clocks.applications.gr", "MHz";
    no "clocks.applications.memory" | "clocks.applications.mem", "MHz";
    no "clocks.default_applications.graphics" | "clocks.default_applications.gr", "MHz";
    no "clocks.default_applications.memory" | "clocks.default_applications.mem", "MHz";
    has "clocks.max.graphics" | "clocks.max.gr", "MHz"; has "clocks.max.sm", "MHz";
    has "clocks.max.memory" | "clocks.max.mem", "MHz"; no "mig.mode.current"; no "mig.mode.pending";
    no "fabric.state"; no "fabric.status"; no "gsp.mode.current"; no "gsp.mode.default";
    no "c2c.mode"; no "protected_memory.total", "MiB"; no "protected_memory.used", "MiB";
    no "protected_memory.free", "MiB";
};

/// The fields of `--query-compute-apps`.
pub(super) static APPS: &[Field] = fields! {
    has "timestamp"; has "gpu_name"; has "gpu_bus_id"; no "gpu_serial"; has "gpu_uuid"; has "pid";
    has "process_name" | "name"; has "used_gpu_memory" | "used_memory", "MiB";
};

/// Parses a list of field names, separated by commas. Fails with nvidia-smi's message if a name is not in
/// `known`.
pub(super) fn parse(list: &str, known: &'static [Field]) -> Result<Vec<&'static Field>, Refusal> {
    let names = list.split(',').map(str::trim);
    names
        .map(|name| {
            let found = known.iter().find(|field| field.names.contains(&name));
            let text = || format!("Field \"{name}\" is not a valid field to query.\n");
            found.ok_or_else(|| Refusal::new(text(), INVALID))
        })
        .collect()
}

/// Returns the answer to `--help-query-gpu` or `--help-query-compute-apps`.
pub(super) fn help(switch: &str, known: &[Field]) -> String {
    let mut text = format!("List of valid properties to query for the switch \"{switch}\":\n\n");
    for field in known {
        let names: Vec<String> = field.names.iter().map(|name| format!("\"{name}\"")).collect();
        let note = if field.has_value { "" } else { "   [N/A] on a simulated card" };
        let _ = writeln!(text, "{}{note}", names.join(" or "));
    }
    text
}
