//! `memtrace mcp`, asked by the Python SDK of the protocol.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::Stdio;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::command::fixtures;
use crate::common::running::wait_until;
use crate::common::torch::{Torch, built, clean, succeeded, text};
use crate::common::venv;

/// The answers of one session of a client.
struct Session(Value);

impl Session {
    /// Starts `memtrace mcp ARGUMENTS` in `folder` and calls the tools one after the other. Returns `None` if
    /// the client is not installed.
    fn new(folder: &Path, arguments: &[&str], calls: &Value) -> Option<Session> {
        let python = venv::users_python()?;
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scripts/mcp/client.py");
        let mut client = clean(&python);
        client.current_dir(folder).arg(script).arg(calls.to_string()).arg(built("memtrace")).arg("mcp");
        let output = client.args(arguments).output().unwrap();
        Some(Session(serde_json::from_str(&succeeded("client.py", &output)).unwrap()))
    }

    /// Returns the text of the answer to the call `at`, which must have succeeded.
    fn text(&self, at: usize) -> &str {
        let answer = &self.0["answers"][at];
        assert_eq!(answer["error"], false, "{answer}");
        answer["text"].as_str().unwrap()
    }

    /// Returns the message with which the call `at` failed.
    fn error(&self, at: usize) -> &str {
        let answer = &self.0["answers"][at];
        assert_eq!(answer["error"], true, "{answer}");
        answer["text"].as_str().unwrap()
    }
}

/// Returns the text without the absolute path of the fixtures. The server resolves the paths of its calls.
fn here(text: &str) -> String {
    text.trim().replace(&format!("{}/", fixtures().display()), "")
}

/// Returns what the command line prints.
fn printed(arguments: &[&str]) -> String {
    let output = clean(&built("memtrace")).args(arguments).current_dir(fixtures()).output().unwrap();
    succeeded("memtrace", &output)
}

#[test]
fn mcp_answers_as_the_command_line_does_and_stays_in_its_folders() {
    let calls = json!([
        ["list_runs", {}],
        ["summary", {"trace": "gpt"}],
        ["peak", {"trace": "gpt", "by": "module", "json": true}],
        ["oom", {"trace": "oom-big"}],
        ["diff", {"before": "gpt", "after": "conv", "top": 2}],
        ["help", {"topic": ["columns"]}],
        ["budget", {"trace": "gpt", "limits": "absent.toml"}],
        ["peak", {"trace": "../.."}],
        ["peak", {"trace": "gpt", "by": "nothing"}],
        ["peak", {"trace": "--help"}],
        ["run", {"command": ["true"]}],
        ["peak", {"trace": "gpt", "offset": -1}],
        ["peak", {"trace": "gpt", "output": "x"}],
        ["check", {"trace": "gpt"}],
        ["summary", {"trace": "gpt", "offset": 1e3}],
    ]);
    let Some(session) = Session::new(&fixtures(), &[], &calls) else { return };
    assert_eq!(session.0["server"], "memtrace");
    let tools = session.0["tools"].as_object().unwrap();
    assert!(tools.contains_key("leaks") && !tools.contains_key("run") && !tools.contains_key("report"));
    assert!(tools["peak"]["properties"]["by"]["enum"].as_array().unwrap().contains(&json!("module")));
    assert!(tools["diff"]["required"].as_array().unwrap().contains(&json!("before")));
    assert!(session.text(0).contains("\"oom-big\""), "{}", session.text(0));
    assert_eq!(here(session.text(1)), printed(&["summary", "gpt"]).trim());
    let peak = here(session.text(2));
    assert_eq!(peak, printed(&["peak", "gpt", "--by", "module", "--json"]).trim());
    assert_eq!(here(session.text(3)), printed(&["oom", "oom-big"]).trim());
    assert!(session.text(4).contains("conv"), "{}", session.text(4));
    assert!(session.text(5).contains("alloc_id"));
    assert!(session.error(6).contains("absent.toml: no such file"));
    assert!(session.error(7).contains("outside the folders"));
    assert!(session.error(8).contains("module"), "{}", session.error(8));
    assert!(session.error(9).contains("no such file"), "{}", session.error(9));
    assert!(session.error(10).contains("--allow-run"));
    assert!(session.error(11).contains("offset"));
    assert!(session.error(12).contains("no argument \"output\""));
    assert!(session.text(13).contains("\nok "), "{}", session.text(13));
    let (whole, rest) = (session.text(1).trim_end(), session.text(14).trim_end());
    assert!(rest.len() < whole.len() && whole.ends_with(rest), "{rest}");
}

