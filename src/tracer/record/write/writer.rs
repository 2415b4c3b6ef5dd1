//! The writer thread: it writes all files of the trace except compressed copies.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{RecvTimeoutError, Sender};
use memtrace_encode::Encoder;
use memtrace_trace::config::Level;
use memtrace_trace::end_row::{Ending, refused_names_word};
use memtrace_trace::host::{self, HostFiles};
use memtrace_trace::journal::Written;
use memtrace_trace::keep::Keep;
use memtrace_trace::{Meta, files};

use super::compress::Compressor;
use super::definitions_file::DefinitionsFile;
use super::exit_summary;
use super::limits_reached::LimitsReached;
use super::meta_row;
use super::oom_message::OomMessages;
use super::output;
use super::part::{Part, RowFile};
use super::retention::Retention;
use super::sampling::Sampler;
use super::thread::{answer_until_finish, end_like_main_thread, is_alone, start_thread};
use super::window::{Next, Window};
use crate::clock::{self, ClockFitter};
use crate::control::{Command, Control};
use crate::device_calls;
use crate::intern;
use crate::queue::event_queue::EventQueue;
use crate::queue::journal_header::MetaText;
use crate::queue::merge::{Drained, Merge, Taken};
use crate::session::Session;

/// The maximum time to wait for events that threads are recording: at the end of the trace, before an `exec`,
/// and after a nudge.
const LAST_EVENTS: Duration = Duration::from_millis(100);
/// At the end of the trace, the queue is drained repeatedly, until a pass takes less than this time.
const SHORT_PASS: Duration = Duration::from_millis(5);
/// At the end of the trace, no pass starts after this time. Threads may record as fast as the writer thread
/// writes, while the program waits for the end.
const LAST_PASS: Duration = Duration::from_millis(100);
/// The maximum time for which a flush waits for events that threads are recording.
const FLUSHED_EVENTS: Duration = Duration::from_secs(1);
/// The interval between two reads of the queue. A full chunk does not wake the writer thread, because that
/// would cost the hook a system call. In this interval, even a fast program fills only a small part of the
/// pool.
const INTERVAL: Duration = Duration::from_millis(20);
/// The interval between two marks of the journal as alive: a sweep by another process compares the journal's
/// time of change with the time for which it keeps a journal. Stores into the mapping do not change that time.
const ALIVE: Duration = Duration::from_secs(60);
/// The number of events between two flushes when the queue is long.
const BATCH: usize = 16 << 10;
/// The minimum number of events between two flushes when parts are small, because a part ends only at a
/// flush.
const SMALL_BATCH: usize = 256;
/// An upper bound for the size in bytes of the rows of a typical event.
const EVENT_BYTES: u64 = 512;

/// Starts the writer thread.
pub(crate) fn spawn(
    session: &'static Session,
    queue: &'static EventQueue,
    control: &'static Control,
    start_ns: u64,
) -> io::Result<JoinHandle<()>> {
    start_thread("memtrace", 512 << 10, move || {
        if catch_unwind(AssertUnwindSafe(|| Writer::run(session, queue, control, start_ns))).is_err() {
            queue.close();
            (session.fail)(
                "the trace ends early because of a bug in memtrace; when the program has ended, memtrace \
                 check --repair completes it",
            );
            if !control.is_finishing() {
                answer_until_finish(control);
            }
        }
        end_like_main_thread();
    })
}

/// The state of the writer thread.
struct Writer {
    session: &'static Session,
    queue: &'static EventQueue,
    control: &'static Control,
    merge: Merge,
    encoder: Encoder,
    /// `None` if the rows of every block are written.
    window: Option<Window>,
    part: Part,
    definitions: DefinitionsFile,
    sampler: Sampler,
    compressor: Compressor,
    retention: Retention,
    ooms: OomMessages,
    meta: Meta,
    /// The path of the first part.
    first: PathBuf,
    /// True if no further part may be started. If an error ends the trace while this is true, the thread ends
    /// at once instead of answering requests.
    finishing: bool,
    /// True if no journal holds the events that are not in the file yet; see [`Writer::suspend`].
    without_journal: bool,
    limits: LimitsReached,
    /// When the journal was last marked as alive.
    marked: Instant,
}

