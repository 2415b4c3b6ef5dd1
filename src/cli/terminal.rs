//! What the reader's terminal can show.

use std::io::IsTerminal;

/// May text on a stream be painted? `--color` says so, else `NO_COLOR`, else whether it is a terminal.
pub(crate) fn paints(choice: &str, stream: &impl IsTerminal) -> bool {
    let set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    match choice {
        "always" => true,
        "never" => false,
        _ => {
            stream.is_terminal()
                && !set("NO_COLOR")
                && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
        }
    }
}

/// The columns of the terminal behind `stream`; `None` when it is not one.
pub(crate) fn width(stream: &(impl IsTerminal + std::os::fd::AsFd)) -> Option<usize> {
    if !stream.is_terminal() {
        return None;
    }
    let size = rustix::termios::tcgetwinsize(stream).ok()?;
    (size.ws_col > 0).then_some(usize::from(size.ws_col))
}
