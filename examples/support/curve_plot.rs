//! A plot of perplexity against speed: a line a predictor, a dot a mode.

use std::fmt::Write;

use super::svg::{self, begin, line, text, upright};

const WIDTH: f64 = 820.0;
const HEIGHT: f64 = 520.0;
/// The rectangle that the lines lie in: left, top, right, bottom.
const FRAME: [f64; 4] = [90.0, 60.0, 580.0, 440.0];
const STEPS: u32 = 5;

/// What one predictor gives at each setting of its knob: tokens a second, perplexity.
#[derive(Debug)]
pub(crate) struct Curve {
    pub(crate) name: String,
    pub(crate) points: Vec<(f64, f64)>,
}

/// The plot as the text of an SVG file.
pub(crate) fn curve_plot(title: &str, curves: &[Curve]) -> String {
    let mut svg = begin(WIDTH, HEIGHT);
    text(&mut svg, (FRAME[0], 36.0), "start", 18, title);
    let all = || curves.iter().flat_map(|curve| &curve.points);
    let x = Axis::over(all().map(|point| point.0));
    let y = Axis::over(all().map(|point| point.1));
    axes(&mut svg, &x, &y);
    for (i, curve) in curves.iter().enumerate() {
        let colour = format!("hsl({:.0} 70% 42%)", 360.0 * i as f64 / curves.len().max(1) as f64);
        let at = |&(speed, perplexity): &_| place(x.share(speed), y.share(perplexity));
        for (px, py) in curve.points.iter().map(at) {
            let _ = writeln!(svg, r#"<circle cx="{px:.1}" cy="{py:.1}" r="4" fill="{colour}"/>"#);
        }
        let style = format!(r#"stroke="{colour}" stroke-width="2""#);
        svg::curve(&mut svg, curve.points.iter().map(at), &style, &curve.name);
        let (left, top) = (FRAME[2] + 20.0, FRAME[1] + 10.0 + 23.0 * i as f64);
        let _ = writeln!(
            svg,
            r#"<line x1="{left}" y1="{top}" x2="{}" y2="{top}" stroke="{colour}" stroke-width="4"/>"#,
            left + 24.0
        );
        text(&mut svg, (left + 32.0, top + 5.0), "start", 13, &curve.name);
    }
    svg.push_str("</svg>\n");
    svg
}

/// Values from the least to the greatest, with a little room around.
struct Axis {
    low: f64,
    high: f64,
}

impl Axis {
    fn over(values: impl Iterator<Item = f64>) -> Self {
        let finite = values.filter(|value| value.is_finite());
        let (low, high) = finite.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| {
            (low.min(value), high.max(value))
        });
        if low > high {
            return Self { low: 0.0, high: 1.0 };
        }
        let room = (0.05 * (high - low)).max(1e-3 * high.abs()).max(1e-9);
        Self { low: low - room, high: high + room }
    }

    fn share(&self, value: f64) -> f64 {
        (value - self.low) / (self.high - self.low)
    }

    fn at(&self, share: f64) -> f64 {
        self.low + share * (self.high - self.low)
    }
}

/// Where a point of the unit square lies on the page.
fn place(x: f64, y: f64) -> (f64, f64) {
    let [left, top, right, bottom] = FRAME;
    (left + x * (right - left), bottom - y * (bottom - top))
}

fn axes(svg: &mut String, x: &Axis, y: &Axis) {
    for step in 0..=STEPS {
        let share = f64::from(step) / f64::from(STEPS);
        let ((at, bottom), (_, top)) = (place(share, 0.0), place(share, 1.0));
        line(svg, (at, bottom), (at, top));
        text(svg, (at, bottom + 20.0), "middle", 13, &format!("{:.1}", x.at(share)));
        let ((left, at), (right, _)) = (place(0.0, share), place(1.0, share));
        line(svg, (left, at), (right, at));
        text(svg, (left - 8.0, at + 5.0), "end", 13, &format!("{:.3}", y.at(share)));
    }
    let (middle, bottom) = place(0.5, 0.0);
    text(svg, (middle, bottom + 46.0), "middle", 14, "decoded tokens a second");
    let (left, middle) = place(0.0, 0.5);
    upright(svg, (left - 66.0, middle), "perplexity");
}
