//! A memory curve for the terminal: an area in eighths of a cell, axes with units, and the phases and steps
//! below the area.
//!
//! Bands differ by hue if color is on, otherwise by letter.

use memtrace_trace::units::Unit;

use crate::render::printer::{Cell, NO_BREAK, Printer, Style};
use crate::state::series::TimeGrid;

/// A curve to draw.
pub struct Curve<'a> {
    /// The time buckets of the curve. A column of the terminal shows two buckets.
    pub grid: TimeGrid,
    /// The highest total of each bucket, in bytes.
    pub high: &'a [i64],
    /// A second total, drawn as a line above the first.
    pub line: Option<CurveLine<'a>>,
    /// The name of the total, for the legend.
    pub total_name: &'a str,
    /// The parts of the total, from the bottom. If this is empty, the total is drawn as one area.
    pub bands: Vec<Band>,
    /// The start of each phase in ns, and its name. An empty name means that no phase is active.
    pub phases: Vec<(i64, String)>,
    /// The start of each step in ns and its number.
    pub steps: Vec<(i64, i64)>,
    /// The start of each step in ns and the size of its largest input. Empty if no inputs are drawn.
    pub inputs: Vec<(i64, i64)>,
    /// The time of the peak in ns, to mark it.
    pub peak_ns: Option<i64>,
    /// The times of out-of-memory errors, in ns.
    pub ooms: Vec<i64>,
    /// The unit of the byte axis.
    pub units: Unit,
}

/// A total that is drawn as a line.
pub struct CurveLine<'a> {
    /// The name, for the legend.
    pub name: &'a str,
    /// The highest value in each bucket, in bytes.
    pub high: &'a [i64],
}

impl CurveLine<'_> {
    /// Returns the color of the line, which is the color on the HTML page: one for reserved memory, another
    /// for any other total.
    fn style(&self) -> Style {
        if self.name == "reserved" { VERMILION } else { PURPLE }
    }
}

/// A part of the total.
pub struct Band {
    /// The name. Without color, the band is drawn with the first letter of its name that no earlier band
    /// uses.
    pub name: String,
    /// The index in [`crate::render::printer::HUES`].
    pub hue: u8,
    /// The bytes in each bucket, at the moment of the highest total.
    pub bytes: Vec<i64>,
}

const BLUE: Style = Style::Hue(0);
const VERMILION: Style = Style::Hue(5);
const PURPLE: Style = Style::Hue(3);
const EIGHTHS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

