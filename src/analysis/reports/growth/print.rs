//! Prints the growth of a device.

use memtrace_trace::units::Unit;

use super::LevelGrowth;
use super::forecast::Forecast;
use super::part::GrowthPart;
use crate::options::Options;
use crate::render::numbers::{count, counted, duration};
use crate::render::printer::{Cell, Printer, Side, Style, Table};

impl LevelGrowth {
    pub(in super::super) fn print(&self, printer: &mut Printer, options: &Options) {
        let units = options.units;
        let show = |bytes: i64| units.show(bytes).to_string();
        let (first, last) = (self.measured.first(), self.measured.last());
        let at_last = format!(
            "{} {}",
            if self.measured.is_cut() { "in" } else { "after" },
            self.measured.name_of(last)
        );
        let more = self.measured.bytes();
        let Some(cause) = self.measured.cause() else {
            let over = if self.measured.is_by_time() {
                duration(last.ts_ns - first.ts_ns)
            } else {
                counted(self.measured.steps() as u64, "step")
            };
            printer.plain(format!(
                "GPU {}: no growth over {over}: {} in use after {}, {} {at_last}",
                self.measured.ordinal(),
                show(first.used()),
                self.measured.name_of(first),
                show(last.used())
            ));
            return;
        };
        let verb = if more < 0 { "less" } else { "more" };
        let is_hidden = matches!(self.forecast, Forecast::WithinCache { .. });
        printer.line([
            Cell::new(
                if is_hidden {
                    format!(
                        "GPU {}: kept memory grew by {}, with {} {verb} in use",
                        self.measured.ordinal(),
                        show(self.measured.bytes_of(cause)),
                        show(more.abs())
                    )
                } else {
                    format!("GPU {}: {} {verb} in use", self.measured.ordinal(), show(more.abs()))
                },
                Style::Alarm,
            ),
            format!(
                " {at_last} than after {}: {}, before {}",
                self.measured.name_of(first),
                show(last.used()),
                show(first.used())
            )
            .into(),
        ]);
        let mut table =
            Table::new(&[("", Side::Left), ("growth", Side::Right), ("now", Side::Right), ("", Side::Left)]);
        for part in GrowthPart::ALL {
            let style = if part == cause { Style::Strong } else { Style::Plain };
            table.row([
                Cell::new(part.name(), style),
                Cell::new(show(self.measured.bytes_of(part)), style),
                show(self.measured.now(part)).into(),
                Cell::new(part.about(), Style::Faint),
            ]);
        }
        printer.table(&table);
        for part in self.measured.growing() {
            printer.gap();
            printer
                .line([Cell::new(format!("{}: ", part.name()), Style::Strong), self.why(part, units).into()]);
            for change in self.changes.in_part(part) {
                printer.plain(format!("  {}", change.line(units)));
            }
            printer.line(["  try: ".into(), Cell::new(self.remedy(part), Style::Command)]);
        }
        printer.gap();
        printer.plain(self.outlook(units));
    }

    /// Returns a sentence with the forecast.
    fn outlook(&self, units: Unit) -> String {
        let unit = if self.measured.is_by_time() { "second" } else { "step" };
        let used = units.show(self.measured.last().used());
        match self.forecast {
            Forecast::Jumped { at } => {
                format!(
                    "The growth came in one jump, with {}; before and after it, little changed.",
                    self.measured.name_of(&self.measured.levels()[at])
                )
            }
            Forecast::Settled => {
                format!("It has settled at {used}: it hardly grew in the last quarter of the run.")
            }
            Forecast::Paused { now, longest } => {
                let of = if self.measured.is_by_time() { "slice" } else { "step" };
                format!(
                    "It grows in jumps: no growth in the last {}, but an earlier pause lasted {}. So it may \
                     exceed {used}.",
                    counted(now as u64, of),
                    count(longest as u64)
                )
            }
            Forecast::Varies { now, times } => {
                let of = if self.measured.is_by_time() { "slice" } else { "step" };
                format!(
                    "No growth in the last {}. The largest {of} so far sets the peak, and needs {times:.1} times \
                     the 90th percentile. Expect a larger one: memory in use may exceed {used}.",
                    counted(now as u64, of)
                )
            }
            Forecast::Swings { low, high, is_rising } => format!(
                "It rises and falls, as memory is freed and reserved again: between {} and {} in the last half of the \
                 run, {} than in the first half.",
                units.show(low),
                units.show(high),
                if is_rising { "higher" } else { "and no higher" }
            ),
            Forecast::Slowing { level } => {
                let mut text =
                    format!("It slows down: growth was small in the last quarter of the run. Now {used}");
                if let Some(level) = level {
                    text.push_str(&format!(", about {} if it goes on like this", units.show(level)));
                }
                text + "."
            }
            Forecast::WithinCache { rate, until } => format!(
                "The kept memory grows by about {} a step and fills cached memory first: nvidia-smi shows \
                 its growth from about step {}.",
                units.show(rate as i64),
                count(until.max(0).cast_unsigned())
            ),
            Forecast::Grows { rate, full_at, is_faster } => {
                let mut text = format!("It grows by about {} a {unit}.", units.show(rate as i64));
                match full_at {
                    Some(at) if self.measured.is_by_time() => {
                        text.push_str(&format!(
                            " At this rate the card ({}) is full after about {}.",
                            units.show(self.capacity),
                            duration(at.saturating_mul(1_000_000_000))
                        ));
                    }
                    Some(at) => text.push_str(&format!(
                        " At this rate the card ({}) is full at about step {}.",
                        units.show(self.capacity),
                        count(at.max(0).cast_unsigned())
                    )),
                    None => {}
                }
                if is_faster {
                    text.push_str(" It grows faster and faster, so expect more.");
                }
                text
            }
        }
    }
}