/// An agent finds an OOM (`run`), its cause (`oom`) and a change (`advise`), and checks the change (`fit`).
/// Then it writes a page, and is refused a page outside the allowed folders.
#[test]
fn mcp_leads_an_agent_from_an_oom_to_a_checked_change() {
    let Some(torch) = Torch::installed("2.11.0") else { return };
    let folder = TempDir::new().unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/train_vit.py");
    let program = |options: &[&str]| -> Vec<String> {
        let words = [torch.python.to_str().unwrap(), script.to_str().unwrap(), "--no-grad"];
        words.iter().chain(options).map(|word| (*word).to_owned()).collect()
    };
    let calls = json!([
        ["run", {"phantom": "rtx4090", "out": "first", "command": program(&[])}],
        ["oom", {"trace": "first"}],
        ["advise", {"trace": "first", "checkpoint": "ViT.blocks.*"}],
        ["fit", {"phantom": "rtx4090", "values": "64", "command": program(&["--checkpoint", "--batch", "{}"])}],
        ["report", {"trace": ["first"], "output": "page.html"}],
        ["report", {"trace": ["first"], "output": "/tmp/page.html"}],
    ]);
    let Some(session) = Session::new(folder.path(), &["--allow-run", "."], &calls) else { return };
    assert!(session.text(0).contains("out of memory"), "{}", session.text(0));
    assert!(session.text(1).contains("verdict: too big"), "{}", session.text(1));
    assert!(session.text(1).contains("--checkpoint 'ViT.blocks.*'"), "{}", session.text(1));
    assert!(session.text(2).contains("ViT.blocks"), "{}", session.text(2));
    assert!(session.text(3).contains("   64  fits "), "{}", session.text(3));
    session.text(4);
    assert!(folder.path().join("page.html").is_file());
    assert!(session.error(5).contains("outside the folders"));
}

#[test]
fn mcp_ends_the_program_of_a_call_when_a_signal_ends_the_server() {
    use rustix::process::Signal;
    ends_the_program(Signal::TERM);
    ends_the_program(Signal::KILL);
}

/// Ends a server with a signal while a program runs, which must end, too.
fn ends_the_program(signal: rustix::process::Signal) {
    let folder = TempDir::new().unwrap();
    let mut server = clean(&built("memtrace"));
    server.args(["mcp", "--allow-run", "."]).current_dir(folder.path());
    let mut server = server.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    // The program writes its id into a file and then sleeps.
    let program = ["sh", "-c", "echo $$ > id.part; mv id.part id; exec sleep 600"];
    let calls = [
        json!({"id": 1, "method": "initialize", "params": {
            "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"},
        }}),
        json!({"method": "notifications/initialized"}),
        json!({"id": 2, "method": "tools/call", "params": {"name": "run", "arguments": {"command": program}}}),
    ];
    let stdin = server.stdin.as_mut().unwrap();
    for mut call in calls {
        call["jsonrpc"] = "2.0".into();
        writeln!(stdin, "{call}").unwrap();
    }
    let id = folder.path().join("id");
    wait_until("the start of the program", || id.exists());
    let program = Path::new("/proc").join(std::fs::read_to_string(id).unwrap().trim()).join("cmdline");
    let is_running = || std::fs::read(&program).is_ok_and(|line| line.starts_with(b"sleep"));
    wait_until("the sleep of the program", is_running);
    let pid = rustix::process::Pid::from_child(&server);
    rustix::process::kill_process(pid, signal).unwrap();
    let status = server.wait().unwrap();
    if signal == rustix::process::Signal::TERM {
        assert_eq!(status.code(), Some(128 + 15));
    }
    wait_until("the end of the program", || !is_running());
}

/// Two calls that are open at the same time get their own answers, and a call that ends first answers first.
#[test]
fn mcp_answers_two_calls_at_once() {
    let folder = TempDir::new().unwrap();
    let mut server = clean(&built("memtrace"));
    server.args(["mcp", "--allow-run", "."]).arg(fixtures()).current_dir(folder.path());
    let mut server = server.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    // The program of the first call ends when the second call has been answered.
    let program = ["sh", "-c", "until [ -e answered ]; do sleep 0.02; done"];
    let gpt = fixtures().join("gpt");
    let call = |id: u32, name: &str, arguments: Value| {
        let params = json!({"name": name, "arguments": arguments});
        json!({"id": id, "method": "tools/call", "params": params})
    };
    let calls = [
        json!({"id": 1, "method": "initialize", "params": {
            "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"},
        }}),
        json!({"method": "notifications/initialized"}),
        call(2, "run", json!({"command": program, "quiet": true})),
        call(3, "summary", json!({"trace": gpt})),
    ];
    let stdin = server.stdin.as_mut().unwrap();
    for mut call in calls {
        call["jsonrpc"] = "2.0".into();
        writeln!(stdin, "{call}").unwrap();
    }
    let mut answers = BufReader::new(server.stdout.take().unwrap()).lines();
    let mut next = || serde_json::from_str::<Value>(&answers.next().unwrap().unwrap()).unwrap();
    assert_eq!(next()["id"], 1);
    let summary = next();
    assert_eq!(summary["id"], 3, "{summary}");
    assert!(summary["result"].to_string().contains("peak"), "{summary}");
    std::fs::write(folder.path().join("answered"), "").unwrap();
    let run = next();
    assert_eq!(run["id"], 2, "{run}");
    drop(server.stdin.take());
    assert!(server.wait().unwrap().success());
}

#[test]
fn mcp_refuses_what_is_no_folder_and_a_stdin_without_a_client() {
    let folder = TempDir::new().unwrap();
    std::fs::write(folder.path().join("file"), "").unwrap();
    for (argument, stdin, why) in [
        ("absent", "", "absent: No such file"),
        ("file", "", "file is not a folder"),
        (".", "", "no MCP client on stdin"),
        (".", "garbage\n", "no MCP client on stdin"),
    ] {
        std::fs::write(folder.path().join("stdin"), stdin).unwrap();
        let stdin = std::fs::File::open(folder.path().join("stdin")).unwrap();
        let mut server = clean(&built("memtrace"));
        let output = server.args(["mcp", argument]).current_dir(folder.path()).stdin(stdin).output().unwrap();
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{argument}: {said}");
        assert!(said.contains(why), "{argument}: {said}");
    }
}