impl Curve<'_> {
    /// The width of the axis on the left, in columns.
    pub const MARGIN: usize = 13;

    fn columns(&self) -> usize {
        self.grid.buckets.div_ceil(2)
    }

    /// Of the two buckets in a column of the terminal, returns the index and the value of the higher one.
    fn highest(values: &[i64], column: usize) -> (usize, i64) {
        let first = column * 2;
        let last = (first + 1).min(values.len().saturating_sub(1));
        let first = first.min(last);
        if values.get(last) > values.get(first) { (last, values[last]) } else { (first, values[first]) }
    }

    fn column(&self, ts_ns: i64) -> usize {
        self.grid.index(ts_ns) / 2
    }

    /// Prints the curve. `height` is the number of lines of the area, without the marks above and the axes
    /// below.
    pub fn print(&self, printer: &mut Printer, height: usize) {
        let columns = self.columns();
        let highest = |values: &[i64]| values.iter().copied().max().unwrap_or(0);
        let most = highest(self.high).max(self.line.as_ref().map_or(0, |line| highest(line.high))).max(1);
        let letters = letters(self.bands.iter().map(|band| band.name.as_str()));
        printer.fence();
        self.marks(printer, columns);
        for row in (0..height).rev() {
            // The bytes at the lower edge of this line of the area, and the bytes per line.
            let (low, step) = (most as f64 * row as f64 / height as f64, most as f64 / height as f64);
            let label = match row {
                _ if row + 1 == height => self.units.show(most).to_string(),
                _ if row == height / 2 && height > 4 => self.units.show((low + step) as i64).to_string(),
                _ => String::new(),
            };
            let tick = if label.is_empty() { "│" } else { "┤" };
            let mut cells = vec![Cell::new(format!("{label:>11} {tick}"), Style::Faint)];
            let mut run = StyledRun::default();
            for column in 0..columns {
                let (bucket, value) = Self::highest(self.high, column);
                let eighths = ((value as f64 - low) / step * 8.0).round().clamp(0.0, 8.0) as usize;
                let line = self.line.as_ref().map_or(0, |line| Self::highest(line.high, column).1);
                let here = line as f64 > low && line as f64 <= low + step * 1.0001;
                let (c, style) = if eighths == 0 && here {
                    ('─', self.line.as_ref().map_or(Style::Plain, CurveLine::style))
                } else if eighths == 0 {
                    (' ', Style::Plain)
                } else if self.bands.is_empty() {
                    (EIGHTHS[eighths], BLUE)
                } else {
                    let place = self.band(bucket, value, low + step * (eighths as f64 / 16.0));
                    let c = if printer.paints() { EIGHTHS[eighths] } else { letters[place] };
                    (c, Style::Hue(self.bands[place].hue))
                };
                run.push(&mut cells, c, style);
            }
            run.end(&mut cells);
            printer.line(cells);
        }
        self.time_axis(printer, columns);
        self.phases_and_steps(printer, columns);
        self.legend(printer, &letters);
        printer.fence();
    }

    /// Returns the index of the band that is at the height of `at` bytes in a bucket whose total is `value`.
    fn band(&self, bucket: usize, value: i64, at: f64) -> usize {
        let sum: i64 = self.bands.iter().filter_map(|band| band.bytes.get(bucket)).sum();
        // The total also includes blocks whose category is not drawn, so it can be a little higher than the
        // bands together. Scale the bands to the total.
        let scale = if sum > 0 { value as f64 / sum as f64 } else { 0.0 };
        let mut top = 0.0;
        for (place, band) in self.bands.iter().enumerate() {
            top += band.bytes.get(bucket).copied().unwrap_or(0) as f64 * scale;
            if at < top {
                return place;
            }
        }
        self.bands.len() - 1
    }

    /// Prints the marks of the peak and of each OOM above the curve.
    fn marks(&self, printer: &mut Printer, columns: usize) {
        let mut line: Vec<(char, Style)> = vec![(' ', Style::Plain); columns];
        let mut write = |column: usize, text: &str, style: Style| {
            let text: Vec<char> = text.chars().collect();
            let from = column.min(columns.saturating_sub(text.len()));
            // At the right edge, the label moves left so that it fits, and the mark stays over its column.
            let text: Vec<char> = if from < column && column < columns {
                text[1..].iter().copied().chain([text[0]]).collect()
            } else {
                text
            };
            let from = if from < column { (column + 1).saturating_sub(text.len()) } else { from };
            if line[from..].iter().take(text.len()).all(|(c, _)| *c == ' ') {
                for (place, c) in line[from..].iter_mut().zip(text) {
                    *place = (c, style);
                }
            }
        };
        if let Some(peak) = self.peak_ns.filter(|peak| self.grid.has(*peak)) {
            write(self.column(peak), "▼ peak", Style::Strong);
        }
        for oom in &self.ooms {
            write(self.column(*oom), "✖ OOM", Style::Alarm);
        }
        let mut cells = vec![Cell::from(" ".repeat(Self::MARGIN))];
        let mut run = StyledRun::default();
        for (c, style) in line {
            run.push(&mut cells, c, style);
        }
        run.end(&mut cells);
        printer.line(cells);
    }

    /// Prints the time axis.
    fn time_axis(&self, printer: &mut Printer, columns: usize) {
        let mut axis = vec!['─'; columns];
        let mut text = vec![' '; columns + 12];
        let (start, end) =
            (self.grid.start_ns, self.grid.start_ns + self.grid.width_ns * self.grid.buckets as i64);
        let step = round_step((end - start) / (columns as i64 / 16).max(1));
        // The labels have no decimals if they are one second or more apart.
        let digits = 9_usize.saturating_sub((step.max(1) as f64).log10().floor() as usize);
        let mut at = start - start.rem_euclid(step);
        while at <= end {
            if at >= start && self.grid.has(at) {
                let column = self.column(at);
                axis[column] = '┴';
                let label = format!("{:.digits$} s", at as f64 / 1e9);
                for (place, c) in text[column..].iter_mut().zip(label.chars()) {
                    *place = c;
                }
            }
            at += step;
        }
        let line: String = axis.into_iter().collect();
        printer.line([Cell::new(format!("{:>11} ┼{line}", "0"), Style::Faint)]);
        let labels: String = text.into_iter().take(columns).collect();
        printer.line([Cell::new(format!("{}{labels}", " ".repeat(Self::MARGIN)), Style::Faint)]);
    }

    /// Prints the phases and steps below the curve.
    fn phases_and_steps(&self, printer: &mut Printer, columns: usize) {
        if self.phases.iter().any(|(_, name)| !name.is_empty()) {
            let names = self.phase_names();
            let letters = capitals(&names);
            let mut cells = vec![Cell::new(format!("{:>11}  ", "phase"), Style::Faint)];
            let mut run = StyledRun::default();
            for column in 0..columns {
                let end = self.grid.start_ns + self.grid.width_ns * (column as i64 * 2 + 2);
                let at = self.phases.partition_point(|(ts, _)| *ts < end);
                let name = at.checked_sub(1).map_or("", |at| self.phases[at].1.as_str());
                let place = names.iter().position(|known| known == name);
                let (c, style) = match place {
                    None => (' ', Style::Plain),
                    Some(place) if printer.paints() => ('▀', hue(&names[place], place)),
                    Some(place) => (letters[place], Style::Plain),
                };
                run.push(&mut cells, c, style);
            }
            run.end(&mut cells);
            printer.line(cells);
        }
        if !self.steps.is_empty() {
            let mut line = vec![' '; columns];
            let mut free = 0;
            for (ts, number) in self.steps.iter().filter(|(ts, _)| self.grid.has(*ts)) {
                let column = self.column(*ts);
                let text = format!("╎{number}");
                if column < free || column + text.chars().count() > columns {
                    continue;
                }
                free = column + text.chars().count() + 1;
                for (place, c) in line[column..].iter_mut().zip(text.chars()) {
                    *place = c;
                }
            }
            let line: String = line.into_iter().collect();
            printer.line([Cell::new(format!("{:>11}  {line}", "step"), Style::Faint)]);
        }
        self.input_sizes(printer, columns);
    }

    /// Prints the size of the largest input at each time, in eighths of the largest of all.
    fn input_sizes(&self, printer: &mut Printer, columns: usize) {
        let most = self.inputs.iter().map(|(_, size)| *size).max().unwrap_or(0);
        if most <= 0 {
            return;
        }
        let mut sizes = vec![0; columns];
        for (at, (ts, size)) in self.inputs.iter().enumerate() {
            let end = self.inputs.get(at + 1).map_or(i64::MAX, |next| next.0.saturating_sub(1));
            let shown = (*ts).max(self.grid.start_ns);
            if end >= shown && self.grid.has(shown) {
                let (first, last) = (self.column(shown).min(columns - 1), self.column(end).min(columns - 1));
                sizes[first..=last].iter_mut().for_each(|column| *column = (*column).max(*size));
            }
        }
        let eighths = |size: i64| {
            if size > 0 { (8.0 * size as f64 / most as f64).round().max(1.0) as usize } else { 0 }
        };
        let line: String = sizes.into_iter().map(|size| EIGHTHS[eighths(size)]).collect();
        printer.line([Cell::new(format!("{:>11}  {line}", "input size"), Style::Faint)]);
    }

    /// Returns the names of the phases, in the order of their first start, at most 20.
    fn phase_names(&self) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        for (_, name) in &self.phases {
            if !name.is_empty() && !names.contains(name) && names.len() < 20 {
                names.push(name.clone());
            }
        }
        names
    }

    fn legend(&self, printer: &mut Printer, letters_of_bands: &[char]) {
        let paints = printer.paints();
        let mut cells = vec![Cell::from(" ".repeat(Self::MARGIN))];
        let mut entry = |sign: char, style: Style, name: &str| {
            cells.push(Cell::new(sign.to_string(), style));
            cells.push(Cell::from(format!("{NO_BREAK}{name}   ")));
        };
        if self.bands.is_empty() {
            entry('█', BLUE, self.total_name);
        }
        for (band, letter) in self.bands.iter().zip(letters_of_bands) {
            entry(if paints { '█' } else { *letter }, Style::Hue(band.hue), &band.name);
        }
        if let Some(line) = &self.line {
            entry('─', line.style(), line.name);
        }
        let names = self.phase_names();
        let letters = capitals(&names);
        for (place, (name, letter)) in names.iter().zip(&letters).enumerate() {
            entry(
                if paints { '▀' } else { *letter },
                if paints { hue(name, place) } else { Style::Plain },
                name,
            );
        }
        printer.line(cells);
    }
}

