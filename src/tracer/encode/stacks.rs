//! Writes the stacks of an encoder to the file of stacks.

use std::io::{self, Write};

use memtrace_trace::stacks::StackWriter;

use crate::encoder::Encoder;

/// Writes the stacks that are not in the file yet and returns their number.
///
/// # Errors
/// The writer's.
pub fn write_stacks<W: Write>(writer: &mut StackWriter<W>, encoder: &mut Encoder) -> io::Result<usize> {
    let stacks = encoder.new_stacks();
    for stack in &stacks {
        writer.write(stack)?;
    }
    writer.flush()?;
    Ok(stacks.len())
}
