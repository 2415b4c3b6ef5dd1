//! Figures with axes, as SVG files, and as PNG files rendered from the SVG. The font is compiled in, so a
//! picture looks the same on a machine without fonts.

use std::fmt::Write;
use std::sync::{Arc, LazyLock};

use resvg::usvg::fontdb::Database;
use resvg::{tiny_skia, usvg};

/// The width of a figure in SVG units.
const WIDTH: f64 = 1200.0;
/// The height of a figure in SVG units.
const HEIGHT: f64 = 640.0;
/// The number of pixels per SVG unit in a PNG.
const SCALE: f32 = 1.25;
/// The left edge of the plot in SVG units.
const LEFT: f64 = 96.0;
/// The right edge of the plot in SVG units.
const RIGHT: f64 = WIDTH - 230.0;
/// The top edge of the plot in SVG units.
const TOP: f64 = 72.0;
/// The bottom edge of the plot in SVG units.
const BOTTOM: f64 = HEIGHT - 72.0;

/// The width of the plot in SVG units, which is also the number of columns in which curves are drawn.
pub(super) const COLUMNS: usize = (RIGHT - LEFT) as usize;

/// One axis.
#[derive(Clone, Debug)]
pub(super) struct Axis {
    /// The quantity, with its unit.
    pub(super) label: String,
    /// The range of values.
    pub(super) range: (f64, f64),
}

/// The symbol in the legend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    Line,
    Dashes,
    Area,
}

const DASHES: &str = r#" stroke-dasharray="7 5""#;

/// A figure under construction.
pub(super) struct Figure {
    x: Axis,
    y: Axis,
    head: String,
    body: String,
    legend: Vec<(String, &'static str, Shape)>,
}

impl Figure {
    /// Returns a figure with empty axes below a title. `title` has the lines of the title, at most three.
    pub(super) fn new(title: &[String], x: Axis, y: Axis) -> Figure {
        let mut head = String::new();
        let last = title.len().saturating_sub(1) as f64;
        for (index, line) in title.iter().enumerate() {
            let (middle, y) = ((LEFT + RIGHT) / 2.0, TOP - 14.0 - (last - index as f64) * 19.0);
            writeln!(
                head,
                r#"<text x="{middle}" y="{y}" text-anchor="middle" font-size="17">{}</text>"#,
                escaped(line)
            )
            .ok();
        }
        let widened = |axis: Axis| {
            let (from, to) = axis.range;
            // A range of a single value is widened, so that the axis has a length.
            Axis { range: (from, if to > from { to } else { from + from.abs().max(1.0) }), ..axis }
        };
        Figure { x: widened(x), y: widened(y), head, body: String::new(), legend: Vec::new() }
    }

    fn x(&self, value: f64) -> f64 {
        let (from, to) = self.x.range;
        LEFT + (value - from) / (to - from) * (RIGHT - LEFT)
    }

    fn y(&self, value: f64) -> f64 {
        let (from, to) = self.y.range;
        BOTTOM - (value - from) / (to - from) * (BOTTOM - TOP)
    }

    fn path(&self, points: impl Iterator<Item = (f64, f64)>) -> String {
        let mut path = String::new();
        for (x, y) in points {
            let letter = if path.is_empty() { 'M' } else { 'L' };
            write!(path, "{letter}{:.1} {:.1}", self.x(x), self.y(y)).ok();
        }
        path
    }