/// Returns the color of a phase. The phases of a training step have fixed colors. All others take turns by
/// `place`, their index.
fn hue(name: &str, place: usize) -> Style {
    Style::Hue(match name {
        "forward" => 4,
        "backward" => 1,
        "optimizer" | "optimizer.step" => 3,
        _ => [7, 6, 2][place % 3],
    })
}

/// Returns a capital letter for each phase, because lowercase letters name bands.
fn capitals(names: &[String]) -> Vec<char> {
    let names: Vec<String> = names.iter().map(|name| name.to_uppercase()).collect();
    letters(names.iter().map(String::as_str))
}

/// Returns one letter for each name: the first letter or digit of the name that no earlier name uses, or else
/// an unused capital letter, or else `?`.
fn letters<'a>(names: impl Iterator<Item = &'a str>) -> Vec<char> {
    let mut taken = Vec::new();
    for name in names {
        let own = name.chars().filter(char::is_ascii_alphanumeric);
        let free = own.chain('A'..='Z').find(|c| !taken.contains(c));
        taken.push(free.unwrap_or('?'));
    }
    taken
}

/// Returns the smallest round number at or above `about`: 1, 2 or 5 times a power of ten.
fn round_step(about: i64) -> i64 {
    let mut power: i64 = 1;
    while power <= about / 10 {
        power *= 10;
    }
    [1, 2, 5, 10].iter().map(|lead| lead * power).find(|step| *step >= about).unwrap_or(power * 10)
}

