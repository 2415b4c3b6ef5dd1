//! Console blocks of the documentation, for tests that compare them with the output of their commands.

use std::path::Path;

/// Returns the arguments of the first command of memtrace in a page's first console block, and its output as shown.
pub(crate) fn first_command(page: &str) -> (Vec<String>, String) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(page);
    let text = std::fs::read_to_string(path).unwrap();
    let block =
        text.split("```console\n$ memtrace ").nth(1).expect("a console block").split("```").next().unwrap();
    let (command, output) = block.split_once('\n').unwrap();
    (command.split_whitespace().map(str::to_owned).collect(), output.to_owned())
}

/// Replaces each number by `N`, because process ids, steps and sizes differ between runs.
pub(crate) fn without_numbers(text: &str) -> String {
    let mut result = String::new();
    for letter in text.chars() {
        match letter {
            '0'..='9' if result.ends_with('N') => {}
            '0'..='9' => result.push('N'),
            _ => result.push(letter),
        }
    }
    result
}
