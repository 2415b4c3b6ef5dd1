//! One request that ran out of memory: the verdict, the advice and the figures, as text and as JSON.

use memtrace_trace::form::Form;
use memtrace_trace::stacks::FrameKind;
use memtrace_trace::text::UNKNOWN;
use memtrace_trace::units::Unit;
use serde_json::{Value, json};

use super::super::advise::predictions::FirstAdvice;
use super::evidence::Evidence;
use super::finding::{Help, OomCase};
use super::findings::larger_step::differences;
use super::kept_reasons::words;
use super::step_groups::Difference;
use super::trace_to_oom::TraceToOom;
use crate::options::Options;
use crate::read::stream::TraceFile;
use crate::render::numbers::{counted, duration, step_or_dash, upper_first};
use crate::render::printer::{Cell, Printer, Side, Style, Table};
use crate::state::block::Owner;
use crate::state::stacks::Stacks;

/// The text in the names of ops that work on a list of tensors.
const FOREACH: &str = "_foreach_";
/// The maximum number of the request's Python lines that are shown.
const LINES: usize = 5;

/// The bytes that the context takes on a simulated GPU, and the range that it may take on a real card.
#[derive(Clone, Copy, Debug)]
struct ContextRange {
    here: i64,
    least: i64,
    most: i64,
}

impl ContextRange {
    /// Returns the range that the simulated GPU recorded in a trace, or `None` if it recorded no range or an
    /// empty one.
    fn from_trace(trace: &TraceFile) -> Option<ContextRange> {
        let bytes = |name: &str| trace.meta.phantom[name].as_i64();
        let range = ContextRange {
            here: bytes("context_bytes")?,
            least: bytes("context_low_bytes")?,
            most: bytes("context_high_bytes")?,
        };
        (range.least < range.most).then_some(range)
    }
}

impl<'a> OomCase<'a> {
    pub(super) fn new(at: &'a TraceToOom<'a>) -> Self {
        let blocks = at.replayed.replay.live_on(at.row.device, false);
        let live: Vec<(Owner, i64)> = blocks.iter().map(|block| (block.owner, block.bytes)).collect();
        let evidence = Evidence::gather(at, &blocks);
        let stacks = Stacks::read(at.trace);
        // The row's own op is the innermost one, such as `aten::empty_strided` in `aten::_foreach_sqrt`.
        let mut outer = stacks.frames(at.row.stack_id).filter(|frame| frame.kind == FrameKind::Op);
        let is_in_foreach = at.op().contains(FOREACH) || outer.any(|frame| frame.text.contains(FOREACH));
        OomCase {
            oom_state: at,
            live,
            blame: evidence.judge(),
            evidence,
            neighbours: None,
            lines: stacks.lines(at.row.stack_id).into_iter().map(str::to_owned).collect(),
            is_in_foreach,
        }
    }

