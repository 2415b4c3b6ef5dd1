//! The command line of this process or, for a worker process of `multiprocessing`, of the program that
//! started it.

/// Returns the command line of the program. This is the command line of this process, unless the process is a
/// worker of Python's `multiprocessing`, which runs `python -c 'from multiprocessing.spawn ...'`. For a
/// worker, it is the command line of the nearest ancestor that is not a worker. `ancestors` are process ids,
/// the parent's first.
pub(crate) fn of_program(ancestors: &[u32]) -> Vec<String> {
    let own = own();
    if !is_of_multiprocessing(&own) {
        return own;
    }
    let mut lines = ancestors.iter().map_while(|process| {
        let line = std::fs::read(format!("/proc/{process}/cmdline")).ok()?;
        let words = line.strip_suffix(b"\0").unwrap_or(&line).split(|byte| *byte == 0);
        Some(words.map(|word| String::from_utf8_lossy(word).into_owned()).collect::<Vec<_>>())
    });
    lines.find(|line| !is_of_multiprocessing(line)).filter(|line| !line[0].is_empty()).unwrap_or(own)
}

fn own() -> Vec<String> {
    std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect()
}

/// Returns true if this is a worker process that `multiprocessing` started as a new program.
pub(crate) fn is_worker() -> bool {
    is_of_multiprocessing(&own())
}

/// Returns true if `words` is a command line with which `multiprocessing` starts a worker process.
fn is_of_multiprocessing(words: &[String]) -> bool {
    words.iter().skip(1).any(|word| {
        word.starts_with("from multiprocessing.spawn import")
            || word.starts_with("from multiprocessing.forkserver import")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commands_of_multiprocessing_are_known() {
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        let spawned = "from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5, pipe_handle=7)";
        assert!(is_of_multiprocessing(&words(&["python", "-c", spawned, "--multiprocessing-fork"])));
        assert!(is_of_multiprocessing(&words(&[
            "python",
            "-B",
            "-c",
            "from multiprocessing.forkserver import main"
        ])));
        assert!(!is_of_multiprocessing(&words(&["python", "serve.py"])));
        assert!(!is_of_multiprocessing(&words(&["from multiprocessing.spawn import spawn_main"])));
    }
}
