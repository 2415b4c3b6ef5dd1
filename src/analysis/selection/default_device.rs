//! The device that an answer shows when no `--device` is given.

use std::ops::ControlFlow;

use memtrace_trace::memory::MemoryKind;

use crate::error::Result;
use crate::options::Options;
use crate::read::input::Input;
use crate::read::record::{Columns, Wanted};
use crate::read::symbols::SymbolTable;
use crate::state::replay::{CPU, is_gpu};

/// Returns `options` with `--device cpu` if no process of the run used a GPU and CPU tensors were recorded. An
/// answer that can show CPU tensors then shows these. If any process used a GPU, the answer shows the GPUs.
///
/// # Errors
/// When a trace cannot be read.
pub fn with_default_device(input: &Input, options: &Options) -> Result<Options> {
    let mut options = options.clone();
    if options.device.is_some() {
        return Ok(options);
    }
    let (mut has_cpu, mut has_gpu) = (false, false);
    for trace in &input.traces {
        let columns = Wanted::all_events(Columns::of(&["device"]));
        trace.read(columns, true, &SymbolTable::default(), |row| {
            if MemoryKind::changed_by(row.event).is_some() {
                has_cpu |= row.device == CPU;
                has_gpu |= is_gpu(row.device);
            }
            if has_gpu { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        if has_gpu {
            return Ok(options);
        }
    }
    if has_cpu {
        options.device = Some(CPU);
    }
    Ok(options)
}

#[cfg(test)]
mod tests {
    use memtrace_trace::meta::Meta;
    use memtrace_trace::{EventName, Row};

    use super::*;
    use crate::testing::TraceBuilder;

    fn trace(pid: i32, device: i32) -> Vec<u8> {
        let mut trace = TraceBuilder::of_process(pid, Meta::default());
        let event = if is_gpu(device) { EventName::Alloc } else { EventName::HostAlloc };
        trace.raw(Row { event, device, alloc_id: 1, delta_bytes: 1024, ..Row::default() });
        trace.finish()
    }

    #[test]
    fn the_default_device_is_the_cpu_if_no_process_used_a_gpu() {
        let folder = std::env::temp_dir().join(format!("memtrace-device-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let device =
            |options: &Options| with_default_device(&Input::open(&folder).unwrap(), options).unwrap().device;
        let defaults = Options::default();
        std::fs::write(folder.join("a.csv"), trace(1, CPU)).unwrap();
        std::fs::write(folder.join("b.csv"), trace(2, CPU)).unwrap();
        assert_eq!(device(&defaults), Some(CPU));
        // The first process is a parent without a GPU, the second a worker with one.
        std::fs::write(folder.join("b.csv"), trace(2, 1)).unwrap();
        assert_eq!(device(&defaults), None);
        assert_eq!(device(&Options { device: Some(CPU), ..defaults }), Some(CPU));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