impl Writer {
    fn run(session: &'static Session, queue: &'static EventQueue, control: &'static Control, start_ns: u64) {
        let mut writer = match Writer::open(session, queue, control, start_ns) {
            Ok(writer) => writer,
            Err(why) => {
                (session.fail)(&format!("not tracing: {why}"));
                queue.close();
                queue.pool().remove_file();
                answer_until_finish(control);
                return;
            }
        };
        if let Err(error) = writer.work() {
            queue.close();
            let Writer { part: Part { rows, path, .. }, finishing, without_journal, .. } = writer;
            let is_ours = output::cut_to_whole_lines(rows.file(), &path).is_ok();
            if !is_ours {
                // The descriptor may belong to the program by now, so it must not be closed here.
                std::mem::forget(rows);
            }
            // The journal has the events that are not in the file, and counts later events.
            let is_kept = is_ours && !without_journal && queue.pool().stop_trace();
            let advice = if is_kept {
                "its journal keeps the last events: free some space, and the next command that reads the trace adds them"
            } else {
                queue.pool().remove_file();
                if is_ours {
                    "free some space or set MEMTRACE_OUT"
                } else {
                    "leave a trace in place while its program runs"
                }
            };
            (session.fail)(&format!(
                "the trace ends early: {}: {error}; the program goes on untraced; {advice}",
                path.display()
            ));
            if !finishing {
                answer_until_finish(control);
            }
        }
    }

    fn open(
        session: &'static Session,
        queue: &'static EventQueue,
        control: &'static Control,
        start_ns: u64,
    ) -> Result<Writer, String> {
        let pool = queue.pool();
        let pid = std::process::id();
        let mut meta = meta_row::first(session, pool, start_ns);
        let name = session.trace_name();
        let (file, path) =
            output::create_trace(&session.out, &name, |path| pool.set_trace(path)).map_err(|error| {
                format!(
                    "{}: {error}; set MEMTRACE_OUT to a folder that can be written",
                    session.out.display()
                )
            })?;
        if let Some(journal) = pool.path() {
            memtrace_recover::sweep(&memtrace_trace::journal::folders(), Some(journal));
        }
        (session.describe)(&mut meta);
        meta.boot = host::boot_id();
        if let Some(group) = HostFiles::default().cgroup("self") {
            (meta.cgroup, meta.cgroup_id) = (group.folder().display().to_string(), group.id());
        }
        meta_row::keep(pool, MetaText::Described, &meta);
        if session.settings.log >= Level::Info {
            (session.say)(&format!("tracing to {}", path.display()));
        }
        let mut encoder = Encoder::new(start_ns, session.rank, pid, session.rounding, session.caching);
        encoder.set_tags(session.settings.modules);
        encoder.set_buffer_bytes(session.settings.buffer_bytes as u64);
        let settings = &session.settings;
        // Without a journal, a kill would lose the events of a whole step.
        let holds = settings.has_brief_steps() && pool.path().is_some();
        let window = holds.then(|| Window::new(pool.chunks(), settings.detail.includes(0)));
        Ok(Writer {
            session,
            queue,
            control,
            merge: Merge::default(),
            encoder,
            window,
            part: Part::new(RowFile::new(file), path.clone(), 0, 1),
            definitions: DefinitionsFile::new(queue.pool().path()),
            sampler: Sampler::new(session, !meta.phantom.is_null()),
            compressor: Compressor::new(session),
            retention: Retention::new(session.settings.keep),
            ooms: OomMessages::new(session),
            meta,
            first: path,
            finishing: false,
            without_journal: false,
            limits: LimitsReached::new(session),
            marked: Instant::now(),
        })
    }

