//! The one thread that does I/O: drains the chunks, encodes, writes, flushes.

use std::fs::File;
use std::io::{self, Seek, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crossbeam_channel::{RecvTimeoutError, Sender};
use memtrace_encode::stacks::write_stacks;
use memtrace_encode::{Encoder, RowSink};
use memtrace_trace::config::{Auto, Compression, Level};
use memtrace_trace::csv::RowWriter;
use memtrace_trace::end_row::Ending;
use memtrace_trace::event_bytes::bytes_of;
use memtrace_trace::files;
use memtrace_trace::journal::names_path;
use memtrace_trace::stacks::StackWriter;
use memtrace_trace::units::Unit;
use memtrace_trace::{Event, Meta, Row, SCHEMA_VERSION};

use crate::clock::{self, Ruler};
use crate::queue::merge::Merge;
use crate::recorder::{Command, Recorder};
use crate::write::oom_message::{Shortage, out_of_memory_lines};
use crate::write::output;
use crate::write::sampling::Sampler;

/// How long the end waits for events that threads are in the middle of.
const LAST_EVENTS: Duration = Duration::from_millis(100);
/// How long a flush does.
const FLUSHED_EVENTS: Duration = Duration::from_secs(1);
/// How often the chunks are looked at. Nobody wakes this thread for a full chunk: that would cost the
/// hook a system call, and in this time the fastest program fills a small part of the pool.
const LOOK: Duration = Duration::from_millis(20);
/// How often a thread that has nothing to do looks whether it is the last one.
const LOOK_FOR_OTHERS: Duration = Duration::from_millis(500);
/// Events that are encoded between two flushes when there are many.
const PART: usize = 16 << 10;
/// How long after an OOM its lines wait for the tags of what models hold: Python's main thread tells them, and
/// it may be in a long call.
const TAGS: Duration = Duration::from_secs(3);
/// OOMs whose holders are told; a script that looks for its batch size makes many.
const TOLD_OOMS: u32 = 3;

/// Starts the thread with every signal blocked: the program's handlers must not run on it.
pub(crate) fn spawn(recorder: &'static Recorder) -> io::Result<JoinHandle<()>> {
    start_thread("memtrace", 512 << 10, move || {
        if catch_unwind(AssertUnwindSafe(|| Writer::run(recorder))).is_err() {
            recorder.close();
            (recorder.session.say)(
                "the trace ends early by a defect of memtrace; when the program has ended, memtrace check --repair finishes it",
            );
            if !recorder.is_finishing() {
                answer_until_finish(recorder);
            }
        }
    })
}

fn say_shortage(
    recorder: &Recorder,
    encoder: &Encoder,
    shortage: Option<Shortage>,
    meta: &Meta,
    trace: &Path,
) {
    if let Some(shortage) = shortage {
        for line in out_of_memory_lines(encoder, &shortage, meta, trace) {
            (recorder.session.say)(&line);
        }
    }
}

fn start_thread(
    name: &str,
    stack: usize,
    work: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    // SAFETY: all zero is a value of the plain set; the calls get valid places and cannot fail so.
    let mut before: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: as above.
    unsafe {
        let mut all = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
    }
    let thread = std::thread::Builder::new().name(name.to_owned()).stack_size(stack).spawn(work);
    // SAFETY: `before` is the mask that the first call filled in.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut()) };
    thread
}

/// Rows into the file.
struct Sink(RowWriter<File>);

impl RowSink for Sink {
    type Error = io::Error;
    fn row(&mut self, row: &Row<'_>) -> io::Result<()> {
        self.0.write(row)
    }
}

/// The file of definitions beside the journal: only `check --repair` reads it, and a clean end removes
/// it. When it cannot be written a repaired trace has less names, and that is all.
struct Names {
    file: Option<File>,
    waiting: Vec<u8>,
    length: u64,
}

impl Names {
    fn new(journal: Option<&Path>) -> Names {
        let file = journal.and_then(|journal| output::create_private(&names_path(journal)).ok());
        Names { file, waiting: Vec::new(), length: 0 }
    }

    fn add(&mut self, definition: &Event, slots: &[u8]) {
        if self.file.is_some() {
            self.waiting.extend(bytes_of(definition));
            self.waiting.extend(slots);
        }
    }

    /// Writes what waits and gives the length of the file.
    fn flush(&mut self) -> u64 {
        if let Some(file) = self.file.as_mut().filter(|_| !self.waiting.is_empty()) {
            match file.write_all(&self.waiting) {
                Ok(()) => self.length += self.waiting.len() as u64,
                Err(_) => self.file = None,
            }
            self.waiting.clear();
        }
        self.length
    }
}

struct Writer {
    recorder: &'static Recorder,
    merge: Merge,
    encoder: Encoder,
    sink: Sink,
    /// `<name>.stacks.csv`, made with the first stack.
    stacks: Option<StackWriter<File>>,
    names: Names,
    sampler: Sampler,
    /// The part that is written now, and the first one.
    path: PathBuf,
    first: PathBuf,
    /// When this part was opened, how long it was then, and how many rows there were.
    opened: Instant,
    opening_len: u64,
    opening_rows: i64,
    /// Compresses a finished part.
    packer: Option<JoinHandle<()>>,
    meta: Meta,
    ooms_told: u32,
    /// The last OOM, when it was not told yet.
    shortage: Option<Shortage>,
    /// The end was asked for: nobody asks again.
    finishing: bool,
    /// What is not in the file yet, no journal has: see [`Writer::suspend`].
    without_journal: bool,
}

impl Writer {
    fn run(recorder: &'static Recorder) {
        let say = recorder.session.say;
        let mut writer = match Writer::open(recorder) {
            Ok(writer) => writer,
            Err(why) => {
                say(&format!("not tracing: {why}"));
                recorder.close();
                recorder.pool().remove_file();
                answer_until_finish(recorder);
                return;
            }
        };
        if let Err(error) = writer.work() {
            recorder.close();
            let Writer { sink, path, finishing, .. } = writer;
            if output::cut_to_whole_lines(sink.0.get_ref(), &path).is_err() {
                // The descriptor may be the program's by now: it is not ours to close.
                std::mem::forget(sink);
            }
            say(&format!(
                "the trace ends early: {}: {error}; the program goes on untraced; free some space or set MEMTRACE_OUT",
                path.display()
            ));
            recorder.pool().remove_file();
            if !finishing {
                answer_until_finish(recorder);
            }
        }
    }

    fn open(recorder: &'static Recorder) -> Result<Writer, String> {
        let session = recorder.session;
        let name = session.named(&session.settings.name);
        let (file, path) = output::create_trace(&session.out, &name).map_err(|error| {
            format!("{}: {error}; set MEMTRACE_OUT to a folder that can be written", session.out.display())
        })?;
        recorder.pool().set_trace(&path);
        if let Some(journal) = recorder.pool().path() {
            memtrace_recover::sweep(journal);
        }
        let pid = std::process::id();
        let mut meta = Meta {
            schema: SCHEMA_VERSION.to_owned(),
            memtrace: env!("CARGO_PKG_VERSION").to_owned(),
            start_unix_ns: unix_ns_at(recorder.start_ns),
            host: session.host.clone(),
            run_id: session.settings.run_id.clone(),
            rank: session.rank,
            part: 1,
            journal: recorder.pool().path().map(|path| path.display().to_string()).unwrap_or_default(),
            ..Meta::default()
        };
        (session.describe)(&mut meta);
        if session.settings.log >= Level::Info {
            (session.say)(&format!("tracing to {}", path.display()));
        }
        Ok(Writer {
            encoder: Encoder::new(recorder.start_ns, session.rank, pid, session.rounding, session.caching),
            recorder,
            merge: Merge::default(),
            sink: Sink(RowWriter::new(file)),
            stacks: None,
            names: Names::new(recorder.pool().path()),
            sampler: Sampler::new(session.settings.sample_ms),
            first: path.clone(),
            path,
            opened: Instant::now(),
            opening_len: 0,
            opening_rows: 1,
            packer: None,
            meta,
            ooms_told: 0,
            shortage: None,
            finishing: false,
            without_journal: false,
        })
    }

    fn work(&mut self) -> io::Result<()> {
        let json = serde_json::to_string(&self.meta).map_err(io::Error::other)?;
        self.encoder.meta(&json, &mut self.sink)?;
        // Now: what a kill leaves behind is found by what this row says.
        self.flush()?;
        self.recorder.say_ready();
        let every = Duration::from_millis(self.recorder.session.settings.flush_ms);
        let mut next_flush = Instant::now() + every;
        let mut ruler = Ruler::new();
        loop {
            ruler.adjust();
            // Of an OOM that an earlier look saw; what was tagged by now is seen by the next one.
            let is_told = self.shortage.is_some() && !self.recorder.are_tags_due();
            match self.recorder.commands().recv_timeout(LOOK.min(every)) {
                Ok(Command::Finish) => return self.finish(),
                Ok(Command::Flush(done)) => {
                    // The devices of what was recorded before are known then.
                    let all = self.settle(FLUSHED_EVENTS)?;
                    self.sampler.look(self.recorder, &self.encoder);
                    self.settle(if all { FLUSHED_EVENTS } else { Duration::ZERO })?;
                    let _ = done.send(all);
                }
                Ok(Command::Nudge) => drop(self.settle(LAST_EVENTS)?),
                Ok(Command::Suspend(done)) => {
                    if self.suspend(&done)? {
                        return self.finish();
                    }
                }
                Ok(Command::Resume) => {}
                Err(RecvTimeoutError::Timeout) => {
                    self.advance()?;
                    self.sampler.look_when_due(self.recorder, &self.encoder);
                }
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
            self.tell_shortage(is_told);
            if self.without_journal || Instant::now() >= next_flush {
                self.flush()?;
                next_flush = Instant::now() + every;
                if is_alone() {
                    self.recorder.let_thread_go();
                    return self.finish();
                }
            }
        }
    }

    /// Encodes what the watermark allows.
    fn advance(&mut self) -> io::Result<()> {
        let watermark = self.collect();
        self.encode(watermark)
    }

    /// Encodes everything recorded before now and flushes it; false when a thread was in the middle of something
    /// for all of `patience`.
    fn settle(&mut self, patience: Duration) -> io::Result<bool> {
        let now = clock::now_ns();
        let patience = Instant::now() + patience;
        let all = loop {
            let watermark = self.collect();
            self.encode(watermark)?;
            if watermark >= now || Instant::now() > patience {
                break watermark >= now;
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        self.flush()?;
        Ok(all)
    }

    /// Ends the trace until the process is another program, or is told that it stays what it is: then the end
    /// is taken back. True when the process ends meanwhile in another way.
    fn suspend(&mut self, done: &Sender<()>) -> io::Result<bool> {
        self.settle(LAST_EVENTS)?;
        // A part that is opened now would have no end.
        self.finishing = true;
        let place = self.encoder.place();
        let length = self.sink.0.get_ref().stream_position()?;
        self.encoder.end(clock::now_ns(), self.merge.dropped(), Ending::Exec, "", &mut self.sink)?;
        self.flush()?;
        // The journal has nothing more, and nobody will be there to remove it. Whoever is killed after an `exec`
        // that failed loses what was not flushed, so from then on everything is, as soon as it is seen.
        self.recorder.pool().remove_file();
        self.without_journal = true;
        answer(done);
        let mut waiting = 1;
        while waiting > 0 {
            match self.recorder.commands().recv() {
                Ok(Command::Suspend(done)) => {
                    waiting += 1;
                    answer(&done);
                }
                Ok(Command::Resume) => waiting -= 1,
                // What the program recorded since is in no file, and will be when it goes on.
                Ok(Command::Flush(done)) => drop(done.send(false)),
                Ok(Command::Nudge) => {}
                Ok(Command::Finish) | Err(_) => break,
            }
        }
        let mut file = self.sink.0.get_ref();
        file.set_len(length)?;
        file.seek(io::SeekFrom::Start(length))?;
        self.encoder.take_back(place);
        self.finishing = waiting > 0;
        Ok(self.finishing)
    }

    fn finish(&mut self) -> io::Result<()> {
        self.finishing = true;
        self.recorder.close();
        let patience = Instant::now() + LAST_EVENTS;
        self.collect();
        while self.merge.is_busy() && Instant::now() < patience {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.collect();
        self.encode(u64::MAX)?;
        self.tell_shortage(true);
        let more = (self.recorder.session.conclude)();
        let dropped = self.merge.dropped();
        self.encoder.end(clock::now_ns(), dropped, Ending::Exit, more.trim_end(), &mut self.sink)?;
        self.flush()?;
        self.recorder.pool().remove_file();
        self.pack(self.path.clone());
        while self.packer.as_ref().is_some_and(|packer| !packer.is_finished()) {
            self.recorder.got_on();
            std::thread::sleep(Duration::from_millis(5));
        }
        self.say_summary();
        Ok(())
    }

    /// Has a finished part compressed, one after the other and beside the writing.
    fn pack(&mut self, part: PathBuf) {
        let how = self.recorder.session.settings.compress;
        if how == Compression::Off {
            return;
        }
        let (say, log) = (self.recorder.session.say, self.recorder.session.settings.log);
        let earlier = self.packer.take();
        let packer = start_thread("memtrace-pack", 2 << 20, move || {
            if let Some(earlier) = earlier {
                let _ = earlier.join();
            }
            if let Err(error) = output::compress(&part, how)
                && log >= Level::Warn
            {
                say(&format!("{}: stays uncompressed: {error}", part.display()));
            }
        });
        self.packer = packer.ok();
    }

    /// Is it time for a new part?
    fn is_full(&self, csv_len: u64) -> bool {
        let settings = &self.recorder.session.settings;
        let (bytes, secs) = (settings.rotate_bytes, settings.rotate_secs);
        // What opens a part does not count: else much live memory would make a part for every row.
        let is_long = bytes > 0 && csv_len.saturating_sub(self.opening_len) >= bytes;
        let is_old = secs > 0 && self.opened.elapsed() >= Duration::from_secs(secs);
        (is_long || is_old) && !self.finishing && self.encoder.rows() > self.opening_rows
    }

    /// Goes on in a new part. Everything is flushed. A kill at any moment finds a journal that belongs to
    /// one of the two parts, and that part has all that came before.
    fn rotate(&mut self, names_len: u64) -> io::Result<()> {
        let now = clock::now_ns();
        // The row waits in the old part's buffer until the new part is there.
        self.encoder.end(now, 0, Ending::Rotated, "", &mut self.sink)?;
        let part = self.meta.part + 1;
        let (file, path) = output::create_part(&self.first, part)?;
        let mut sink = Sink(RowWriter::new(file));
        let mut meta = Meta { part, ..self.meta.clone() };
        let make = |rows| {
            meta.opening_rows = rows;
            serde_json::to_string(&meta).unwrap_or_default()
        };
        self.encoder.open_part(now, make, &mut sink)?;
        sink.0.flush()?;
        let csv_len = sink.0.get_ref().stream_position()?;
        let path = output::publish_part(&path)?;
        self.recorder.pool().set_part(part);
        self.merge.release(self.recorder, csv_len, names_len);
        let mut old = std::mem::replace(&mut self.sink, sink);
        let done = std::mem::replace(&mut self.path, path);
        old.0.flush()?;
        self.meta.part = part;
        (self.opened, self.opening_len, self.opening_rows) = (Instant::now(), csv_len, self.encoder.rows());
        // Each part has its own file of stacks.
        self.stacks = None;
        self.encoder.stacks_are_told(0);
        if self.recorder.session.settings.log >= Level::Info {
            (self.recorder.session.say)(&format!("tracing goes on in {}", self.path.display()));
        }
        self.pack(done);
        Ok(())
    }

    fn collect(&mut self) -> u64 {
        let Writer { merge, encoder, names, recorder, .. } = self;
        merge.collect(recorder, &mut |definition, slots| {
            encoder.define(definition, slots);
            names.add(definition, slots);
        })
    }

    /// A part at a time when the threads are fast: chunks are filled again only after a flush.
    fn encode(&mut self, watermark: u64) -> io::Result<()> {
        while self.encode_part(watermark)? {
            self.flush()?;
        }
        if self.recorder.is_short() { self.flush() } else { Ok(()) }
    }

    /// True when there is more.
    fn encode_part(&mut self, watermark: u64) -> io::Result<bool> {
        self.recorder.got_on();
        let Writer { merge, encoder, sink, recorder, meta, path, ooms_told, shortage, .. } = self;
        merge.drain(watermark, PART, &mut |tid, event| {
            encoder.encode(tid, event, sink)?;
            if let Some(oom) = encoder.take_oom()
                && *ooms_told < TOLD_OOMS
                && recorder.session.settings.log >= Level::Warn
            {
                *ooms_told += 1;
                let earlier = shortage.replace(Shortage::new(encoder, oom));
                say_shortage(recorder, encoder, earlier, meta, path);
            }
            Ok::<(), io::Error>(())
        })
    }

    /// Tells of the OOM once what models hold is told, or at the end.
    fn tell_shortage(&mut self, is_told: bool) {
        let waits = |shortage: &Shortage| !is_told && shortage.since.elapsed() < TAGS;
        if !self.shortage.as_ref().is_some_and(waits) {
            let Writer { recorder, encoder, shortage, meta, path, .. } = self;
            say_shortage(recorder, encoder, shortage.take(), meta, path);
        }
    }

    /// Whole lines go to the file, and their chunks back to the pool.
    fn flush(&mut self) -> io::Result<()> {
        output::still_ours(self.sink.0.get_ref(), &self.path)?;
        let names_len = self.names.flush();
        self.write_stacks()?;
        self.sink.0.flush()?;
        let csv_len = self.sink.0.get_ref().stream_position()?;
        self.merge.release(self.recorder, csv_len, names_len);
        if self.is_full(csv_len) { self.rotate(names_len) } else { Ok(()) }
    }

    /// Before the rows that name them.
    fn write_stacks(&mut self) -> io::Result<()> {
        if !self.encoder.has_new_stacks() {
            return Ok(());
        }
        let writer = match &mut self.stacks {
            Some(writer) => writer,
            None => {
                let file = output::create_private(&files::stacks(&self.path))?;
                self.stacks.insert(StackWriter::new(file)?)
            }
        };
        write_stacks(writer, &mut self.encoder).map(|_| ())
    }

    /// What each device held at the last look, and for whom.
    fn ledger_lines(&self) -> Vec<String> {
        let show = |bytes| Unit::Auto.show(bytes);
        let line = |device: usize| {
            let (accounted, rest) = self.encoder.ledger(device as i8);
            let sample = self.encoder.sampled(device as i8);
            let used = accounted.reserved + accounted.outside + rest.total();
            let mut line =
                format!("GPU {device} at the end: {} of {} used: ", show(used), show(sample.total?));
            line += &format!("torch {}", show(accounted.reserved));
            if accounted.outside > 0 {
                line += &format!(", libraries {}", show(accounted.outside));
            }
            for (name, bytes) in rest.parts() {
                line += &format!(", {name} {}", show(bytes));
            }
            Some(line)
        };
        self.encoder.devices().filter_map(|(device, _)| line(device)).collect()
    }

    fn say_summary(&self) {
        use std::io::IsTerminal;
        let session = self.recorder.session;
        let wanted = match session.settings.summary {
            Auto::On => true,
            Auto::Off => false,
            Auto::Terminal => io::stderr().is_terminal(),
        };
        if wanted {
            (session.say)(&format!("{} rows in {}", self.encoder.rows(), self.first.display()));
            for line in self.ledger_lines() {
                (session.say)(&format!("  {line}"));
            }
            for line in self.encoder.statistics.lines() {
                (session.say)(&format!("  {line}"));
            }
            (session.say)(&format!("next: memtrace summary {}", session.out.display()));
        }
    }
}

/// The trace is over, but the process may still ask for a flush or the end.
fn answer_until_finish(recorder: &'static Recorder) {
    recorder.say_ready();
    loop {
        match recorder.commands().recv_timeout(LOOK_FOR_OTHERS) {
            Ok(Command::Finish) | Err(RecvTimeoutError::Disconnected) => return,
            Ok(Command::Suspend(done)) => answer(&done),
            // There is no trace that lacks anything.
            Ok(Command::Flush(done)) => drop(done.send(true)),
            Ok(Command::Nudge | Command::Resume) => {}
            Err(RecvTimeoutError::Timeout) if is_alone() => return recorder.let_thread_go(),
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}

/// Is this thread all that is left of the process? Its main thread may end by `pthread_exit` and leave
/// the others to go on; the process ends with the last of them, and this one must not be that.
fn is_alone() -> bool {
    let Ok(stat) = std::fs::read_to_string("/proc/self/stat") else { return false };
    // The state, of the main thread, stands behind the name, which may hold anything.
    let main_is_gone = stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('Z'));
    main_is_gone && std::fs::read_dir("/proc/self/task").is_ok_and(|threads| threads.count() == 2)
}

fn answer(done: &Sender<()>) {
    let _ = done.send(());
}

/// The wall clock at a reading of the monotonic clock, ns since the Unix epoch.
fn unix_ns_at(clock_ns: u64) -> i64 {
    let ago = clock::now_ns().saturating_sub(clock_ns);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_nanos() as i64);
    now - ago as i64
}