/// Collects consecutive characters of the same style into one cell.
#[derive(Default)]
struct StyledRun {
    text: String,
    style: Style,
}

impl StyledRun {
    fn push(&mut self, cells: &mut Vec<Cell>, c: char, style: Style) {
        if style != self.style {
            self.end(cells);
            self.style = style;
        }
        self.text.push(c);
    }

    fn end(&mut self, cells: &mut Vec<Cell>) {
        if !self.text.is_empty() {
            cells.push(Cell::new(std::mem::take(&mut self.text), self.style));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve<'a>(high: &'a [i64]) -> Curve<'a> {
        Curve {
            grid: TimeGrid { start_ns: 0, width_ns: 100_000_000, buckets: high.len() },
            high,
            line: None,
            total_name: "allocated",
            bands: Vec::new(),
            phases: vec![(0, "forward".to_owned()), (500_000_000, "backward".to_owned())],
            steps: vec![(0, 0), (600_000_000, 1)],
            inputs: Vec::new(),
            peak_ns: Some(450_000_000),
            ooms: Vec::new(),
            units: Unit::Auto,
        }
    }

    #[test]
    fn a_curve_has_axes_phases_and_the_peak() {
        let high: Vec<i64> = (0..20).map(|n| if n == 4 { 4096 } else { n * 128 }).collect();
        let mut printer = Printer::new(false, None);
        curve(&high).print(&mut printer, 4);
        let expected = ["               ▼ peak", "   4.00 KiB ┤  █"];
        let lines: Vec<&str> = printer.text().lines().collect();
        assert_eq!(lines[0], expected[0]);
        assert_eq!(lines[1], expected[1]);
        assert_eq!(lines[2].chars().nth(15), Some('█'), "{}", printer.text());
        assert!(lines[5].starts_with("          0 ┼"), "{}", printer.text());
        assert!(printer.text().contains("phase  FFBBBBBBBB"), "{}", printer.text());
        assert!(printer.text().contains("step  ╎0 ╎1"), "{}", printer.text());
        assert!(printer.text().contains("F forward   B backward"), "{}", printer.text());
        assert!(!printer.text().contains('\x1b'));
    }

    #[test]
    fn a_curve_shows_the_size_of_each_steps_input() {
        let high = [1024; 20];
        let text = |inputs| {
            let mut printer = Printer::new(false, None);
            Curve { inputs, ..curve(&high) }.print(&mut printer, 4);
            printer.text().to_owned()
        };
        let drawn = text(vec![(200_000_000, 1), (600_000_000, 800), (1_000_000_000, 400)]);
        assert!(drawn.contains(" input size   ▁▁██▄▄▄▄▄"), "{drawn}");
        assert!(!text(vec![(0, 0)]).contains("input size") && !text(Vec::new()).contains("input size"));
        let outside = text(vec![(-900_000_000, 8), (i64::MAX, 1)]);
        assert!(outside.contains("input size  ██████████"), "{outside}");
    }

    #[test]
    fn a_curve_names_its_line_and_colours_it_by_the_total() {
        let high = [1024; 20];
        let line = [4096; 20];
        let text = |name| {
            let mut printer = Printer::new(true, None);
            Curve { line: Some(CurveLine { name, high: &line }), ..curve(&high) }.print(&mut printer, 4);
            printer.text().to_owned()
        };
        let (reserved, used) = (text("reserved"), text("device used"));
        assert!(reserved.contains("reserved") && reserved.contains("\x1b[38;5;166m"), "{reserved}");
        assert!(used.contains("device used") && used.contains("\x1b[38;5;175m"), "{used}");
        assert!(!used.contains("reserved") && !used.contains("\x1b[38;5;166m"), "{used}");
    }

    #[test]
    fn a_curve_of_a_long_run_has_whole_seconds() {
        let high = [1; 100];
        let grid = TimeGrid { start_ns: 0, width_ns: 10_000_000_000, buckets: high.len() };
        let mut printer = Printer::new(false, None);
        Curve { grid, ..curve(&high) }.print(&mut printer, 4);
        assert!(printer.text().contains("0 s"), "{}", printer.text());
        assert!(printer.text().contains(" 500 s"), "{}", printer.text());
    }

    #[test]
    fn curve_bands_have_distinct_letters() {
        assert_eq!(letters(["activation", "autograd", "a"].into_iter()), ['a', 'u', 'A']);
        assert_eq!(round_step(3), 5);
        assert_eq!(round_step(120_000_000), 200_000_000);
    }
}