    fn work(&mut self) -> io::Result<()> {
        let json = self.meta.to_json().map_err(io::Error::other)?;
        self.encoder.meta(&json, &mut self.part.rows)?;
        // The meta row is flushed at once, because recovery uses it to find the journal of a killed process.
        self.flush()?;
        self.control.note_ready();
        let every = Duration::from_millis(self.session.settings.flush_ms);
        let mut next_flush = Instant::now() + every;
        let mut fitter = ClockFitter::new();
        loop {
            fitter.adjust();
            // True if an OOM that an earlier pass encoded is pending, and no more tags of its blocks are
            // expected. Read before the events are encoded below, so that the tags recorded by now are
            // encoded before the OOM is printed.
            let is_tagged = self.ooms.is_pending() && !self.control.expects_tags();
            match self.control.commands().recv_timeout(INTERVAL.min(every)) {
                Ok(Command::Finish) => return self.finish(),
                Ok(Command::Flush(done)) => {
                    // The events recorded so far are encoded first, because they show which devices are in
                    // use.
                    let all = self.settle(FLUSHED_EVENTS)?;
                    self.sampler.sample(self.queue, &self.encoder);
                    self.settle(if all { FLUSHED_EVENTS } else { Duration::ZERO })?;
                    let _ = done.send(all);
                }
                Ok(Command::Nudge) => {
                    // A requested sample is taken first, because memory changes on.
                    if device_calls::is_sample_requested() {
                        self.sampler.sample_when_due(self.queue, &self.encoder);
                    }
                    self.settle(LAST_EVENTS)?;
                }
                Ok(Command::Suspend(done)) => {
                    if self.suspend(&done)? {
                        return self.finish();
                    }
                }
                Ok(Command::Resume) => {}
                Err(RecvTimeoutError::Timeout) => {
                    self.advance()?;
                    if self.window.as_ref().is_some_and(Window::is_overdue) {
                        self.end_window(true)?;
                    }
                    self.sampler.sample_when_due(self.queue, &self.encoder);
                }
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
            self.ooms.print_when_tagged(is_tagged, &self.encoder, &self.meta, &self.part.path);
            if self.without_journal || Instant::now() >= next_flush {
                self.flush()?;
                self.compressor.follow(&self.part.path, self.part.rows.flush()?);
                next_flush = Instant::now() + every;
                if is_alone() {
                    self.control.detach();
                    return self.finish();
                }
            }
        }
    }

    /// Encodes the events up to the watermark.
    fn advance(&mut self) -> io::Result<()> {
        let watermark = self.collect();
        self.encode(watermark)
    }

    /// Encodes every event recorded before now and flushes it. Returns false if a thread was still recording
    /// an event after `patience`.
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
        self.end_window(false)?;
        self.flush()?;
        Ok(all)
    }

    /// Ends the trace before an `exec`, and waits for its outcome. If the `exec` fails, removes the end row
    /// again and returns false. Returns true if the process ends in another way in the meantime.
    fn suspend(&mut self, done: &Sender<()>) -> io::Result<bool> {
        self.settle(LAST_EVENTS)?;
        self.encoder.list_blocks(clock::now_ns(), &mut self.part.rows)?;
        // Without a journal, a kill would lose held events.
        self.window = None;
        // The process may be gone before a new part gets its end row, so no further part is started.
        self.finishing = true;
        // The compressed copy is discarded, because an `exec` ends its thread, and a failed `exec` removes
        // the end row again.
        self.compressor.restart();
        let place = self.encoder.place();
        let length = self.part.rows.flush()?;
        let lost = self.merge.lost(self.queue);
        self.encoder.end(clock::now_ns(), lost, Ending::Exec, "", &mut self.part.rows)?;
        self.flush()?;
        // The file has every event of the journal, and after the `exec` nobody would remove the journal. A
        // process that is killed after a failed `exec` loses events that were not flushed, so from now on
        // every pass flushes.
        self.queue.pool().remove_file();
        self.without_journal = true;
        let _ = done.send(());
        let mut waiting = 1;
        while waiting > 0 {
            match self.control.commands().recv() {
                Ok(Command::Suspend(done)) => {
                    waiting += 1;
                    let _ = done.send(());
                }
                Ok(Command::Resume) => waiting -= 1,
                // The events recorded during the suspension are in no file until the trace continues.
                Ok(Command::Flush(done)) => drop(done.send(false)),
                Ok(Command::Nudge) => {}
                Ok(Command::Finish) | Err(_) => break,
            }
        }
        self.part.truncate(length)?;
        self.encoder.take_back(place);
        self.finishing = waiting > 0;
        Ok(self.finishing)
    }

