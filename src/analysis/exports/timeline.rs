//! The exports `timeline`, `timeline-raw` and `timeline-html`: the output of `torch.profiler`'s
//! `export_memory_timeline`, made from [`crate::profile`]. `--device` selects the device. The default is the
//! device with the highest peak.

use std::io::Write;

use super::export::{Export, Job, OutputKind, no_gpu};
use super::out::Out;
use super::picture::escaped;
use super::plots::{categories, maxima};
use crate::error::{Error, Result};
use crate::options::{Flag, Options};
use crate::profile::{Profile, profile_and_flow};
use crate::read::record::Columns;
use crate::render::numbers::counted;
use crate::state::replay::{HOST, Metric};
use crate::state::replay_trace::{Replayed, replay_trace};

/// The export `--to timeline`.
pub(super) struct Timeline;
/// The export `--to timeline-raw`.
pub(super) struct Raw;
/// The export `--to timeline-html`.
pub(super) struct Html;

const TITLE: Flag = Flag {
    name: "title",
    value: Some("TEXT"),
    default: "GPU Memory Timeline HTML",
    choices: &[],
    help: "The title of the page and of its picture",
};

const SIZE: Flag = Flag {
    name: "size",
    value: Some("WIDTHxHEIGHT"),
    default: "1200x640",
    choices: &[],
    help: "The size of the picture in pixels",
};

/// The largest width and height of a picture, in pixels.
const LARGEST: u32 = 20_000;

/// Returns the width and the height given by `--size`.
fn size_of(options: &Options) -> Result<(f64, f64)> {
    let text = options.text(SIZE.name);
    let pixels = |text: &str| text.parse().ok().filter(|pixels| (1..=LARGEST).contains(pixels));
    let size = text.split_once('x').and_then(|(width, height)| Some((pixels(width)?, pixels(height)?)));
    match size {
        Some((width, height)) => Ok((width.into(), height.into())),
        None => Err(Error::usage(format!(
            "--{} {text}: expected a width and a height up to {LARGEST}, such as {}",
            SIZE.name, SIZE.default
        ))),
    }
}

impl Export for Timeline {
    fn name(&self) -> &'static str {
        "timeline"
    }

    fn about(&self) -> &'static str {
        "torch.profiler's memory timeline: [times in µs, rows of bytes by its eight categories]"
    }

    fn takes_host(&self) -> bool {
        true
    }

    fn output_kind(&self, _: &Options) -> OutputKind {
        OutputKind::FileEach(".timeline.json")
    }

    fn open_with(&self) -> &'static str {
        "python -ic \"import json, sys; times, sizes = json.load(open(sys.argv[1]))\" FILE"
    }

    fn write(&self, job: &mut Job<'_>) -> Result<()> {
        let DeviceProfile { profile, device, .. } = DeviceProfile::read(job)?;
        let mut out = job.create()?;
        // `Out` stores its first failure and returns it when it is closed, so write errors are ignored here
        // and below.
        out.write_all(b"[").ok();
        let times = list(&mut out, profile.timeline(device).map(|(time, _)| time));
        out.write_all(b",").ok();
        list(&mut out, profile.timeline(device).map(|(_, sizes)| sizes));
        out.write_all(b"]").ok();
        job.finish_file(out, format!("device {device}, {}", counted(times, "time")))
    }
}

impl Export for Raw {
    fn name(&self) -> &'static str {
        "timeline-raw"
    }

    fn about(&self) -> &'static str {
        "torch.profiler's raw memory timeline: [time in ns, action, bytes, category] for each event"
    }

    fn takes_host(&self) -> bool {
        true
    }

    fn output_kind(&self, _: &Options) -> OutputKind {
        OutputKind::FileEach(".timeline-raw.json")
    }

    fn open_with(&self) -> &'static str {
        "python -ic \"import json, sys; events = json.load(open(sys.argv[1]))\" FILE"
    }

    fn write(&self, job: &mut Job<'_>) -> Result<()> {
        let DeviceProfile { profile, device, .. } = DeviceProfile::read(job)?;
        let mut out = job.create()?;
        let events = list(&mut out, profile.raw(device));
        job.finish_file(out, format!("device {device}, {}", counted(events, "event")))
    }
}

impl Export for Html {
    fn name(&self) -> &'static str {
        "timeline-html"
    }

    fn about(&self) -> &'static str {
        "torch.profiler's memory timeline as a page with its picture"
    }

    fn flags(&self) -> &'static [Flag] {
        &[TITLE, SIZE]
    }

    fn takes_host(&self) -> bool {
        true
    }

    fn output_kind(&self, _: &Options) -> OutputKind {
        OutputKind::FileEach(".timeline.html")
    }

    fn open_with(&self) -> &'static str {
        "a browser: FILE"
    }

    fn write(&self, job: &mut Job<'_>) -> Result<()> {
        let DeviceProfile { profile, device, replayed } = DeviceProfile::read(job)?;
        let (width, height) = size_of(job.options)?;
        let title = job.options.text(TITLE.name);
        let mut lines = maxima(&replayed, device);
        if title != TITLE.default {
            lines.insert(0, title.to_owned());
        }
        let picture = categories(&profile, device, &lines);
        let mut out = job.create()?;
        write!(
            out,
            "<!DOCTYPE html>\n<html lang=\"en\">\n<head><meta charset=\"utf-8\"><title>{}</title></head>\n\
             <body>\n{}</body>\n</html>\n",
            escaped(title),
            picture.sized_svg(width, height)
        )
        .ok();
        job.finish_file(out, format!("device {device}"))
    }
}

/// Writes a JSON list, and returns the number of entries.
fn list<T: serde::Serialize>(out: &mut Out, entries: impl Iterator<Item = T>) -> u64 {
    let mut written = 0;
    out.write_all(b"[").ok();
    for entry in entries {
        if written > 0 {
            out.write_all(b",").ok();
        }
        serde_json::to_writer(&mut *out, &entry).ok();
        written += 1;
    }
    out.write_all(b"]").ok();
    written
}

/// The profile of one process, and the device to export.
struct DeviceProfile {
    profile: Profile,
    device: i32,
    replayed: Replayed,
}

impl DeviceProfile {
    fn read(job: &mut Job<'_>) -> Result<DeviceProfile> {
        let trace = job.trace()?;
        let (profile, flow) = profile_and_flow(trace, job.options)?;
        let replayed =
            replay_trace(trace, Columns::of(&[]), job.options, Metric::Allocated, flow, |_, _| {})?;
        job.add_to_footer(trace, &replayed);
        let Some(device) = replayed.fullest(Metric::Allocated, job.options).map(|device| device.ordinal)
        else {
            return Err(no_gpu(&trace.path, replayed.replay.find(HOST).is_some()));
        };
        if !profile.has_io {
            job.footer.notes.push(
                "categories are copied from the rows, and INCREMENT_VERSION is missing: it needs \
             MEMTRACE_OPS=io, which records the tensors that each op reads and writes"
                    .to_owned(),
            );
        }
        Ok(DeviceProfile { profile, device, replayed })
    }
}
