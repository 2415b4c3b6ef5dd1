//! The terminal while `memtrace live` has it: another screen, raw keys, no cursor; given back whatever
//! happens.

use std::io::{IsTerminal, Write, stdout};

use anyhow::Result;
use crossterm::{cursor, execute, queue, style, terminal};

/// The borrowed terminal.
pub(super) struct Screen {
    raw: bool,
}

impl Screen {
    /// Takes the terminal.
    pub(super) fn enter() -> Result<Screen> {
        // Without keys (stdin is no terminal) it can be watched and left with Ctrl-C.
        let raw = std::io::stdin().is_terminal();
        if raw {
            terminal::enable_raw_mode()?;
        }
        let screen = Screen { raw };
        execute!(stdout(), terminal::EnterAlternateScreen, cursor::Hide)?;
        // A panic would leave its message on a screen that is about to go.
        let default = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            give_back(raw);
            default(info);
        }));
        Ok(screen)
    }

    /// Columns and lines.
    pub(super) fn size(&self) -> (usize, usize) {
        let (width, height) = terminal::size().unwrap_or((100, 40));
        (usize::from(width.max(20)), usize::from(height.max(5)))
    }

    /// Shows lines in place of what was there, in one piece so that nothing flickers.
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

impl Drop for Screen {
    fn drop(&mut self) {
        give_back(self.raw);
    }
}

fn give_back(raw: bool) {
    execute!(stdout(), terminal::LeaveAlternateScreen, cursor::Show).ok();
    if raw {
        terminal::disable_raw_mode().ok();
    }
}
