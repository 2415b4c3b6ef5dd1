//! Writes an encoder's stacks to the stacks file.

use std::io::{self, Write};

use memtrace_trace::stacks::StackWriter;

use crate::encoder::Encoder;

/// Writes the stacks that are not yet in the file, and returns their number.
///
/// # Errors
/// Returns the writer's error.
pub fn write_stacks<W: Write>(writer: &mut StackWriter<W>, encoder: &mut Encoder) -> io::Result<usize> {
    let stacks = encoder.definitions_mut().new_stacks();
    for stack in &stacks {
        writer.write(stack)?;
    }
    writer.flush()?;
    Ok(stacks.len())
}