    /// Draws a line through `points`.
    pub(super) fn line(&mut self, points: &[(f64, f64)], color: &'static str, dashed: bool, label: &str) {
        let path = self.path(points.iter().copied());
        let dashes = if dashed { DASHES } else { "" };
        let stroke = r#"stroke-width="1.8" stroke-linejoin="round""#;
        writeln!(self.body, r#"<path d="{path}" fill="none" stroke="{color}" {stroke}{dashes}/>"#).ok();
        let shape = if dashed { Shape::Dashes } else { Shape::Line };
        self.legend.push((label.to_owned(), color, shape));
    }

    /// Fills the area between two lines, whose points are in order of x.
    pub(super) fn area(
        &mut self,
        lower: &[(f64, f64)],
        upper: &[(f64, f64)],
        color: &'static str,
        label: &str,
    ) {
        let path = self.path(upper.iter().copied().chain(lower.iter().rev().copied()));
        writeln!(self.body, r#"<path d="{path}Z" fill="{color}" fill-opacity="0.7"/>"#).ok();
        self.legend.push((label.to_owned(), color, Shape::Area));
    }

    /// Draws a vertical line over the whole height of the plot at each x value in `at`.
    pub(super) fn markers(&mut self, at: &[f64], color: &'static str, label: &str) {
        for x in at {
            let x = self.x(*x);
            writeln!(
                self.body,
                r#"<path d="M{x:.1} {BOTTOM}L{x:.1} {TOP}" stroke="{color}" stroke-width="2"/>"#
            )
            .ok();
        }
        if !at.is_empty() {
            self.legend.push((label.to_owned(), color, Shape::Line));
        }
    }

    /// Returns the figure as an SVG file.
    pub(super) fn svg(&self) -> String {
        self.sized_svg(WIDTH, HEIGHT)
    }

    /// Returns the figure as an SVG file that is displayed at this size, in pixels.
    pub(super) fn sized_svg(&self, width: f64, height: f64) -> String {
        let size = format!(r#"width="{width}" height="{height}""#);
        let font = r#"font-family="DejaVu Sans, Verdana, sans-serif" font-size="14""#;
        let mut svg = format!(
            r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {size} {font}>
<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>
{}"#,
            self.head
        );
        let (grid, frame) = ("#dddddd", "#444444");
        for value in ticks(self.x.range) {
            let x = self.x(value);
            let (y, number) = (BOTTOM + 22.0, number(value, self.x.range));
            let text = format!(r#"<text x="{x:.1}" y="{y}" text-anchor="middle">{number}</text>"#);
            writeln!(svg, r#"<path d="M{x:.1} {TOP}V{BOTTOM}" stroke="{grid}"/>{text}"#).ok();
        }
        for value in ticks(self.y.range) {
            let y = self.y(value);
            let (x, base, number) = (LEFT - 8.0, y + 5.0, number(value, self.y.range));
            let text = format!(r#"<text x="{x}" y="{base:.1}" text-anchor="end">{number}</text>"#);
            writeln!(svg, r#"<path d="M{LEFT} {y:.1}H{RIGHT}" stroke="{grid}"/>{text}"#).ok();
        }
        svg.push_str(&self.body);
        let (middle_x, middle_y) = ((LEFT + RIGHT) / 2.0, (TOP + BOTTOM) / 2.0);
        writeln!(svg, r#"<path d="M{LEFT} {TOP}H{RIGHT}V{BOTTOM}H{LEFT}Z" fill="none" stroke="{frame}"/>"#)
            .ok();
        writeln!(
            svg,
            r#"<text x="{middle_x}" y="{}" text-anchor="middle" font-size="16">{}</text>"#,
            BOTTOM + 52.0,
            escaped(&self.x.label)
        )
        .ok();
        let (turn, label) = (format!("rotate(-90 24 {middle_y})"), escaped(&self.y.label));
        let place = format!(r#"x="24" y="{middle_y}" text-anchor="middle""#);
        writeln!(svg, r#"<text {place} font-size="16" transform="{turn}">{label}</text>"#).ok();
        for (index, (label, color, shape)) in self.legend.iter().enumerate() {
            let (x, y) = (RIGHT + 20.0, TOP + 12.0 + index as f64 * 24.0);
            let dashes = if *shape == Shape::Dashes { DASHES } else { "" };
            let shape = match shape {
                Shape::Area => format!(
                    r#"<rect x="{x}" y="{}" width="22" height="13" fill="{color}" fill-opacity="0.7"/>"#,
                    y - 7.0
                ),
                Shape::Line | Shape::Dashes => {
                    format!(
                        r#"<path d="M{x} {y}H{}" stroke="{color}" stroke-width="2.5"{dashes}/>"#,
                        x + 26.0
                    )
                }
            };
            writeln!(svg, r#"{shape}<text x="{}" y="{}">{}</text>"#, x + 34.0, y + 5.0, escaped(label)).ok();
        }
        svg.push_str("</svg>\n");
        svg
    }
}

/// Renders the text of an SVG file, and returns the bytes of a PNG file.
pub(super) fn png(svg: &str) -> Result<Vec<u8>, String> {
    static FONT: LazyLock<Arc<Database>> = LazyLock::new(|| {
        let mut fonts = Database::new();
        fonts.load_font_data(dejavu::sans::regular().to_vec());
        Arc::new(fonts)
    });
    let options = usvg::Options { fontdb: Arc::clone(&FONT), ..usvg::Options::default() };
    let tree = usvg::Tree::from_str(svg, &options).map_err(|error| error.to_string())?;
    let (width, height) = (WIDTH as f32 * SCALE, HEIGHT as f32 * SCALE);
    let mut pixels =
        tiny_skia::Pixmap::new(width as u32, height as u32).ok_or("not enough memory for the picture")?;
    resvg::render(&tree, tiny_skia::Transform::from_scale(SCALE, SCALE), &mut pixels.as_mut());
    pixels.encode_png().map_err(|error| error.to_string())
}

/// Returns about six round numbers on an axis, for its ticks.
fn ticks((from, to): (f64, f64)) -> Vec<f64> {
    let step = step((from, to));
    let first = (from / step).ceil();
    let count = ((to / step).floor() - first).clamp(0.0, 20.0) as usize;
    (0..=count).map(|index| (first + index as f64) * step).collect()
}

fn step((from, to): (f64, f64)) -> f64 {
    let rough = (to - from) / 7.0;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().find(|factor| factor * power >= rough);
    step.unwrap_or(10.0) * power
}

/// Returns the text of a tick, with as many decimals as the step needs and with thousands separators.
fn number(value: f64, range: (f64, f64)) -> String {
    let decimals = (-step(range).log10().floor()).clamp(0.0, 9.0) as usize;
    let text = format!("{value:.decimals$}");
    let (whole, rest) =
        text.split_once('.').map_or((text.as_str(), None), |(whole, rest)| (whole, Some(rest)));
    let (sign, digits) = whole.strip_prefix('-').map_or(("", whole), |digits| ("-", digits));
    let mut shown = String::from(sign);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index) % 3 == 0 {
            shown.push(',');
        }
        shown.push(digit);
    }
    if let Some(rest) = rest {
        shown.push('.');
        shown.push_str(rest);
    }
    shown
}

pub(super) fn escaped(text: &str) -> String {
    // XML does not allow control characters, which `printable` replaces.
    memtrace_trace::text::printable(text).replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plots_have_round_ticks() {
        assert_eq!(ticks((0.0, 13.0)), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0]);
        let shown: Vec<String> =
            ticks((0.0, 12_000.0)).into_iter().map(|v| number(v, (0.0, 12_000.0))).collect();
        assert_eq!(shown, ["0", "2,000", "4,000", "6,000", "8,000", "10,000", "12,000"]);
        let shown: Vec<String> = ticks((0.0, 0.9)).into_iter().map(|v| number(v, (0.0, 0.9))).collect();
        assert_eq!(shown, ["0.0", "0.2", "0.4", "0.6", "0.8"]);
        assert_eq!(number(-1_234_567.0, (-2e6, 0.0)), "-1,234,567");
    }

    #[test]
    fn plots_render_text_into_the_png() {
        let axis = |label: &str| Axis { label: label.to_owned(), range: (0.0, 10.0) };
        let blank = Figure::new(&[], axis(""), axis(""));
        let mut figure = Figure::new(&["a < b & c".to_owned()], axis("x"), axis("y"));
        figure.line(&[(0.0, 0.0), (10.0, 10.0)], "red", false, "line");
        let svg = figure.svg();
        assert!(svg.contains("a &lt; b &amp; c"));
        let drawn = png(&svg).unwrap();
        assert!(drawn.starts_with(b"\x89PNG"));
        // Without the font, the text would be missing, and the file would be as small as the blank figure.
        assert!(drawn.len() > png(&blank.svg()).unwrap().len() + 500);
    }
}
