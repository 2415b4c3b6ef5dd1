//! The terminal of `memtrace live`: alternate screen, raw keys, no cursor. The terminal is restored on every
//! exit, including a panic.

use std::fs::File;
use std::io::{IsTerminal, Write, stdin, stdout};
use std::time::Duration;

use anyhow::Result;
use crossterm::{cursor, execute, queue, style, terminal};

use crate::signals;

/// The terminal in its altered state, restored when dropped.
pub(super) struct Screen {
    raw: bool,
}

impl Screen {
    /// Switches to the alternate screen.
    ///
    /// # Errors
    /// When the terminal refuses.
    pub(super) fn enter() -> Result<Screen> {
        // If stdin is not a terminal, there are no keys to read. The user can quit with Ctrl-C.
        let raw = stdin().is_terminal();
        if raw {
            terminal::enable_raw_mode()?;
        }
        let screen = Screen { raw };
        std::thread::Builder::new().name("terminal".to_owned()).spawn(move || end_without_terminal(raw))?;
        execute!(stdout(), terminal::EnterAlternateScreen, cursor::Hide)?;
        // Restore the terminal before a panic prints its message. The alternate screen would hide the
        // message.
        let default = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            restore(raw);
            default(info);
        }));
        Ok(screen)
    }

    /// Returns the number of columns and lines.
    pub(super) fn size(&self) -> (usize, usize) {
        let (width, height) = terminal::size().unwrap_or((100, 40));
        (usize::from(width.max(20)), usize::from(height.max(5)))
    }

    /// Replaces the content of the screen with `lines`, in one update to avoid flicker.
    ///
    /// # Errors
    /// When the terminal cannot be written to.
    pub(super) fn show(&self, lines: &[String]) -> Result<()> {
        let mut out = stdout().lock();
        queue!(out, terminal::BeginSynchronizedUpdate, cursor::MoveTo(0, 0))?;
        let (_, height) = self.size();
        for (row, line) in lines.iter().take(height).enumerate() {
            queue!(
                out,
                cursor::MoveTo(0, row as u16),
                style::Print(line),
                terminal::Clear(terminal::ClearType::UntilNewLine)
            )?;
        }
        if lines.len() < height {
            queue!(
                out,
                cursor::MoveTo(0, lines.len() as u16),
                terminal::Clear(terminal::ClearType::FromCursorDown)
            )?;
        }
        queue!(out, terminal::EndSynchronizedUpdate)?;
        out.flush()?;
        Ok(())
    }
}

/// Waits until the terminal is gone, and then ends the process as SIGHUP would. crossterm reads from a closed
/// terminal without end, so the main thread may never see the signal.
fn end_without_terminal(is_stdin: bool) {
    loop {
        std::thread::sleep(Duration::from_secs(1));
        let is_there = if is_stdin { stdin().is_terminal() } else { File::open("/dev/tty").is_ok() };
        if !is_there {
            signals::end_by(signal_hook::consts::SIGHUP);
        }
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        restore(self.raw);
    }
}

fn restore(raw: bool) {
    execute!(stdout(), terminal::LeaveAlternateScreen, cursor::Show).ok();
    if raw {
        terminal::disable_raw_mode().ok();
    }
}
