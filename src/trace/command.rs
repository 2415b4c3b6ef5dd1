//! The name of a program, from its command line.

/// Returns the script or module that a command line starts with Python, without its folder. If there is no
/// script or module, returns the program.
#[must_use]
pub fn script(argv: &[String]) -> &str {
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
