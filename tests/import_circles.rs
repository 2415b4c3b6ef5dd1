//! Tests `scripts/parts/import-circles` on small generated crates.

use std::path::Path;
use std::process::{Command, Output};

use tempfile::TempDir;

/// Runs the script on a crate with these files.
fn import_circles(files: &[(&str, &str)], arguments: &[&str]) -> Output {
    let sources = TempDir::new().unwrap();
    let folder = sources.path().join("made_up");
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("Cargo.toml"), "").unwrap();
    for (name, code) in files {
        let path = folder.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, code).unwrap();
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/parts/import-circles");
    let mut command = Command::new("python3");
    command.arg(script).arg("--sources").arg(sources.path()).args(arguments).output().unwrap()
}

/// Checks the first line of the output, and the exit status.
fn assert_output(output: &Output, line: &str, status: i32) {
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert_eq!(stdout.lines().next(), Some(line), "{stdout}{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(status), "{stdout}");
}

#[test]
fn import_circles_fails_on_a_circle_of_four_files_and_lists_its_imports() {
    let files = [
        ("lib.rs", "mod a; mod b; mod c; mod d;"),
        ("a.rs", "use crate::b::B; pub struct A;"),
        ("b.rs", "use super::c; pub struct B;"),
        ("c.rs", "fn c() { crate::d::d() }"),
        ("d.rs", "use crate::{a::A, missing}; pub fn d() {}"),
    ];
    let output = import_circles(&files, &["--list"]);
    assert_output(&output, "made_up: 5 files, 1 circles, the largest of 4", 1);
    let stdout = String::from_utf8_lossy(&output.stdout);
    for import in ["a -> b", "b -> c", "c -> d", "d -> a"] {
        assert!(stdout.contains(import), "{stdout}");
    }
    assert_output(&import_circles(&files[..4], &[]), "made_up: 4 files, 0 circles, the largest of 1", 0);
}

#[test]
fn import_circles_accepts_three_files_and_fails_with_a_lower_limit() {
    let files = [
        ("lib.rs", "mod a; mod b; mod c;"),
        ("a.rs", "use crate::b::B;"),
        ("b.rs", "use crate::c::C;"),
        ("c.rs", "use crate::a::A;"),
    ];
    assert_output(&import_circles(&files, &[]), "made_up: 4 files, 1 circles, the largest of 3", 0);
    assert_output(
        &import_circles(&files, &["--most", "2", "made_up"]),
        "made_up: 4 files, 1 circles, the largest of 3",
        1,
    );
}

#[test]
fn import_circles_follows_reexports_to_the_file_that_defines_the_name() {
    let files = [
        ("lib.rs", "mod room; mod user;"),
        ("room/mod.rs", "mod one; mod two; pub use one::One; pub use two::*;"),
        ("room/one.rs", "use crate::user::User; pub struct One;"),
        ("room/two.rs", "use crate::user::User; pub struct Two;"),
        ("user.rs", "use crate::room::{One, Two}; pub struct User;"),
    ];
    assert_output(
        &import_circles(&files, &["--most", "2"]),
        "made_up: 5 files, 1 circles, the largest of 3",
        1,
    );
}

#[test]
fn import_circles_ignores_comments_texts_and_tests() {
    let files = [
        ("lib.rs", "mod a; mod b;"),
        (
            "a.rs",
            "const URL: &str = \"https://a\"; // use crate::b::B;\n/* crate::b */ const T: &str = r#\"crate::b::\"B\"#;\n\
             #[cfg(test)]\nuse crate::b::B;\n#[cfg(test)]\nmod tests {\n    use crate::b::B;\n}\nconst Q: char = '\"';\n",
        ),
        ("b.rs", "use crate::a::URL; pub struct B;"),
    ];
    assert_output(
        &import_circles(&files, &["--most", "1"]),
        "made_up: 3 files, 0 circles, the largest of 1",
        0,
    );
    // In an inner module `super` means the file itself, and `pub(in PATH)` is no import, so there is no
    // circle.
    let inner = "mod inner { use super::helper; pub(in crate::a) fn f() { helper() } } fn helper() {}";
    let files_with_inner = [("lib.rs", "mod a;"), ("a/mod.rs", "mod b; use b::B;"), ("a/b.rs", inner)];
    assert_output(
        &import_circles(&files_with_inner, &["--most", "1"]),
        "made_up: 3 files, 0 circles, the largest of 1",
        0,
    );
    // Code after a test module is not skipped.
    let behind = format!("{}fn last() {{ crate::b::b() }}", files[1].1);
    let files = [files[0], ("a.rs", behind.as_str()), files[2]];
    assert_output(
        &import_circles(&files, &["--most", "1"]),
        "made_up: 3 files, 1 circles, the largest of 2",
        1,
    );
}
