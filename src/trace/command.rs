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
        let Some(options) = word.strip_prefix('-') else { return file_name(word) };
        match options {
            // Python reads the program from stdin.
            "" => return program,
            "-" => return words.next().map_or(program, file_name),
            "-check-hash-based-pycs" => _ = words.next(),
            long if long.starts_with('-') => {}
            _ => {
                // Several options may share a dash. The rest of the word, or the next word, is the value of the
                // first one that takes a value.
                let Some(at) = options.find(['c', 'm', 'X', 'W']) else { continue };
                let (option, rest) = options[at..].split_at(1);
                let value = if rest.is_empty() { words.next() } else { Some(rest) };
                match option {
                    "c" => return program,
                    "m" => return value.unwrap_or(program),
                    _ => {}
                }
            }
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
        assert_eq!(script_of("python -mserver --token abc"), "server");
        assert_eq!(script_of("python -um server --token abc"), "server");
        for line in ["python -c pass", "python -uc pass", "python -Ecpass a.py", "python - abc"] {
            assert_eq!(script_of(line), "python", "{line}");
        }
        for line in ["python -Xdev a.py", "python -uWignore a.py", "python -bW ignore a.py", "python -- a.py"]
        {
            assert_eq!(script_of(line), "a.py", "{line}");
        }
        assert_eq!(script_of("python --check-hash-based-pycs always a.py"), "a.py");
        assert_eq!(script_of("/opt/bin/server --port 1"), "server");
        assert_eq!(script(&[]), "a program");
    }
}