    pub(super) fn verdict(&self) -> &'static str {
        self.blame.cause.verdict
    }

    /// Returns true if a lower peak would help.
    pub(super) fn is_need(&self) -> bool {
        matches!(self.blame.cause.help, Help::LowerPeak | Help::LowerNeed)
    }

    /// Returns true if the program keeps memory that it does not need.
    pub(super) fn is_kept(&self) -> bool {
        self.blame.cause.help == Help::FreeKept
    }

    /// Returns the missing bytes if a real card might have had them. Its context may be smaller than the
    /// simulated one, and no fact shows that the rest of the step would not fit there. Otherwise returns
    /// `None`.
    fn lacking_inside_range(&self) -> Option<(i64, ContextRange)> {
        let (context, evidence) = (ContextRange::from_trace(self.oom_state.trace)?, &self.evidence);
        let lacking = evidence.request.segment - evidence.device.room;
        let range = context.here - context.least;
        let is_inside = lacking > 0 && lacking <= range && evidence.short_of_whole_step() <= range;
        // Memory that grows or is kept would fill the larger card, too.
        (is_inside && !self.is_kept()).then_some((lacking, context))
    }

    /// Returns the reason, with the figures that prove it, as a sentence without a full stop.
    pub(super) fn because(&self, units: Unit) -> String {
        (self.blame.cause.because)(self, units)
    }

    /// Returns the text after the name of the cause: the missing bytes, and the reason.
    pub(super) fn after_verdict(&self, units: Unit) -> String {
        let cause = self.blame.cause;
        let because = upper_first(&self.because(units));
        format!("{}. {because}.{}", (cause.missing)(self, units), (cause.outlook)(self, units))
    }

    /// Returns all remedies: those for the cause, then the changes of `memtrace advise`, then those whose use
    /// the trace cannot decide.
    pub(super) fn all_tries(&self, advised: &[FirstAdvice], units: Unit) -> Vec<String> {
        let mut all = self.tries(units);
        all.extend(advised.iter().map(|change| self.advised_line(change, units)));
        all.extend(self.tries_if(units));
        all
    }

    /// Prints the verdict on `process`, the remedies (`advised` has the changes of `memtrace advise`), and the figures.
    pub(super) fn print(
        &self,
        printer: &mut Printer,
        process: &str,
        advised: &[FirstAdvice],
        options: &Options,
    ) {
        let (row, symbols) = (&self.oom_state.row, self.oom_state.symbols());
        let first = format!(
            " at {}, {process}, device {}: {} in {}, {}, step {}",
            duration(row.ts_ns),
            row.device,
            symbols.or_dash(row.op),
            symbols.or_dash(row.module),
            symbols.or_dash(row.phase),
            step_or_dash(row.step)
        );
        printer.line([Cell::new("out of memory", Style::Alarm), first.into()]);
        for line in self.lines.iter().take(LINES) {
            printer.plain(format!("  {line}"));
        }
        if self.oom_state.seen.ooms > 1 {
            printer.plain(format!("the last of {}", counted(self.oom_state.seen.ooms, "OOM")));
        }
        printer.gap();
        self.print_verdict(printer, advised, options.units);
        printer.gap();
        self.print_figures(printer, options.units);
    }

    fn print_verdict(&self, printer: &mut Printer, advised: &[FirstAdvice], units: Unit) {
        printer.line([
            "verdict: ".into(),
            Cell::new(self.verdict(), Style::Strong),
            self.after_verdict(units).into(),
        ]);
        for remark in self.remarks(units) {
            printer.plain(format!("  also: {remark}"));
        }
        for difference in differences(self) {
            printer.plain(format!("        {}", difference.line(units)));
        }
        for advice in self.all_tries(advised, units) {
            printer.plain(format!("  try: {advice}"));
        }
        if let Some((lacking, context)) = self.lacking_inside_range() {
            printer.plain(format!(
                "uncertain: only {} were missing, and a real card's CUDA context takes {} to {} \
                 (simulated: {}), so the request may fit there",
                units.show(lacking),
                units.show(context.least),
                units.show(context.most),
                units.show(context.here)
            ));
        }
    }

    fn print_figures(&self, printer: &mut Printer, units: Unit) {
        let mut table = Table::new(&[("", Side::Right), ("", Side::Left)]);
        let mut line = |bytes: i64, what: String| {
            table.row([Cell::new(units.show(bytes).to_string(), Style::Strong), what.into()]);
        };
        let Evidence { request, device, torch, .. } = &self.evidence;
        let (row, symbols) = (&self.oom_state.row, self.oom_state.symbols());
        let form = Form { dtype: &symbols.get(row.dtype), shape: &symbols.get(row.shape) };
        let for_form = match form.shape {
            UNKNOWN => String::new(),
            shape => format!(" for {} {shape}", form.dtype),
        };
        line(
            request.bytes,
            format!("requested{for_form}; needs a segment of {}", units.show(request.segment)),
        );
        line(torch.allocated, "in blocks of torch's allocator".to_owned());
        let largest = units.show(torch.largest_hole());
        line(
            torch.cached(),
            match torch.holes.len() {
                0 => "free in its cache, but in no piece that this request may use".to_owned(),
                1 => format!("free in its cache; the one piece that this request may use has {largest}"),
                holes => format!(
                    "free in its cache; of {holes} pieces that this request may use, the largest has {largest}"
                ),
            },
        );
        line(device.outside, "outside torch's allocator, in traced calls".to_owned());
        if let Some(host) = device.host {
            line(host, "of this process on the host, in the same memory".to_owned());
        }
        if device.others > 0 {
            let who =
                if device.host.is_some() { "of the system and other programs" } else { "of other processes" };
            line(device.others, who.to_owned());
        }
        if device.unknown > 0 {
            line(device.unknown, "not traced: the CUDA context, code of libraries".to_owned());
        }
        let capacity = units.show(device.capacity);
        if device.is_sampled {
            line(device.room, format!("free on the device, of {capacity}"));
        } else if device.capacity > 0 {
            let most = format!("free on the device: {} of {capacity}, not sampled", self.room_text(units));
            table.row([Cell::new("unknown", Style::Strong), most.into()]);
        }
        printer.table(&table);
    }

    pub(super) fn json(&self) -> Value {
        let Evidence { request, device, torch, to_come, .. } = &self.evidence;
        let (row, trace) = (&self.oom_state.row, self.oom_state.trace);
        let text = |symbol| self.oom_state.symbols().get(symbol).to_string();
        let needs_at_least = self.evidence.needs_at_least();
        let kept = self.blame.kept.as_ref();
        let mut value = json!({
            "file": trace.path.display().to_string(),
            "rank": trace.meta.rank,
            "device": row.device,
            "seq": row.seq,
            "ts_ns": row.ts_ns,
            "ooms": self.oom_state.seen.ooms,
            "verdict": self.verdict(),
            "injected": request.is_injected,
            "because": self.because(Unit::B),
            "remarks": self.remarks(Unit::B),
            "try": Value::from([self.tries(Unit::B), self.tries_if(Unit::B)].concat()),
            "differences": differences(self).iter().map(Difference::json).collect::<Vec<_>>(),
            "inside_range": self.lacking_inside_range().is_some(),
            "context_range_bytes": ContextRange::from_trace(trace).map(|context| [context.least, context.most]),
            "requested_bytes": row.requested_bytes,
            "rounded_bytes": row.rounded_bytes,
            "segment_bytes": request.segment,
            "op": self.oom_state.op(),
            "module": self.oom_state.module(),
            "phase": self.oom_state.phase(),
            "step": row.step,
            "lines": self.lines,
            "allocated_bytes": torch.allocated,
            "reserved_bytes": torch.reserved,
            "cached_bytes": torch.cached(),
            "largest_hole_bytes": torch.largest_hole(),
            "holes": torch.holes.len(),
            "outside_bytes": device.outside,
            "others_bytes": device.others,
            "unaccounted_bytes": device.unknown + device.others,
            "device_free_bytes": device.is_sampled.then_some(device.room),
            "capacity_bytes": device.capacity,
            "needed_bytes": device.needed,
            "needs_at_least_bytes": needs_at_least,
            "estimated_bytes": (to_come.bytes > 0).then(|| needs_at_least + to_come.bytes),
            "growth_bytes_per_step": self.evidence.growth().map(|growth| growth.per_step),
            "kept": kept.map(|(holder, why)| json!({ "holder": holder.holder, "bytes": holder.bytes, "why": words(*why).because })),
        });
        value["host_bytes"] = device.host.into();
        value["dtype"] = text(row.dtype).into();
        value["shape"] = text(row.shape).into();
        value
    }
}