    fn finish(&mut self) -> io::Result<()> {
        // The last part takes all remaining events, whatever its size, unless `MEMTRACE_KEEP` sets a bound.
        self.finishing |= self.session.settings.keep == Keep::All;
        self.sampler.sample_end(self.queue);
        // Other threads may still record events while this thread drains the queue. The queue is closed only
        // when it is nearly empty, or after [`LAST_PASS`], so that most of these events are in the trace.
        // Later events are only counted.
        let end = Instant::now() + LAST_PASS;
        loop {
            let start = Instant::now();
            self.advance()?;
            if start.elapsed() < SHORT_PASS || Instant::now() > end {
                break;
            }
        }
        self.queue.close();
        let patience = Instant::now() + LAST_EVENTS;
        self.collect();
        while self.merge.is_busy() && Instant::now() < patience {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.collect();
        self.encode(u64::MAX)?;
        self.end_window(false)?;
        self.encoder.list_blocks(clock::now_ns(), &mut self.part.rows)?;
        self.finishing = true;
        self.ooms.print_when_tagged(true, &self.encoder, &self.meta, &self.part.path);
        let more = self.end_words();
        let (place, length) = (self.encoder.place(), self.part.flush(&mut self.encoder)?);
        let mut lost = self.merge.lost(self.queue);
        self.end(lost, &more)?;
        if self.merge.lost(self.queue) > lost {
            // Threads have recorded more events in the meantime.
            self.part.truncate(length)?;
            self.encoder.take_back(place);
            lost = self.merge.lost(self.queue);
            self.end(lost, &more)?;
        }
        self.queue.pool().remove_file();
        self.compressor.add(self.part.path.clone());
        self.compressor.finish(|| self.control.note_progress());
        self.limits.conclude(lost);
        exit_summary::print(self.session, &self.encoder, &self.first);
        Ok(())
    }

    /// Returns the additional words of the end row: the refused names, and the words of the preloaded
    /// library.
    fn end_words(&self) -> String {
        let words = refused_names_word(intern::refused()) + &(self.session.conclude)();
        words.trim_end().to_owned()
    }

    /// Writes the end row of a process that exits.
    fn end(&mut self, lost: u64, more: &str) -> io::Result<()> {
        self.encoder.end(clock::now_ns(), lost, Ending::Exit, more, &mut self.part.rows)?;
        self.flush()
    }

    /// Continues in a new part; the old part is flushed. At any moment, the journal belongs to one of the two
    /// parts, and the files have every event that the journal lacks. So no event is lost if the process is
    /// killed.
    fn rotate(&mut self, names_len: u64) -> io::Result<()> {
        // Held events follow in the new part, so its first rows are not later than them.
        let held = self.window.as_ref().and_then(Window::first_ns);
        let now = held.unwrap_or_else(clock::now_ns);
        // The opening rows of the new part need the blocks. The old part must have them before the journal
        // belongs to the new part.
        self.encoder.list_blocks(now, &mut self.part.rows)?;
        self.part.rows.flush()?;
        // The end row stays in the old part's buffer until the new part exists.
        self.encoder.end(now, 0, Ending::Rotated, "", &mut self.part.rows)?;
        let number = self.meta.part + 1;
        let (file, unfinished) = output::create_part(&self.first, number)?;
        let mut rows = RowFile::new(file);
        let mut meta = Meta { part: number, ..self.meta.clone() };
        let json = |opening_rows| {
            meta.opening_rows = opening_rows;
            meta.to_json().unwrap_or_default()
        };
        self.encoder.open_part(now, json, &mut rows)?;
        let csv_len = rows.flush()?;
        let path = files::finished_part(&unfinished);
        output::publish(&unfinished, &path)?;
        let written = Written { csv_len, names_len, reported_lost: self.encoder.reported_lost() };
        self.merge.release(self.queue, written, number);
        let part = Part::new(rows, path, csv_len, self.encoder.rows());
        let mut old = std::mem::replace(&mut self.part, part);
        old.rows.flush()?;
        self.meta.part = number;
        // Each part has a file of stacks of its own.
        self.encoder.definitions_mut().set_stacks_written(0);
        if self.session.settings.log >= Level::Info {
            (self.session.say)(&format!("tracing goes on in {}", self.part.path.display()));
        }
        let current = self.part.most_bytes(&self.session.settings);
        let removed = self.retention.add(&old.path, number - 1, &self.encoder, current);
        if self.session.settings.log >= Level::Info {
            for path in removed {
                (self.session.say)(&format!("removed {} (MEMTRACE_KEEP)", path.display()));
            }
        }
        self.compressor.add(old.path);
        Ok(())
    }

    /// Reads the queue and returns the watermark. Every event up to the watermark can be encoded.
    fn collect(&mut self) -> u64 {
        let Writer { merge, encoder, definitions, queue, .. } = self;
        merge.collect(queue, &mut |definition, slots| {
            encoder.definitions_mut().define(definition, slots);
            definitions.add(definition, slots);
        })
    }

    /// Encodes events up to `watermark`, in batches, because chunks are recycled only after a flush.
    fn encode(&mut self, watermark: u64) -> io::Result<()> {
        loop {
            match self.encode_batch(watermark)? {
                Drained::All => break,
                Drained::Most => self.flush()?,
                Drained::Stopped => self.turn_window()?,
            }
        }
        if !self.queue.is_short() {
            return Ok(());
        }
        self.end_window(true)?;
        self.flush()
    }

    /// Encodes one batch of events, or holds them in the window.
    fn encode_batch(&mut self, watermark: u64) -> io::Result<Drained> {
        self.control.note_progress();
        let Writer { merge, encoder, window, part, meta, ooms, session, .. } = self;
        let batch = match session.settings.rotate_bytes {
            0 => BATCH,
            bytes => ((bytes / EVENT_BYTES) as usize).clamp(SMALL_BATCH, BATCH),
        };
        merge.drain(watermark, batch, &mut |tid, event| {
            if let Some(window) = window {
                let switch = encoder.switches_detail(event);
                match window.next(tid, event, switch) {
                    Next::Turn => return Ok(Taken::No),
                    Next::Hold => return Ok(Taken::Yes),
                    Next::Encode => {}
                }
                match switch {
                    Some(true) => encoder.list_blocks(event.clock_ns, &mut part.rows)?,
                    Some(false) => encoder.note_listed_peaks(),
                    None => {}
                }
            }
            encoder.encode(tid, event, &mut part.rows)?;
            if let Some(oom) = encoder.take_oom() {
                ooms.add(oom, encoder, meta, &part.path);
            }
            Ok::<Taken, io::Error>(Taken::Yes)
        })
    }

    /// Ends the window if it is open, and begins one if not.
    fn turn_window(&mut self) -> io::Result<()> {
        match &mut self.window {
            Some(window) if !window.is_open() => {
                window.open();
                self.merge.hold();
                Ok(())
            }
            _ => self.end_window(true),
        }
    }

    /// Encodes the events of the window and closes it. `ages` is true if the blocks that it leaves unlisted
    /// become older by it.
    fn end_window(&mut self, ages: bool) -> io::Result<()> {
        let Writer { merge, encoder, window, part, meta, ooms, .. } = self;
        let Some(window) = window.as_mut().filter(|window| window.is_open()) else { return Ok(()) };
        let events = window.close();
        if let Some(plan) = encoder.plan_brief(&events) {
            encoder.encode_brief(&events, &plan, ages, &mut part.rows)?;
        } else {
            encoder.list_blocks(events[0].1.clock_ns, &mut part.rows)?;
            for (tid, event) in &events {
                encoder.encode(*tid, event, &mut part.rows)?;
                if let Some(oom) = encoder.take_oom() {
                    ooms.add(oom, encoder, meta, &part.path);
                }
            }
            encoder.note_listed_peaks();
        }
        window.keep(events);
        merge.let_go();
        Ok(())
    }

    /// Writes all encoded rows and recycles their chunks. Starts a new part when the current one is full.
    fn flush(&mut self) -> io::Result<()> {
        output::still_ours(self.part.rows.file(), &self.part.path)?;
        let names_len = self.definitions.flush();
        let csv_len = self.part.flush(&mut self.encoder)?;
        let written = Written { csv_len, names_len, reported_lost: self.encoder.reported_lost() };
        self.merge.release(self.queue, written, self.meta.part);
        self.limits.report_new(self.queue.pool());
        if self.marked.elapsed() > ALIVE {
            self.marked = Instant::now();
            self.queue.pool().mark_alive();
        }
        self.queue.pool().set_end_words(&self.end_words());
        let is_full = self.part.is_full(csv_len, self.encoder.rows(), &self.session.settings);
        if is_full && !self.finishing { self.rotate(names_len) } else { Ok(()) }
    }
}
