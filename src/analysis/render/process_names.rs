//! The name of each process of a run, which has its rank, its script, or both.

use crate::read::input::Input;
use crate::read::stream::TraceFile;

/// Returns the name of the process of `trace` among the processes of `input`, with its process id: `rank 1 of
/// this run (pid 4711)`. The name has the script if the run has a single rank, or if another process of the
/// run started this one.
pub(crate) fn process_name(trace: &TraceFile, input: &Input) -> String {
    let meta = &trace.meta;
    let is_worker = parent(trace, input).is_some();
    let script = script(&meta.argv);
    let name = match (meta.world_size > 1, is_worker) {
        (true, false) => format!("rank {} of this run", meta.rank),
        (true, true) => format!("worker process of rank {}, {script}", meta.rank),
        (false, true) => format!("worker process of this run, {script}"),
        (false, false) => format!("process of this run, {script}"),
    };
    format!("{name} (pid {})", trace.pid())
}

/// Returns `rank 1`, or the name of the process if other processes of `input` have that rank too.
pub(crate) fn rank_or_name(trace: &TraceFile, input: &Input) -> String {
    let rank = trace.meta.rank;
    let same = input.traces.iter().filter(|other| other.meta.rank == rank).count();
    if same > 1 { process_name(trace, input) } else { format!("rank {rank}") }
}

/// Returns the nearest ancestor of the process of `trace` that has a trace in `input`.
pub(crate) fn parent<'a>(trace: &TraceFile, input: &'a Input) -> Option<&'a TraceFile> {
    let ancestors = &trace.meta.ancestors;
    let distance = |other: &TraceFile| {
        let pid: u32 = other.pid().parse().ok()?;
        ancestors.iter().position(|ancestor| *ancestor == pid)
    };
    let same_host = input.traces.iter().filter(|other| other.meta.host == trace.meta.host);
    let found = same_host.filter_map(|other| Some((distance(other)?, other)));
    found.min_by_key(|(distance, _)| *distance).map(|(_, other)| other)
}

/// Returns the script or module that a command line starts with Python, without its folder. If there is no
/// script or module, returns the program.
fn script(argv: &[String]) -> &str {
    let mut words = argv.iter().map(String::as_str);
    let program = words.next().map_or("a program", file_name);
    if !program.starts_with("python") {
        return program;
    }
    while let Some(word) = words.next() {
        match word {
            "-m" => return words.next().unwrap_or(program),
            "-c" => return program,
            "-X" | "-W" => _ = words.next(),
            option if option.starts_with('-') => {}
            script => return file_name(script),
        }
    }
    program
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_script_of_a_command_line_is_found_after_the_options_of_python() {
        let script_of = |line: &str| -> String {
            let argv: Vec<String> = line.split(' ').map(str::to_owned).collect();
            script(&argv).to_owned()
        };
        assert_eq!(script_of("/usr/bin/python3 -u -X dev /home/me/train.py --lr 1"), "train.py");
        assert_eq!(script_of("python -m torch.distributed.run a.py"), "torch.distributed.run");
        assert_eq!(script_of("python -c pass"), "python");
        assert_eq!(script_of("/opt/bin/server --port 1"), "server");
        assert_eq!(script(&[]), "a program");
    }
}
