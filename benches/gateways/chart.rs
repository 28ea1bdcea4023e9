//! Chart: a bar for each row, in SVG for light and dark pages.

use std::fmt::Write as _;

use crate::figures::Interval;

/// Bar of the chart. All figures are fractions of the peer's cost.
pub struct Entry {
    pub name: String,
    pub ratio: Interval,
    /// Limit of Strait's cost, if there is one.
    pub bar: Option<f64>,
}

/// Widths of the columns: the names, the bars (up to this ratio), the figures.
const NAMES: f64 = 370.0;
const BARS: f64 = 390.0;
const FIGURES: f64 = 130.0;
const RATIO_MAX: f64 = 1.2;
/// Heights of the head, of a row, and of the foot.
const HEAD: f64 = 54.0;
const ROW: f64 = 26.0;
const FOOT: f64 = 44.0;

/// Colours of light and dark pages, which an SVG image selects itself.
const STYLE: &str = "
    text { font: 13px system-ui, sans-serif; fill: #1f2328 }
    .small { font-size: 11px; fill: #59636e }
    .title { font-size: 15px; font-weight: 600 }
    .grid { stroke: #d1d9e0 } .peer { stroke: #59636e; stroke-dasharray: 4 3 }
    .bar { fill: #2f81c7 } .over { fill: #c4672f }
    .spread { stroke: #1f2328; stroke-width: 1.5 } .limit { stroke: #1a7f37; stroke-width: 3 }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6edf3 } .small { fill: #9198a1 }
      .grid { stroke: #3d444d } .peer { stroke: #9198a1 }
      .bar { fill: #4493e0 } .over { fill: #e08a4f }
      .spread { stroke: #e6edf3 } .limit { stroke: #57ab5a }
    }";

/// Returns the whole file.
pub fn svg(title: &str, entries: &[Entry]) -> String {
    let width = NAMES + BARS + FIGURES;
    let bottom = HEAD + ROW * entries.len() as f64;
    let height = bottom + FOOT;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
         width=\"{width}\" height=\"{height}\" role=\"img\">\n\
         <title>{title}</title>\n<style>{STYLE}\n</style>\n",
        title = escaped(title),
    );
    text(&mut svg, (8.0, 22.0), "title", "start", title);
    for tick in [0.0, 0.25, 0.5, 0.75, 1.0] {
        let class = if tick < 1.0 { "grid" } else { "peer" };
        vertical(&mut svg, class, tick, HEAD - 6.0, bottom);
        let label = if tick < 1.0 { "" } else { " = the peer" };
        let label = format!("{tick}{label}");
        text(&mut svg, (at(tick), HEAD - 12.0), "small", "middle", &label);
    }
    for (index, entry) in entries.iter().enumerate() {
        row(&mut svg, entry, HEAD + ROW * index as f64);
    }
    let legend = "Limit: Strait's cost as a part of the peer's, less is better. \
                  Line in it: 95 % interval. Green: what it may cost.";
    text(&mut svg, (8.0, bottom + 28.0), "small", "start", legend);
    svg += "</svg>\n";
    svg
}

fn row(svg: &mut String, entry: &Entry, top: f64) {
    let Interval { median, low, high } = entry.ratio;
    let middle = top + ROW / 2.0;
    let baseline = middle + 4.5;
    text(svg, (NAMES - 10.0, baseline), "", "end", &entry.name);
    let over = entry.bar.is_some_and(|bar| median > bar);
    let class = if over { "over" } else { "bar" };
    let (x, y) = (at(0.0), top + 5.0);
    let (width, height) = (at(median) - x, ROW - 10.0);
    let _ = writeln!(
        svg,
        "<rect class=\"{class}\" x=\"{x}\" y=\"{y}\" width=\"{width:.1}\" height=\"{height}\"/>"
    );
    let _ = writeln!(
        svg,
        "<line class=\"spread\" x1=\"{:.1}\" x2=\"{:.1}\" y1=\"{middle}\" y2=\"{middle}\"/>",
        at(low),
        at(high)
    );
    let mut figures = digits(median);
    if let Some(bar) = entry.bar {
        vertical(svg, "limit", bar, top + 3.0, top + ROW - 3.0);
        let _ = write!(figures, " ({})", digits(bar));
    }
    text(svg, (NAMES + BARS + 8.0, baseline), "", "start", &figures);
}

/// Returns the position of a ratio. A ratio beyond the chart is at its edge.
fn at(ratio: f64) -> f64 {
    NAMES + BARS * ratio.clamp(0.0, RATIO_MAX) / RATIO_MAX
}

fn vertical(svg: &mut String, class: &str, ratio: f64, top: f64, bottom: f64) {
    let x = at(ratio);
    let _ = writeln!(
        svg,
        "<line class=\"{class}\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{top}\" y2=\"{bottom}\"/>"
    );
}

fn text(svg: &mut String, (x, y): (f64, f64), class: &str, anchor: &str, what: &str) {
    let what = escaped(what);
    let _ = writeln!(
        svg,
        "<text class=\"{class}\" text-anchor=\"{anchor}\" x=\"{x:.1}\" y=\"{y:.1}\">{what}</text>"
    );
}

/// Formats a ratio with two digits, or more if it is small.
pub fn digits(ratio: f64) -> String {
    if ratio < 0.095 { format!("{ratio:.3}") } else { format!("{ratio:.2}") }
}

/// Escapes text for XML.
pub fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
